"""Kernels: compilation, loading, and conversion of arguments to kernel parameters."""
