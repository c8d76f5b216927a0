// SwiGLU's gate (Shazeer, 2020): out = silu(gate) * up, with gate and up side by side in a row.
// Each thread computes CHUNK elements.
#include "vector_math.cuh"

#ifndef CHUNK
#define CHUNK 1
#endif

extern "C" __global__ void silu_mul(const float* gate_up, float* out, int rows, int width) {
  const int chunks = (width + CHUNK - 1) / CHUNK;
  const int index = blockIdx.x * blockDim.x + threadIdx.x;
  const int row = index / chunks;
  if (row >= rows) return;
  const int begin = index % chunks * CHUNK;
  const int end = begin + CHUNK < width ? begin + CHUNK : width;
  const float* gate = gate_up + static_cast<long long>(row) * 2 * width;
  const float* up = gate + width;
  float* to = out + static_cast<long long>(row) * width;
  for (int i = begin; i < end; ++i) {
    const float g = gate[i];
    to[i] = g / (1.0f + exp_exact(-g)) * up[i];
  }
}
