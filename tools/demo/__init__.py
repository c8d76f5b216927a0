"""Demo of graft: ten requests with ten grammars in one batch, and the tasks of the demo model."""
