"""Regular languages: expressions that describe them, and a parser of regular expressions."""
