"""Example programs, at least one for each package: ``python -m graft.tools.examples.NAME``."""
