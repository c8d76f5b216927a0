"""One round of speculative decoding as a CUDA graph."""
