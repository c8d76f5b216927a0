"""Regular languages over characters: expressions, and regular expressions as expressions."""
