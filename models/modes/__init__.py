"""Modes in which the grammar work of a round can run, and the choice among them."""
