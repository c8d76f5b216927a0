"""Grammars that are regular languages, as finite automata over bytes."""
