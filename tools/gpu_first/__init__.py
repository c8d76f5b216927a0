"""Check and measure a GPU in 8.3 minutes: ``python -m graft.tools.gpu_first`` or ``make gpu``."""
