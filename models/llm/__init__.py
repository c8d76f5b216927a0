"""Transformer language models: configuration, weights, layers, tensor parallelism."""
