"""The first ten minutes on a GPU: ``python -m graft.tools.gpu_first``, or ``make gpu``."""
