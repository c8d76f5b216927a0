"""Two streams with pinned arrays and events; one stream waits for the other."""

import numpy as np
from numba import cuda


@cuda.jit
def increment(data, by):
    i = cuda.grid(1)
    if i < data.size:
        data[i] += by


host = cuda.pinned_array(256, np.int32)
host[:] = np.arange(256)
back = cuda.pinned_array(256, np.int32)
first, second = cuda.stream(), cuda.stream()
begin, ready = cuda.event(), cuda.event()
begin.record(first)
device = cuda.to_device(host, stream=first)
for by in (1, 10, 100):
    increment[2, 128, first](device, by)
ready.record(first)
ready.wait(second)
increment[2, 128, second](device, 1000)
device.copy_to_host(back, stream=second)
second.synchronize()
np.testing.assert_array_equal(back, np.arange(256) + 1111)
assert ready.query() and cuda.event_elapsed_time(begin, ready) >= 0
pageable = np.zeros(256, np.int32)
with cuda.pinned(pageable), first.auto_synchronize():
    device.copy_to_host(pageable, stream=first)
    increment[2, 128, first](device, -1111)
np.testing.assert_array_equal(pageable, back)
np.testing.assert_array_equal(device.copy_to_host(), np.arange(256))
print("two streams and two events")
