"""Measure a GPU for ten minutes: ``python -m graft.tools.gpu_first`` or ``make gpu``."""
