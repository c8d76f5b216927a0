"""Sum of an array: a tree in shared memory per block, and one atomic addition per block."""

import numpy as np
from numba import cuda, float64

THREADS = 128


@cuda.jit
def block_sum(values, total):
    partial = cuda.shared.array(THREADS, float64)
    thread = cuda.threadIdx.x
    i = cuda.blockIdx.x * cuda.blockDim.x + thread
    partial[thread] = values[i] if i < values.size else 0.0
    cuda.syncthreads()
    width = THREADS // 2
    while width > 0:
        if thread < width:
            partial[thread] += partial[thread + width]
        cuda.syncthreads()
        width //= 2
    if thread == 0:
        cuda.atomic.add(total, 0, partial[0])


values = np.linspace(-1.0, 3.0, 1500)
total = cuda.to_device(np.zeros(1))
blocks = (values.size + THREADS - 1) // THREADS
block_sum[blocks, THREADS](cuda.to_device(values), total)
np.testing.assert_allclose(total.copy_to_host()[0], values.sum(), rtol=1e-12)
print("sum of", values.size, "values")
