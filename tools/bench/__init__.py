"""Benchmarks of drafters, serving, grammars, generation, the demo model, memory and host work.

The module `harness` has the common parts of the benchmarks: command line, output files and charts.
"""
