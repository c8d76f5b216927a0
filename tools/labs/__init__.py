"""Experiments on host work in CUDA graphs: callback latency and GIL deadlocks."""
