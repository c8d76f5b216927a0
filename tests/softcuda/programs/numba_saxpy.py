"""Grid-stride loop over device arrays, launched on a stream, for several array sizes."""

import numpy as np
from numba import cuda


@cuda.jit
def saxpy(a, x, y):
    first = cuda.grid(1)
    step = cuda.gridsize(1)
    for i in range(first, x.size, step):
        y[i] = a * x[i] + y[i]


rng = np.random.default_rng(0)
stream = cuda.stream()
for n in (1, 31, 1000, 4097):
    x, y = rng.standard_normal((2, n)).astype(np.float32)
    x_device = cuda.to_device(x, stream=stream)
    y_device = cuda.to_device(y, stream=stream)
    saxpy[4, 64, stream](np.float32(2.5), x_device, y_device)
    result = y_device.copy_to_host(stream=stream)
    stream.synchronize()
    np.testing.assert_allclose(result, np.float32(2.5) * x + y, rtol=1e-5, atol=1e-6)
print("saxpy of 4 sizes")
