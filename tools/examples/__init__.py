"""One example per room; each is a program: ``python -m graft.tools.examples.NAME``."""
