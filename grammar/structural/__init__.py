"""Structural formats: trees of tags, schemas, patterns and free text of XGrammar."""
