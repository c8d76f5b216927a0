"""Link two sources that were compiled on their own: a kernel and the function that it calls."""

import numpy as np
from cuda.core import (
    Device,
    LaunchConfig,
    LegacyPinnedMemoryResource,
    Linker,
    LinkerOptions,
    Program,
    ProgramOptions,
    launch,
)

KERNEL = """
extern __device__ int transform(int value, int thread);
extern "C" __global__ void apply(int* data) {
  data[threadIdx.x] = transform(data[threadIdx.x], threadIdx.x);
}
"""
FUNCTIONS = {
    "square": "__device__ int transform(int value, int thread) { return value * value; }",
    "mix": "__device__ int transform(int value, int thread) { return 3 * value - thread; }",
}
device = Device()
device.set_current()
stream = device.create_stream()
options = ProgramOptions(std="c++17", relocatable_device_code=True)
kernel_code = Program(KERNEL, "c++", options).compile("ptx")
host = LegacyPinnedMemoryResource().allocate(128)
view = np.from_dlpack(host).view(np.int32)
values = np.arange(32)
expected = {"square": values * values, "mix": 3 * values - values}
for name, text in FUNCTIONS.items():
    function = Program(text, "c++", options).compile("ptx")
    linker = Linker(kernel_code, function, options=LinkerOptions(arch=f"sm_{device.arch}"))
    kernel = linker.link("cubin").get_kernel("apply")
    view[:] = values
    launch(stream, LaunchConfig(grid=1, block=32), kernel, host)
    stream.sync()
    np.testing.assert_array_equal(view, expected[name])
print("linked", len(FUNCTIONS), "functions")
