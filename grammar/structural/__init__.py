"""Structural formats: XGrammar's trees of tags, schemas, patterns and free text."""
