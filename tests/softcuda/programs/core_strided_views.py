"""A function that accepts arrays of any library, through StridedMemoryView."""

import numpy as np
from cuda.core import Device, LaunchConfig, LegacyPinnedMemoryResource, Program, launch
from cuda.core.utils import StridedMemoryView, args_viewable_as_strided_memory

SOURCE = """
extern "C" __global__ void negate(float* p, size_t n) {
  const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
  if (i < n) p[i] = -p[i];
}
"""
device = Device()
device.set_current()
stream = device.create_stream()
kernel = Program(SOURCE, "c++").compile("cubin").get_kernel("negate")


class OnDevice:
    """An array with the CUDA array interface over a buffer of cuda.core."""

    def __init__(self, buffer, shape):
        self.buffer = buffer
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": "<f4",
            "data": (int(buffer.handle), False),
            "strides": None,
            "stream": int(stream.handle),
            "version": 3,
        }


@args_viewable_as_strided_memory((0,))
def negate(array, queue):
    view = array.view(int(queue.handle))
    assert view.is_device_accessible and view.dtype == np.float32
    size = int(np.prod(view.shape))
    config = LaunchConfig(grid=-(-size // 64), block=64)
    launch(queue, config, kernel, np.uint64(view.ptr), np.uint64(size))
    return view.shape


host = LegacyPinnedMemoryResource().allocate(600)
values = np.from_dlpack(host).view(np.float32)
values[:] = np.arange(150)
buffer = device.allocate(600, stream=stream)
buffer.copy_from(host, stream=stream)
assert negate(OnDevice(buffer, (10, 15)), stream) == (10, 15)
buffer.copy_to(host, stream=stream)
stream.sync()
np.testing.assert_array_equal(values, -np.arange(150))
on_host = StridedMemoryView.from_dlpack(np.ones((2, 3)), stream_ptr=-1)
assert on_host.shape == (2, 3) and not on_host.is_device_accessible
print("negated an array of shape (10, 15)")
