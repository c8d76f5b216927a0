"""Compile a kernel, and add two vectors in device memory that is filled through pinned memory."""

import numpy as np
from cuda.core import (
    Device,
    LaunchConfig,
    LegacyPinnedMemoryResource,
    Program,
    ProgramOptions,
    launch,
)

SOURCE = """
extern "C" __global__ void add(const float* a, const float* b, float* c, size_t n) {
  const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
  if (i < n) c[i] = a[i] + b[i];
}
"""
N = 1000
device = Device()
device.set_current()
stream = device.create_stream()
program = Program(SOURCE, "c++", ProgramOptions(std="c++17", arch=f"sm_{device.arch}"))
kernel = program.compile("cubin").get_kernel("add")
pinned = [LegacyPinnedMemoryResource().allocate(N * 4) for _ in range(3)]
a, b, c = (np.from_dlpack(buffer).view(np.float32) for buffer in pinned)
a[:] = np.arange(N)
b[:] = 0.5
on_device = [device.allocate(N * 4, stream=stream) for _ in range(3)]
for target, source in zip(on_device[:2], pinned[:2], strict=True):
    target.copy_from(source, stream=stream)
config = LaunchConfig(grid=(N + 127) // 128, block=128)
launch(stream, config, kernel, *on_device, np.uint64(N))
on_device[2].copy_to(pinned[2], stream=stream)
stream.sync()
np.testing.assert_array_equal(c, a + b)
print("sum of two vectors of", N)
