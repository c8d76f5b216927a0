"""Instantiate a template for two types, and launch both instances with their mangled names."""

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
template <typename T>
__global__ void scale(T* data, T by, int n) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    data[i] *= by;
  }
}
"""
NAMES = {np.float32: "scale<float>", np.float64: "scale<double>"}
device = Device()
device.set_current()
stream = device.create_stream()
program = Program(SOURCE, "c++", ProgramOptions(std="c++17"))
code = program.compile("cubin", name_expressions=tuple(NAMES.values()))
for dtype, name in NAMES.items():
    kernel = code.get_kernel(name)
    assert kernel.num_arguments == 3
    host = LegacyPinnedMemoryResource().allocate(100 * np.dtype(dtype).itemsize)
    view = np.from_dlpack(host).view(dtype)
    view[:] = np.arange(100)
    data = device.allocate(host.size, stream=stream)
    data.copy_from(host, stream=stream)
    launch(stream, LaunchConfig(grid=2, block=32), kernel, data, dtype(1.5), np.int32(100))
    data.copy_to(host, stream=stream)
    stream.sync()
    np.testing.assert_array_equal(view, 1.5 * np.arange(100))
print("two instances of a template")
