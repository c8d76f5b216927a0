"""Build a graph node by node: memset, kernels, copy, an event and a join of two branches."""

import numpy as np
from cuda.core import Device, LaunchConfig, LegacyPinnedMemoryResource, Program
from cuda.core.graph import GraphDefinition

SOURCE = """
extern "C" __global__ void add(int* p, int by) { p[threadIdx.x] += by; }
extern "C" __global__ void sum(const int* p, const int* q, int* out) {
  out[threadIdx.x] = p[threadIdx.x] + q[threadIdx.x];
}
"""
THREADS = 16
BYTES = THREADS * 4
device = Device()
device.set_current()
stream = device.create_stream()
code = Program(SOURCE, "c++").compile("cubin")
add, total = code.get_kernel("add"), code.get_kernel("sum")
config = LaunchConfig(grid=1, block=THREADS)
p, q, out = (device.allocate(BYTES, stream=stream) for _ in range(3))
host = LegacyPinnedMemoryResource().allocate(BYTES)
stream.sync()
graph = GraphDefinition()
left = graph.memset(p, 0, BYTES).launch(config, add, p, np.int32(3))
right = graph.memset(q, 1, BYTES).launch(config, add, q, np.int32(4))
event = device.create_event()
last = graph.join(left, right).launch(config, total, p, q, out)
last.record(event).memcpy(host, out, BYTES)
assert len(graph.nodes()) == 8 and len(graph.edges()) == 7
run = graph.instantiate()
for _ in range(2):
    run.launch(stream)
stream.sync()
assert event.is_done
expected = 3 + 0x01010101 + 4
np.testing.assert_array_equal(np.from_dlpack(host).view(np.int32), expected)
print("a graph of", len(graph.nodes()), "nodes")
