// y = x W^T (+ residual): one thread per output column, no barrier.
//
// Each (row, column) owns LANES partial sums: partial i takes the inner indices i, i + LANES, ...
// in order, and the partials are added as a fixed tree. The order depends on `inner` alone, so a
// row's bits do not depend on how many rows share the pass.
#include "vector_math.cuh"

#ifndef WEIGHT
#define WEIGHT bf16_t
#endif
#define LANES 32
#define ROW_TILE 16

struct Output {
  const float* residual;  // may be null, may be `out`
  float* out;
  float* tap;  // second copy with its own row stride; may be null
  int columns;
  int tap_stride;
};

template <int ROWS>
__device__ __forceinline__ void rows_by_column(const WEIGHT* w, const float* x, int inner,
                                               const Output& y, int row, int column) {
  float partial[ROWS][LANES] = {};
  int k = 0;
  for (; k + LANES <= inner; k += LANES) {
    float weight[LANES];
#pragma unroll
    for (int i = 0; i < LANES; ++i) weight[i] = to_float(w[k + i]);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const float* input = x + static_cast<long long>(r) * inner + k;
#pragma unroll
      for (int i = 0; i < LANES; ++i) partial[r][i] = fmaf(weight[i], input[i], partial[r][i]);
    }
  }
#pragma unroll
  for (int i = 0; i < LANES; ++i) {
    if (k + i < inner) {
      const float weight = to_float(w[k + i]);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        partial[r][i] = fmaf(weight, x[static_cast<long long>(r) * inner + k + i], partial[r][i]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    float sum = tree_sum<LANES>(partial[r]);
    const long long at = static_cast<long long>(row + r) * y.columns + column;
    if (y.residual != nullptr) sum += y.residual[at];
    y.out[at] = sum;
    if (y.tap != nullptr) y.tap[static_cast<long long>(row + r) * y.tap_stride + column] = sum;
  }
}

// Grid (columns / block, rows / ROW_TILE). `tap` is already offset to its first column.
extern "C" __global__ void linear_thread(const WEIGHT* weight, const float* x,
                                         const float* residual, float* out, float* tap, int rows,
                                         int columns, int inner, int tap_offset, int tap_stride) {
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= columns) return;
  const WEIGHT* w = weight + static_cast<long long>(column) * inner;
  const Output y = {residual, out, tap != nullptr ? tap + tap_offset : nullptr, columns,
                    tap_stride};
  int row = blockIdx.y * ROW_TILE;
  const int end = row + ROW_TILE < rows ? row + ROW_TILE : rows;
  while (row < end) {
    const float* input = x + static_cast<long long>(row) * inner;
    if (end - row >= 4) {
      rows_by_column<4>(w, input, inner, y, row, column);
      row += 4;
    } else if (end - row >= 2) {
      rows_by_column<2>(w, input, inner, y, row, column);
      row += 2;
    } else {
      rows_by_column<1>(w, input, inner, y, row, column);
      row += 1;
    }
  }
}
