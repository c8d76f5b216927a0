"""Expressions of grammar rules, and parsers of regular expressions and of EBNF."""
