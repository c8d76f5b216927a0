"""Compile to PTX, load the text again, and read attributes, arguments and the occupancy."""

import numpy as np
from cuda.core import (
    Device,
    LaunchConfig,
    LegacyPinnedMemoryResource,
    ObjectCode,
    Program,
    ProgramOptions,
    launch,
)

SOURCE = """
extern "C" __global__ void prefix(const int* in, int* out) {
  __shared__ int tile[2][128];
  const int t = threadIdx.x;
  int now = 0;
  tile[0][t] = in[t];
  __syncthreads();
  for (int offset = 1; offset < 128; offset *= 2) {
    tile[1 - now][t] = tile[now][t] + (t >= offset ? tile[now][t - offset] : 0);
    now = 1 - now;
    __syncthreads();
  }
  out[t] = tile[now][t];
}
"""
device = Device()
device.set_current()
stream = device.create_stream()
options = ProgramOptions(std="c++17", arch=f"compute_{device.arch}", define_macro="UNUSED=1")
ptx = Program(SOURCE, "c++", options).compile("ptx")
assert b".entry prefix" in bytes(ptx.code) and ptx.code_type == "ptx"
kernel = ObjectCode.from_ptx(ptx.code, name="again").get_kernel("prefix")
assert [(p.offset, p.size) for p in kernel.arguments_info] == [(0, 8), (8, 8)]
assert kernel.attributes.shared_size_bytes == 1024
assert kernel.occupancy.max_active_blocks_per_multiprocessor(128, 0) >= 1
words = [LegacyPinnedMemoryResource().allocate(512) for _ in range(2)]
given, out = (np.from_dlpack(word).view(np.int32) for word in words)
given[:] = np.random.default_rng(2).integers(-50, 50, 128)
launch(stream, LaunchConfig(grid=1, block=128), kernel, *words)
stream.sync()
np.testing.assert_array_equal(out, np.cumsum(given))
print("prefix sum of 128 numbers")
