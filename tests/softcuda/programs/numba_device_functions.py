"""Device functions, constant arrays and a local array: a polynomial and Newton's method."""

import numpy as np
from numba import cuda, float64

COEFFICIENTS = np.array([2.0, -3.0, 0.5, 0.25])


@cuda.jit(device=True)
def polynomial(coefficients, x):
    total = 0.0
    for k in range(coefficients.size - 1, -1, -1):
        total = total * x + coefficients[k]
    return total


@cuda.jit(device=True)
def square_root(x):
    guess = x
    for _ in range(40):
        guess = 0.5 * (guess + x / guess)
    return guess


@cuda.jit
def evaluate(points, values, roots):
    coefficients = cuda.const.array_like(COEFFICIENTS)
    powers = cuda.local.array(4, float64)
    i = cuda.grid(1)
    if i < points.size:
        values[i] = polynomial(coefficients, points[i])
        powers[0] = 1.0
        for k in range(1, 4):
            powers[k] = powers[k - 1] * points[i]
        roots[i] = square_root(1.0 + powers[2])


points = np.linspace(-2, 2, 77)
values = cuda.device_array_like(points)
roots = cuda.device_array_like(points)
evaluate[2, 64](cuda.to_device(points), values, roots)
np.testing.assert_allclose(values.copy_to_host(), np.polyval(COEFFICIENTS[::-1], points))
np.testing.assert_allclose(roots.copy_to_host(), np.sqrt(1 + points**2))
print("polynomial at", points.size, "points")
