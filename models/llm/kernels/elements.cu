// Work on single elements of rows; each thread takes CHUNK neighbours of one row.
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

struct Part {
  int row;
  int begin;
  int end;
};

__device__ __forceinline__ Part part_of_thread(int width) {
  const int chunks = (width + CHUNK - 1) / CHUNK;
  const int index = blockIdx.x * blockDim.x + threadIdx.x;
  const int begin = index % chunks * CHUNK;
  return {index / chunks, begin, begin + CHUNK < width ? begin + CHUNK : width};
}

// out[r] = x[index[r]] as float; an index out of range gives zeros. An embedding is one of these.
extern "C" __global__ void gather_rows(const WEIGHT* x, const int* index, float* out, int count,
                                       int rows, int width) {
  wait_for_previous_kernel();
  const Part part = part_of_thread(width);
  if (part.row >= count) return;
  const int row = index[part.row];
  const bool known = row >= 0 && row < rows;
  const WEIGHT* from = x + static_cast<long long>(known ? row : 0) * width;
  float* to = out + static_cast<long long>(part.row) * width;
  for (int i = part.begin; i < part.end; ++i) to[i] = known ? to_float(from[i]) : 0.0f;
}

// out = silu(gate) * up, with gate and up side by side in a row.
extern "C" __global__ void silu_mul(const float* gate_up, OUT* out, int rows, int width) {
  wait_for_previous_kernel();
  const Part part = part_of_thread(width);
  if (part.row >= rows) return;
  const float* gate = gate_up + static_cast<long long>(part.row) * 2 * width;
  const float* up = gate + width;
  OUT* to = out + static_cast<long long>(part.row) * width;
  for (int i = part.begin; i < part.end; ++i) from_float(gated(gate[i], up[i]), to + i);
}

// out = residual + (parts[0] + parts[1] + ...), also from column `offset` of tap [rows, stride] on
// unless null: products of which every rank has a part [rows, width], added up in their order.
extern "C" __global__ void add_parts(const float* parts, const float* residual, float* out,
                                     float* tap, int ranks, int rows, int width, int offset,
                                     int stride) {
  wait_for_previous_kernel();
  const Part part = part_of_thread(width);
  if (part.row >= rows) return;
  const long long at = static_cast<long long>(part.row) * width;
  const long long apart = static_cast<long long>(rows) * width;
  float* second = tap == nullptr ? nullptr : tap + static_cast<long long>(part.row) * stride;
  for (int i = part.begin; i < part.end; ++i) {
    float sum = parts[at + i];
    for (int rank = 1; rank < ranks; ++rank) sum += parts[rank * apart + at + i];
    if (residual != nullptr) sum += residual[at + i];
    out[at + i] = sum;
    if (second != nullptr) second[offset + i] = sum;
  }
}

// x = factor * x, softly capped: cap * tanh(x / cap); 0: not capped.
extern "C" __global__ void scale_rows(float* x, int rows, int width, float factor, float cap) {
  wait_for_previous_kernel();
  const Part part = part_of_thread(width);
  if (part.row >= rows) return;
  float* of = x + static_cast<long long>(part.row) * width;
  for (int i = part.begin; i < part.end; ++i) {
    const float scaled = factor * of[i];
    const float t = cap > 0.0f ? exp_exact(-2.0f * fabsf(scaled / cap)) : 0.0f;
    const float capped = cap * ((1.0f - t) / (1.0f + t));
    of[i] = !(cap > 0.0f) ? scaled : scaled < 0.0f ? -capped : capped;
  }
}

// out[r] = sum over o of (base[o] + dynamic[r][o] of the element's group) * x[r - o * apart], and
// `residual` unless null: a causal convolution over rows that stand so far apart, each of which has
// a kernel of its own. `base` [2, size, width] and `dynamic` [rows, 2, size, groups] hold two.
extern "C" __global__ void convolve_rows(const float* x, const float* base, const float* dynamic,
                                         const float* residual, float* out, int rows, int width,
                                         int size, int groups, int which, int apart) {
  wait_for_previous_kernel();
  const Part part = part_of_thread(width);
  if (part.row >= rows) return;
  const long long at = static_cast<long long>(part.row) * width;
  for (int i = part.begin; i < part.end; ++i) {
    float sum = residual == nullptr ? 0.0f : residual[at + i];
    for (int o = 0; o < size && o * apart <= part.row; ++o) {
      const long long of_row = (static_cast<long long>(part.row) * 2 + which) * size + o;
      const float weight = base[static_cast<long long>(which * size + o) * width + i] +
                           dynamic[of_row * groups + i / (width / groups)];
      sum = fmaf(weight, x[at - static_cast<long long>(o) * apart * width + i], sum);
    }
    out[at + i] = sum;
  }
}
