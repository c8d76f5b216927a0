"""Test for deadlocks between the GIL and the locks of a CUDA driver."""
