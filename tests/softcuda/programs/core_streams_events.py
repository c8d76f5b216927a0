"""Streams with priorities, events with timing, and a stream that waits for another one."""

import numpy as np
from cuda.core import (
    Device,
    EventOptions,
    LaunchConfig,
    LegacyPinnedMemoryResource,
    Program,
    StreamOptions,
    launch,
)

SOURCE = """
extern "C" __global__ void twice_plus(int* p, int by) { p[threadIdx.x] = 2 * p[threadIdx.x] + by; }
"""
device = Device()
device.set_current()
urgent = device.create_stream(options=StreamOptions(nonblocking=True, priority=-1))
normal = device.create_stream()
kernel = Program(SOURCE, "c++").compile("cubin").get_kernel("twice_plus")
config = LaunchConfig(grid=1, block=64)
host = LegacyPinnedMemoryResource().allocate(256)
view = np.from_dlpack(host).view(np.int32)
view[:] = np.arange(64)
begin = urgent.record(options=EventOptions(timing_enabled=True))
launch(urgent, config, kernel, host, np.int32(1))
end = urgent.record(options=EventOptions(timing_enabled=True))
normal.wait(end)
launch(normal, config, kernel, host, np.int32(3))
normal.sync()
np.testing.assert_array_equal(view, 2 * (2 * np.arange(64) + 1) + 3)
assert begin.is_done and end.is_done and end - begin >= 0
assert urgent.is_nonblocking and urgent.priority <= normal.priority
assert urgent != normal and device.default_stream is not None
for resource in (begin, end, urgent, normal):
    resource.close()
print("two streams and two events")
