"""Benchmarks of drafters, serving, grammars, generation loops, the demo model and host work.

The module `harness` has the common parts of the benchmarks: command line, output files and charts.
"""
