"""Product of matrices with tiles in shared memory and edges that do not fill a tile."""

import numpy as np
from numba import cuda, float32

TILE = 8


@cuda.jit
def matmul(a, b, c):
    left = cuda.shared.array((TILE, TILE), float32)
    right = cuda.shared.array((TILE, TILE), float32)
    row, column = cuda.grid(2)
    ty = cuda.threadIdx.x
    tx = cuda.threadIdx.y
    total = float32(0.0)
    for k in range(0, a.shape[1], TILE):
        left[ty, tx] = a[row, k + tx] if row < a.shape[0] and k + tx < a.shape[1] else 0.0
        right[ty, tx] = b[k + ty, column] if k + ty < b.shape[0] and column < b.shape[1] else 0.0
        cuda.syncthreads()
        for m in range(TILE):
            total += left[ty, m] * right[m, tx]
        cuda.syncthreads()
    if row < c.shape[0] and column < c.shape[1]:
        c[row, column] = total


rng = np.random.default_rng(1)
a = rng.standard_normal((13, 21)).astype(np.float32)
b = rng.standard_normal((21, 18)).astype(np.float32)
c = cuda.device_array((13, 18), np.float32)
grid = (-(-13 // TILE), -(-18 // TILE))
matmul[grid, (TILE, TILE)](cuda.to_device(a), cuda.to_device(b), c)
np.testing.assert_allclose(c.copy_to_host(), a @ b, rtol=1e-4, atol=1e-5)
print("product of 13x21 and 21x18")
