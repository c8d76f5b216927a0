"""Conway's game of life on a torus: a two-dimensional grid and two arrays that are swapped."""

import numpy as np
from numba import cuda


@cuda.jit
def step(now, after):
    row, column = cuda.grid(2)
    height, width = now.shape
    if row >= height or column >= width:
        return
    neighbors = 0
    for dy in (-1, 0, 1):
        for dx in (-1, 0, 1):
            if dy != 0 or dx != 0:
                neighbors += now[(row + dy) % height, (column + dx) % width]
    alive = now[row, column]
    after[row, column] = 1 if neighbors == 3 or (alive == 1 and neighbors == 2) else 0


def reference(cells):
    shifts = [(y, x) for y in (-1, 0, 1) for x in (-1, 0, 1) if (y, x) != (0, 0)]
    neighbors = sum(np.roll(cells, shift, (0, 1)) for shift in shifts)
    return ((neighbors == 3) | ((cells == 1) & (neighbors == 2))).astype(np.uint8)


cells = (np.random.default_rng(6).random((20, 27)) < 0.4).astype(np.uint8)
now, after = cuda.to_device(cells), cuda.device_array_like(cells)
for _ in range(5):
    step[(3, 4), (8, 8)](now, after)
    now, after = after, now
    cells = reference(cells)
np.testing.assert_array_equal(now.copy_to_host(), cells)
print("five generations,", int(cells.sum()), "cells are alive")
