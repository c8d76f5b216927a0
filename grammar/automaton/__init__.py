"""Lowering of grammars to rules in brackets, and automata on the device."""
