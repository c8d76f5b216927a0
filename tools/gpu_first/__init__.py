"""Check and measure a GPU in at most nine minutes.

Run it with ``make gpu``, or in a clone with ``python -m graft.tools.gpu_first``. `runner` runs the
tests of the repository on a GPU (``make test-cuda``).
"""
