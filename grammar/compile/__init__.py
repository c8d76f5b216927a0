"""From a grammar's statement to its compiled form, off the path of every round."""
