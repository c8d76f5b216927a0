// RMSNorm, one block of NORM_THREADS per row.
#include "norm.cuh"

extern "C" __global__ void norm_warp(const float* x, const float* weight, float* y, int rows,
                                     int width, float eps) {
  const int row = blockIdx.x;
  if (row >= rows) return;
  const float* input = x + static_cast<long long>(row) * width;
  const float inverse = inverse_rms_block(input, width, eps);
  scale_row(input, weight, y + static_cast<long long>(row) * width, width, inverse, threadIdx.x,
            NORM_THREADS);
}
