"""Histogram with atomics: a private histogram in shared memory, then one in device memory."""

import numpy as np
from numba import cuda, int32

BINS = 32


@cuda.jit
def histogram(values, low, high, counts):
    local = cuda.shared.array(BINS, int32)
    thread = cuda.threadIdx.x
    if thread < BINS:
        local[thread] = 0
    cuda.syncthreads()
    i = cuda.grid(1)
    if i < values.size:
        place = int32((values[i] - low) / (high - low) * BINS)
        cuda.atomic.add(local, min(max(place, 0), BINS - 1), 1)
    cuda.syncthreads()
    if thread < BINS:
        cuda.atomic.add(counts, thread, local[thread])


@cuda.jit
def extremes(values, result):
    i = cuda.grid(1)
    if i < values.size:
        cuda.atomic.min(result, 0, values[i])
        cuda.atomic.max(result, 1, values[i])


values = np.random.default_rng(2).uniform(0, 1, 700)
counts = cuda.to_device(np.zeros(BINS, np.int32))
histogram[6, 128](cuda.to_device(values), 0.0, 1.0, counts)
np.testing.assert_array_equal(counts.copy_to_host(), np.histogram(values, BINS, (0, 1))[0])
result = cuda.to_device(np.array([9.0, -9.0]))
extremes[6, 128](cuda.to_device(values), result)
assert result.copy_to_host().tolist() == [values.min(), values.max()]
print("histogram of", values.size, "values")
