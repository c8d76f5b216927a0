// y = x W^T (+ residual): one thread per COLUMNS output columns, no barrier.
//
// Each (row, column) owns LANES partial sums: partial i takes the inner indices i, i + LANES, ...
// in order; the partials are folded as a tree. The order depends on `inner` alone, so a row's bits
// do not depend on how many rows share the pass. Loops over lanes run over more than 16 items
// because that is what C++ compilers vectorise.
#include "model.cuh"

#ifndef WEIGHT
#define WEIGHT bf16_t
#endif
#define LANES 32
#define COLUMNS 4
#define ROW_TILE 16

struct Output {
  const float* residual;  // may be null, may be `out`
  float* out;
  float* tap;  // second copy with its own row stride; may be null
  int columns;
  int tap_stride;
};

// Half-folded partial sums of ROWS rows with one column.
template <int ROWS>
__device__ __forceinline__ void dot(const WEIGHT* w, const float* x, int inner,
                                    float (*folded)[LANES / 2]) {
  float partial[ROWS][LANES] = {};
  int k = 0;
  for (; k + LANES <= inner; k += LANES) {
    float weight[LANES];
    for (int i = 0; i < LANES; ++i) weight[i] = to_float(w[k + i]);
    for (int r = 0; r < ROWS; ++r) {
      const float* input = x + static_cast<long long>(r) * inner + k;
      for (int i = 0; i < LANES; ++i) partial[r][i] = fmaf(weight[i], input[i], partial[r][i]);
    }
  }
  for (int i = 0; i < LANES; ++i) {
    if (k + i >= inner) continue;
    const float weight = to_float(w[k + i]);
    for (int r = 0; r < ROWS; ++r) {
      const float* input = x + static_cast<long long>(r) * inner + k;
      partial[r][i] = fmaf(weight, input[i], partial[r][i]);
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    for (int i = 0; i < LANES / 2; ++i) folded[r][i] = partial[r][i] + partial[r][i + LANES / 2];
  }
}

template <int ROWS>
__device__ __noinline__ void rows_by_columns(const WEIGHT* weight, const float* x, int inner,
                                             const Output& y, int row, int column) {
  const int count = y.columns - column < COLUMNS ? y.columns - column : COLUMNS;
  float folded[COLUMNS * ROWS][LANES / 2];
  for (int c = 0; c < COLUMNS; ++c) {
    const int at = column + (c < count ? c : 0);  // a column past the end is computed, not stored
    dot<ROWS>(weight + static_cast<long long>(at) * inner, x, inner, folded + c * ROWS);
  }
  float sum[COLUMNS * ROWS];
  fold_rows<COLUMNS * ROWS>(folded, sum);
  for (int r = 0; r < ROWS; ++r) {
    for (int c = 0; c < count; ++c) {
      const long long at = static_cast<long long>(row + r) * y.columns + column + c;
      float value = sum[c * ROWS + r];
      if (y.residual != nullptr) value += y.residual[at];
      y.out[at] = value;
      if (y.tap != nullptr) {
        y.tap[static_cast<long long>(row + r) * y.tap_stride + column + c] = value;
      }
    }
  }
}

// Grid (columns / (COLUMNS * block), rows / ROW_TILE).
extern "C" __global__ void linear_thread(const WEIGHT* weight, const float* x,
                                         const float* residual, float* out, float* tap, int rows,
                                         int columns, int inner, int tap_offset, int tap_stride) {
  wait_for_kernel_before();
  const int column = (blockIdx.x * blockDim.x + threadIdx.x) * COLUMNS;
  if (column >= columns) return;
  const Output y = {residual, out, tap != nullptr ? tap + tap_offset : nullptr, columns,
                    tap_stride};
  int row = blockIdx.y * ROW_TILE;
  const int end = row + ROW_TILE < rows ? row + ROW_TILE : rows;
  while (row < end) {
    const float* input = x + static_cast<long long>(row) * inner;
    if (end - row >= 4) {
      rows_by_columns<4>(weight, input, inner, y, row, column);
      row += 4;
    } else if (end - row >= 2) {
      rows_by_columns<2>(weight, input, inner, y, row, column);
      row += 2;
    } else {
      rows_by_columns<1>(weight, input, inner, y, row, column);
      row += 1;
    }
  }
}
