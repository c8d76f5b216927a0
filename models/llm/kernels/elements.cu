// Elementwise kernels. Each thread processes CHUNK adjacent elements of one row.
#include "model.cuh"

#ifndef WEIGHT
#define WEIGHT bf16_t
#endif
#ifndef OUT
#define OUT float
#endif
#ifndef CHUNK
#define CHUNK 1
#endif

struct Chunk {
  int row;
  int begin;
  int end;
};

// Returns the row and the range of columns that this thread processes.
__device__ __forceinline__ Chunk chunk_of_thread(int width) {
  const int chunks = (width + CHUNK - 1) / CHUNK;
  const int index = blockIdx.x * blockDim.x + threadIdx.x;
  const int begin = index % chunks * CHUNK;
  return {index / chunks, begin, begin + CHUNK < width ? begin + CHUNK : width};
}

// Computes out[r] = x[index[r]], converted to float. An index out of range gives zeros. Embedding
// lookups use this kernel too.
extern "C" __global__ void gather_rows(const WEIGHT* x, const int* index, float* out, int count,
                                       int rows, int width) {
  wait_for_previous_kernel();
  const Chunk chunk = chunk_of_thread(width);
  if (chunk.row >= count) return;
  const int row = index[chunk.row];
  const bool known = row >= 0 && row < rows;
  const WEIGHT* from = x + static_cast<long long>(known ? row : 0) * width;
  float* to = out + static_cast<long long>(chunk.row) * width;
  for (int i = chunk.begin; i < chunk.end; ++i) to[i] = known ? to_float(from[i]) : 0.0f;
}

// Computes out = silu(gate) * up. A row of `gate_up` has `width` values of gate, then `width`
// values of up.
extern "C" __global__ void silu_mul(const float* gate_up, OUT* out, int rows, int width) {
  wait_for_previous_kernel();
  const Chunk chunk = chunk_of_thread(width);
  if (chunk.row >= rows) return;
  const float* gate = gate_up + static_cast<long long>(chunk.row) * 2 * width;
  const float* up = gate + width;
  OUT* to = out + static_cast<long long>(chunk.row) * width;
  for (int i = chunk.begin; i < chunk.end; ++i) from_float(gated(gate[i], up[i]), to + i);
}

// Computes out = residual + (parts[0] + parts[1] + ...), where `parts` has the partial products
// [rows, width] of all ranks. The products are added in rank order. The result is also written to
// `copy`, [rows, stride], from column `offset` on, unless `copy` is null.
extern "C" __global__ void add_parts(const float* parts, const float* residual, float* out,
                                     float* copy, int ranks, int rows, int width, int offset,
                                     int stride) {
  wait_for_previous_kernel();
  const Chunk chunk = chunk_of_thread(width);
  if (chunk.row >= rows) return;
  const long long at = static_cast<long long>(chunk.row) * width;
  const long long rank_stride = static_cast<long long>(rows) * width;
  float* second = copy == nullptr ? nullptr : copy + static_cast<long long>(chunk.row) * stride;
  for (int i = chunk.begin; i < chunk.end; ++i) {
    float sum = parts[at + i];
    for (int rank = 1; rank < ranks; ++rank) sum += parts[rank * rank_stride + at + i];
    if (residual != nullptr) sum += residual[at + i];
    out[at + i] = sum;
    if (second != nullptr) second[offset + i] = sum;
  }
}

// Computes x = factor * x, and then x = cap * tanh(x / cap) unless cap is 0.
extern "C" __global__ void scale_rows(float* x, int rows, int width, float factor, float cap) {
  wait_for_previous_kernel();
  const Chunk chunk = chunk_of_thread(width);
  if (chunk.row >= rows) return;
  float* of = x + static_cast<long long>(chunk.row) * width;
  for (int i = chunk.begin; i < chunk.end; ++i) {
    const float scaled = factor * of[i];
    const float t = cap > 0.0f ? exp_exact(-2.0f * fabsf(scaled / cap)) : 0.0f;
    const float capped = cap * ((1.0f - t) / (1.0f + t));
    of[i] = !(cap > 0.0f) ? scaled : scaled < 0.0f ? -capped : capped;
  }
}

// Computes a causal convolution of length `size` over the levels of a request's block of drafts.
// The rows of two successive levels are `row_stride` rows apart. The columns are divided into
// `groups` groups of adjacent columns. For column c, which is in group g:
//
//   out[r][c] = residual[r][c] + sum over o of
//               (base[which][o][c] + dynamic[r][which][o][g]) * x[r - o * row_stride][c]
//
// where o is 0 .. size - 1. `base` [2, size, width] and `dynamic` [rows, 2, size, groups] contain
// the coefficients of two convolutions, of which `which` (0 or 1) selects one. A null `residual`
// adds nothing.
extern "C" __global__ void convolve_rows(const float* x, const float* base, const float* dynamic,
                                         const float* residual, float* out, int rows, int width,
                                         int size, int groups, int which, int row_stride) {
  wait_for_previous_kernel();
  const Chunk chunk = chunk_of_thread(width);
  if (chunk.row >= rows) return;
  const long long at = static_cast<long long>(chunk.row) * width;
  for (int i = chunk.begin; i < chunk.end; ++i) {
    float sum = residual == nullptr ? 0.0f : residual[at + i];
    for (int o = 0; o < size && o * row_stride <= chunk.row; ++o) {
      const long long of_row = (static_cast<long long>(chunk.row) * 2 + which) * size + o;
      const float weight = base[static_cast<long long>(which * size + o) * width + i] +
                           dynamic[of_row * groups + i / (width / groups)];
      sum = fmaf(weight, x[at - static_cast<long long>(o) * row_stride * width + i], sum);
    }
    out[at + i] = sum;
  }
}
