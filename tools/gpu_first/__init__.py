"""Ten minutes of measurements on a GPU: ``python -m graft.tools.gpu_first`` or ``make gpu``."""
