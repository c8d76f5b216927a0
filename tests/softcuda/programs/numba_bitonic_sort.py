"""Bitonic sort in shared memory of dynamic size, with keys and values."""

import numpy as np
from numba import cuda, float32, int32

N = 128


@cuda.jit
def sort(keys, values):
    key = cuda.shared.array(0, float32)[:N]
    place = cuda.shared.array(0, int32)[N : 2 * N]
    i = cuda.threadIdx.x
    key[i] = keys[cuda.blockIdx.x, i]
    place[i] = values[cuda.blockIdx.x, i]
    cuda.syncthreads()
    size = 2
    while size <= N:
        stride = size // 2
        while stride > 0:
            j = i ^ stride
            if j > i:
                ascending = (i & size) == 0
                if (key[i] > key[j]) == ascending:
                    key[i], key[j] = key[j], key[i]
                    place[i], place[j] = place[j], place[i]
            cuda.syncthreads()
            stride //= 2
        size *= 2
    keys[cuda.blockIdx.x, i] = key[i]
    values[cuda.blockIdx.x, i] = place[i]


keys = np.random.default_rng(7).standard_normal((3, N)).astype(np.float32)
values = np.tile(np.arange(N, dtype=np.int32), (3, 1))
sorted_keys, sorted_values = keys.copy(), values.copy()
sort[3, N, 0, 2 * N * 4](sorted_keys, sorted_values)
np.testing.assert_array_equal(sorted_keys, np.sort(keys, axis=1))
np.testing.assert_array_equal(sorted_values, np.argsort(keys, axis=1))
print("sorted 3 rows of", N)
