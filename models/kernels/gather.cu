// Row gather: out[b] = x[index[b]]; each thread copies CHUNK elements. An index out of range gives
// zeros.
#include "graft.cuh"

#ifndef CHUNK
#define CHUNK 1
#endif

extern "C" __global__ void gather_rows(const float* x, const int* index, float* out, int count,
                                       int rows, int width) {
  const int chunks = (width + CHUNK - 1) / CHUNK;
  const int item = blockIdx.x * blockDim.x + threadIdx.x;
  const int b = item / chunks;
  if (b >= count) return;
  const int begin = item % chunks * CHUNK;
  const int end = begin + CHUNK < width ? begin + CHUNK : width;
  const int row = index[b];
  const bool known = row >= 0 && row < rows;
  const float* from = x + static_cast<long long>(known ? row : 0) * width;
  float* to = out + static_cast<long long>(b) * width;
  for (int i = begin; i < end; ++i) to[i] = known ? from[i] : 0.0f;
}
