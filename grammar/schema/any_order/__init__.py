"""Lark grammars of objects with keys in any order, for ``key_order="any"``."""
