"""The soft device, a ``libcuda.so.1`` that runs on the CPU, and its kernel compiler.

``README.md`` in this folder describes its use, settings and limits; ``INVARIANTS.md`` lists the
rules of its implementation.
"""
