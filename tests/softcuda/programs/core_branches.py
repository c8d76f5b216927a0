"""IF-ELSE and SWITCH nodes in a captured graph: the condition selects what runs."""

import numpy as np
from cuda.core import Device, LaunchConfig, LegacyPinnedMemoryResource, Program, launch

SOURCE = """
typedef unsigned long long cudaGraphConditionalHandle;
extern "C" __device__ void cudaGraphSetConditional(cudaGraphConditionalHandle, unsigned);
extern "C" __global__ void decide(const int* input, cudaGraphConditionalHandle odd,
                                  cudaGraphConditionalHandle rest) {
  cudaGraphSetConditional(odd, input[0] % 2);
  cudaGraphSetConditional(rest, input[0] % 3);
}
extern "C" __global__ void add(int* out, int by) { out[0] += by; }
"""
device = Device()
device.set_current()
stream = device.create_stream()
code = Program(SOURCE, "c++").compile("cubin")
decide, add = code.get_kernel("decide"), code.get_kernel("add")
one = LaunchConfig(grid=1, block=1)
words = [LegacyPinnedMemoryResource().allocate(4) for _ in range(2)]
given, out = (np.from_dlpack(word).view(np.int32) for word in words)
builder = stream.create_graph_builder()
builder.begin_building()
odd, rest = builder.create_condition(), builder.create_condition()
launch(builder, one, decide, words[0], odd, rest)
branches = builder.if_else(odd)
cases = builder.switch(rest, 3)
for inner, by in zip((*branches, *cases), (1, 2, 10, 20, 30), strict=True):
    inner.begin_building()
    launch(inner, one, add, words[1], np.int32(by))
    inner.end_building()
graph = builder.end_building().complete()
for value in range(6):
    given[0], out[0] = value, 0
    graph.launch(stream)
    stream.sync()
    expected = (1 if value % 2 else 2) + (10, 20, 30)[value % 3]
    assert out[0] == expected, (value, out[0], expected)
print("two branches and three cases")
