"""Generation loops: many rounds in one launch of a graph."""
