// RMSNorm, one thread per row.
#include "norm.cuh"

extern "C" __global__ void norm_thread(const float* x, const float* weight, float* y, int rows,
                                       int width, float eps) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  const float* input = x + static_cast<long long>(row) * width;
  const float inverse = inverse_rms_thread(input, width, eps);
  scale_row(input, weight, y + static_cast<long long>(row) * width, width, inverse, 0, 1);
}
