"""Capture two branches of kernels that join, and launch the graph several times."""

import numpy as np
from cuda.core import Device, LaunchConfig, LegacyPinnedMemoryResource, Program, launch

SOURCE = """
extern "C" __global__ void add(int* p, int by) { p[threadIdx.x] += by; }
extern "C" __global__ void join(const int* p, const int* q, int* out) {
  out[threadIdx.x] += p[threadIdx.x] * q[threadIdx.x];
}
"""
THREADS = 32
device = Device()
device.set_current()
stream = device.create_stream()
code = Program(SOURCE, "c++").compile("cubin")
add, join = code.get_kernel("add"), code.get_kernel("join")
config = LaunchConfig(grid=1, block=THREADS)
buffers = [device.allocate(THREADS * 4, stream=stream) for _ in range(3)]
for buffer in buffers:
    buffer.fill(np.int32(0), stream=stream)
left, right, out = buffers
builder = stream.create_graph_builder()
builder.begin_building()
launch(builder, config, add, left, np.int32(1))
first, second = builder.split(2)
launch(first, config, add, left, np.int32(2))
launch(second, config, add, right, np.int32(5))
builder = type(builder).join(first, second)
launch(builder, config, join, left, right, out)
graph = builder.end_building().complete()
for _ in range(3):
    graph.launch(stream)
host = LegacyPinnedMemoryResource().allocate(THREADS * 4)
out.copy_to(host, stream=stream)
stream.sync()
expected = 3 * 5 + 6 * 10 + 9 * 15
np.testing.assert_array_equal(np.from_dlpack(host).view(np.int32), expected)
print("three launches of a captured graph:", expected)
