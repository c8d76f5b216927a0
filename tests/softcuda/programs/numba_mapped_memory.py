"""Memory that host and device share: mapped and managed arrays, and views of device arrays."""

import numpy as np
from numba import cuda


@cuda.jit
def double(data):
    i = cuda.grid(1)
    if i < data.size:
        data[i] *= 2


@cuda.jit
def transpose(source, target):
    row, column = cuda.grid(2)
    if row < source.shape[0] and column < source.shape[1]:
        target[column, row] = source[row, column]


mapped = cuda.mapped_array(64, np.float32)
mapped[:] = np.arange(64)
double[1, 64](mapped)
cuda.synchronize()
np.testing.assert_array_equal(mapped, 2 * np.arange(64))
managed = cuda.managed_array(64, np.int64)
managed[:] = 5
double[1, 64](managed)
cuda.synchronize()
assert (managed == 10).all()
matrix = np.arange(42, dtype=np.float64).reshape(6, 7)
source = cuda.to_device(matrix)
target = cuda.device_array((7, 6), np.float64)
transpose[(1, 1), (8, 8)](source, target)
np.testing.assert_array_equal(target.copy_to_host(), matrix.T)
double[1, 8](source[2])
np.testing.assert_array_equal(source.copy_to_host()[2], 2 * matrix[2])
np.testing.assert_array_equal(source[1:3].copy_to_host()[0], matrix[1])
print("mapped, managed and sliced arrays")
