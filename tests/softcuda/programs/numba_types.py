"""Element types: small integers, double precision, complex numbers, bool and records."""

import cmath

import numpy as np
from numba import cuda

point = np.dtype([("x", np.float32), ("y", np.float32), ("id", np.int32)])


@cuda.jit
def small(a, b, result):
    i = cuda.grid(1)
    if i < a.size:
        result[i] = (a[i] ^ b[i]) & 0x5A


@cuda.jit
def rotate(values, angle, far):
    i = cuda.grid(1)
    if i < values.size:
        values[i] *= cmath.exp(1j * angle)
        far[i] = abs(values[i]) > 1.0


@cuda.jit
def move(points, by):
    i = cuda.grid(1)
    if i < points.size:
        points[i].x += by
        points[i].y -= by
        points[i].id = i


rng = np.random.default_rng(4)
a, b = rng.integers(-128, 128, (2, 50)).astype(np.int8)
result = np.zeros(50, np.int8)
small[1, 64](a, b, result)
np.testing.assert_array_equal(result, (a ^ b) & 0x5A)
values = (rng.standard_normal(50) + 1j * rng.standard_normal(50)).astype(np.complex128)
turned, far = values.copy(), np.zeros(50, np.bool_)
rotate[1, 64](turned, 0.3, far)
np.testing.assert_allclose(turned, values * np.exp(0.3j))
np.testing.assert_array_equal(far, np.abs(values) > 1.0)
points = np.zeros(50, point)
move[1, 64](points, np.float32(1.5))
assert (points["x"] == 1.5).all() and (points["y"] == -1.5).all()
assert points["id"].tolist() == list(range(50))
print("int8, complex128, bool and a record")
