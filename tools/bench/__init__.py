"""Benchmarks of drafters, serving, grammars, generation loops, the demo model and host work.

The module `harness` has the command line, the output files and the charts that they share.
"""
