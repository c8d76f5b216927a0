"""Timelines of replays, and pictures of a round's graph."""
