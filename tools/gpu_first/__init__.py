"""Check and measure a GPU in at most 8.3 minutes (``--minutes``).

Run it with ``python -m graft.tools.gpu_first`` or ``make gpu``.
"""
