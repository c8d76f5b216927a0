"""Functions of a warp: shuffles, votes, lane numbers and population counts."""

import numpy as np
from numba import cuda, int32

FULL = 0xFFFFFFFF


@cuda.jit
def warp_scan(values, sums, votes):
    i = cuda.grid(1)
    lane = cuda.laneid
    value = values[i]
    total = value
    offset = 1
    while offset < 32:
        other = cuda.shfl_up_sync(FULL, total, offset)
        if lane >= offset:
            total += other
        offset *= 2
    sums[i] = total
    even = cuda.ballot_sync(FULL, value % 2 == 0)
    if lane == 0:
        votes[i // 32, 0] = cuda.popc(even)
        votes[i // 32, 1] = cuda.ffs(even)
    if cuda.all_sync(FULL, value >= 0):
        votes[i // 32, 2] = int32(1)


values = np.random.default_rng(3).integers(0, 50, 128).astype(np.int32)
sums = cuda.device_array(128, np.int32)
votes = cuda.to_device(np.zeros((4, 3), np.int32))
warp_scan[2, 64](cuda.to_device(values), sums, votes)
warps = values.reshape(4, 32)
np.testing.assert_array_equal(sums.copy_to_host().reshape(4, 32), warps.cumsum(axis=1))
found = votes.copy_to_host()
np.testing.assert_array_equal(found[:, 0], (warps % 2 == 0).sum(axis=1))
np.testing.assert_array_equal(found[:, 1], (warps % 2 == 0).argmax(axis=1) + 1)
assert found[:, 2].all()
print("scan of 4 warps")
