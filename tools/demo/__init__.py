"""Demo of graft: ten requests in one batch, most with a grammar; and tasks of the demo model."""
