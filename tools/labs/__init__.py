"""Laboratories of what host work in a graph costs, and of how it can deadlock."""
