"""Killable child processes for work that may hang, crash or exhaust memory."""
