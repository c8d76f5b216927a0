"""Benchmarks: grammars, rounds, the demo model, kernels."""
