"""Grammars of objects whose keys come in any order: what is behind ``key_order="any"``."""
