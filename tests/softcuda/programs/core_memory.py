"""Memory resources: a pool, pinned and managed memory, copies between them, and fills."""

import numpy as np
from cuda.core import (
    Device,
    DeviceMemoryResource,
    DeviceMemoryResourceOptions,
    LegacyPinnedMemoryResource,
    ManagedMemoryResource,
)

BYTES = 4096
device = Device()
device.set_current()
stream = device.create_stream()
pool = DeviceMemoryResource(device, options=DeviceMemoryResourceOptions(max_size=1 << 20))
pinned = LegacyPinnedMemoryResource()
source, target = pinned.allocate(BYTES), pinned.allocate(BYTES)
assert source.is_host_accessible and source.is_device_accessible
view = np.from_dlpack(source).view(np.uint16)
view[:] = np.random.default_rng(1).integers(0, 1 << 16, BYTES // 2)
first, second = (pool.allocate(BYTES, stream=stream) for _ in range(2))
assert pool.attributes.used_mem_current == 2 * BYTES
assert not first.is_host_accessible and first.size == BYTES
managed = ManagedMemoryResource().allocate(BYTES, stream=stream)
first.copy_from(source, stream=stream)
second.copy_from(first, stream=stream)
managed.copy_from(second, stream=stream)
managed.copy_to(target, stream=stream)
stream.sync()
np.testing.assert_array_equal(np.from_dlpack(target).view(np.uint16), view)
second.fill(np.uint32(0xDEADBEEF), stream=stream)
second.copy_to(target, stream=stream)
stream.sync()
assert (np.from_dlpack(target).view(np.uint32) == 0xDEADBEEF).all()
for buffer in (first, second, managed):
    buffer.close()
stream.sync()
assert pool.attributes.used_mem_current == 0
print("copies through four kinds of memory")
