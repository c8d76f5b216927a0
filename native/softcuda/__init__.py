"""The soft device: a libcuda.so.1 that runs on the CPU, and its kernel compiler.

Use, settings and limits: ``README.md`` beside this. Its rules: ``INVARIANTS.md``.
"""
