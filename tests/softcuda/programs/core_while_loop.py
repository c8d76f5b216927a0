"""Collatz sequences: a WHILE node whose body runs until a kernel clears its condition."""

import numpy as np
from cuda.core import Device, LaunchConfig, LegacyPinnedMemoryResource, Program
from cuda.core.graph import GraphDefinition

SOURCE = """
typedef unsigned long long cudaGraphConditionalHandle;
extern "C" __device__ void cudaGraphSetConditional(cudaGraphConditionalHandle, unsigned);
extern "C" __global__ void step(long long* state, cudaGraphConditionalHandle again) {
  state[0] = state[0] % 2 == 0 ? state[0] / 2 : 3 * state[0] + 1;
  state[1] += 1;
  cudaGraphSetConditional(again, state[0] != 1);
}
"""
device = Device()
device.set_current()
stream = device.create_stream()
step = Program(SOURCE, "c++").compile("cubin").get_kernel("step")
state = LegacyPinnedMemoryResource().allocate(16)
view = np.from_dlpack(state).view(np.int64)
graph = GraphDefinition()
again = graph.create_condition(1)
loop = graph.while_loop(again)
loop.body.launch(LaunchConfig(grid=1, block=1), step, state, again)
run = graph.instantiate()


def collatz(n):
    steps = 0
    while n != 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        steps += 1
    return steps


for start in (6, 7, 27):
    view[:] = start, 0
    run.launch(stream)
    stream.sync()
    assert view.tolist() == [1, collatz(start)], view
print("sequences of 6, 7 and 27")
