"""Benchmarks of grammar backends, decoding rounds, the demo model, serving and kernels."""
