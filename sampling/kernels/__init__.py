"""CUDA sources of the sampling kernels, and their loading."""
