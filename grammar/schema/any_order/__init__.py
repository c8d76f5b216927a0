"""Grammars of objects whose keys come in any order: an option (``key_order="any"``)."""
