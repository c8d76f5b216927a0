// Embedding lookup; each thread converts CHUNK elements of a row. A token out of range gives zeros.
#include "graft.cuh"

#ifndef WEIGHT
#define WEIGHT bf16_t
#endif
#ifndef CHUNK
#define CHUNK 1
#endif

extern "C" __global__ void embed(const WEIGHT* table, const int* token, float* out, int rows,
                                 int vocab, int width) {
  const int chunks = (width + CHUNK - 1) / CHUNK;
  const int index = blockIdx.x * blockDim.x + threadIdx.x;
  const int row = index / chunks;
  if (row >= rows) return;
  const int begin = index % chunks * CHUNK;
  const int end = begin + CHUNK < width ? begin + CHUNK : width;
  const int id = token[row];
  const bool known = id >= 0 && id < vocab;
  const WEIGHT* from = table + static_cast<long long>(known ? id : 0) * width;
  float* to = out + static_cast<long long>(row) * width;
  for (int i = begin; i < end; ++i) to[i] = known ? to_float(from[i]) : 0.0f;
}
