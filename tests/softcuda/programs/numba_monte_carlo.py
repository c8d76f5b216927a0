"""An estimate of pi with numba's random numbers, and a check that the seed decides them."""

import math

import numpy as np
from numba import cuda
from numba.cuda.random import (
    create_xoroshiro128p_states,
    xoroshiro128p_normal_float64,
    xoroshiro128p_uniform_float32,
)

THREADS = 64
BLOCKS = 4


@cuda.jit
def estimate(states, samples, hits, normals):
    thread = cuda.grid(1)
    inside = 0
    for _ in range(samples):
        x = xoroshiro128p_uniform_float32(states, thread)
        y = xoroshiro128p_uniform_float32(states, thread)
        if x * x + y * y <= 1.0:
            inside += 1
    hits[thread] = inside
    normals[thread] = xoroshiro128p_normal_float64(states, thread)


def run(seed):
    states = create_xoroshiro128p_states(THREADS * BLOCKS, seed=seed)
    hits = cuda.device_array(THREADS * BLOCKS, np.int32)
    normals = cuda.device_array(THREADS * BLOCKS, np.float64)
    estimate[BLOCKS, THREADS](states, 50, hits, normals)
    return hits.copy_to_host(), normals.copy_to_host()


hits, normals = run(1)
assert abs(4 * hits.mean() / 50 - math.pi) < 0.15
assert abs(normals.mean()) < 0.3 and 0.7 < normals.std() < 1.3
again, _ = run(1)
other, _ = run(2)
assert (hits == again).all() and (hits != other).any()
print("pi from", 50 * hits.size, "samples")
