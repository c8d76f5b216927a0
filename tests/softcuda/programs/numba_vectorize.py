"""Functions for whole arrays: vectorize, guvectorize and cuda.reduce."""

import math

import numpy as np
from numba import cuda, guvectorize, vectorize


@vectorize(["float32(float32, float32)", "float64(float64, float64)"], target="cuda")
def distance(x, y):
    return math.sqrt(x * x + y * y)


@guvectorize(["void(float64[:], float64[:], float64[:])"], "(n),(n)->()", target="cuda")
def dot(a, b, result):
    total = 0.0
    for i in range(a.size):
        total += a[i] * b[i]
    result[0] = total


@cuda.reduce
def largest(a, b):
    return a if a > b else b


rng = np.random.default_rng(5)
x, y = rng.standard_normal((2, 300))
np.testing.assert_allclose(distance(x, y), np.hypot(x, y))
x32, y32 = x.astype(np.float32), y.astype(np.float32)
assert distance(x32, y32).dtype == np.float32
on_device = distance(cuda.to_device(x), cuda.to_device(y))
np.testing.assert_allclose(on_device.copy_to_host(), np.hypot(x, y))
rows, columns = rng.standard_normal((2, 20, 15))
np.testing.assert_allclose(dot(rows, columns), (rows * columns).sum(axis=1))
assert largest(x) == x.max()
print("two array functions and a reduction")
