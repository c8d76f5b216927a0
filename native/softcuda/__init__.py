"""The soft device: a libcuda.so.1 that runs on the CPU, and its kernel compiler."""
