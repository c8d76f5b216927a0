"""Timelines of replays, and drawings of a round's graph."""
