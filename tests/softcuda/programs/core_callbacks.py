"""CPU work between kernels of a graph: callbacks that see what the kernels have written."""

import ctypes

import numpy as np
from cuda.core import Device, LaunchConfig, LegacyPinnedMemoryResource, Program, launch
from cuda.core.graph import GraphDefinition, GraphNode

SOURCE = """
extern "C" __global__ void add(int* p, int by) { p[0] += by; }
"""
device = Device()
device.set_current()
stream = device.create_stream()
add = Program(SOURCE, "c++").compile("cubin").get_kernel("add")
one = LaunchConfig(grid=1, block=1)
word = LegacyPinnedMemoryResource().allocate(4)
view = np.from_dlpack(word).view(np.int32)
view[0] = 0
seen = []
calls = ctypes.c_int(0)


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def count(data):
    calls.value += 1


graph = GraphDefinition()
node = graph.launch(one, add, word, np.int32(1))
node = node.callback(lambda: seen.append(int(view[0])))
# A callback node has attributes "launch" and "callback" of its own: call the methods of the class.
node = GraphNode.launch(node, one, add, word, np.int32(10)).callback(count)
GraphNode.callback(node, lambda: view.__setitem__(0, view[0] * 2))
run = graph.instantiate()
for _ in range(3):
    run.launch(stream)
stream.sync()
assert seen == [1, 23, 67] and view[0] == 154, (seen, view[0])
assert calls.value == 3
builder = stream.create_graph_builder()
builder.begin_building()
launch(builder, one, add, word, np.int32(-154))
builder.callback(lambda: seen.append(int(view[0])))
builder.end_building().complete().launch(stream)
stream.sync()
assert seen[-1] == 0
print("callbacks in two graphs:", seen)
