"""Kernels of the decoder models, by kind: products, attention, norms and elementwise operations."""
