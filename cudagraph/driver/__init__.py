"""The CUDA driver or the soft device: calls, the context, memory and element types."""
