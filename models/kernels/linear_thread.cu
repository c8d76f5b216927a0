// y = x W^T (+ residual): one thread per COLUMNS output columns, no barrier.
//
// Each (row, column) owns LANES partial sums: partial i takes the inner indices i, i + LANES, ...
// in order; the partials are folded as a tree. The order depends on `inner` alone, so a row's bits
// do not depend on how many rows share the pass. Tiles of rows by columns are as many as vector
// registers hold. A tile's columns stand apart, so that memory is read in several long runs: for a
// few rows all of a thread's by turns, for many GROUP after GROUP, which stays in a cache as the
// rows' input does.
#include "lanes.cuh"

#ifndef WEIGHT
#define WEIGHT bf16_t
#endif
#define COLUMNS 64
#define GROUP 16
#define ROW_BLOCK 48
#define FETCH 32  // weights that one prefetch brings, or more

struct Product {
  const WEIGHT* weight;
  const float* weight_scale;  // by column; may be null
  const float* x;
  const float* residual;  // may be null, may be `out`
  float* out;
  float* tap;  // second copy with its own row stride; may be null
  int columns;
  int inner;
  int tap_stride;
};

// Sums of ROWS rows from `row` on by COUNT columns from `column` on that stand `apart`; those of a
// row lie COLUMNS apart.
template <int ROWS, int COUNT>
__device__ __forceinline__ void tile(const Product& y, int row, int column, int apart,
                                     float* sums) {
  const WEIGHT* w = y.weight + static_cast<long long>(column) * y.inner;
  const float* x = y.x + static_cast<long long>(row) * y.inner;
  const long long inner = y.inner, next = apart * inner;
  Lanes partial[ROWS * COUNT] = {};
  long long k = 0;
  for (; k + LANES <= inner; k += LANES) {
    Lanes weight[COUNT];
    if (ROWS <= 4 && k % FETCH == 0) {  // what comes from memory for a few rows
      UNROLLED for (int c = 0; c < COUNT; ++c) PREFETCH(w + c * next + inner + k);
    }
    UNROLLED for (int c = 0; c < COUNT; ++c) weight[c] = load_lanes(w + c * next + k);
    UNROLLED for (int r = 0; r < ROWS; ++r) {
      const Lanes input = held(load_lanes(x + r * inner + k));
      UNROLLED for (int c = 0; c < COUNT; ++c) {
        partial[r * COUNT + c] = fma_lanes(weight[c], input, partial[r * COUNT + c]);
      }
    }
  }
  if (k < inner) {
    const int left = static_cast<int>(inner - k);
    Lanes weight[COUNT];
    UNROLLED for (int c = 0; c < COUNT; ++c) weight[c] = load_some(w + c * next + k, left);
    UNROLLED for (int r = 0; r < ROWS; ++r) {
      const Lanes input = load_some(x + r * inner + k, left);
      UNROLLED for (int c = 0; c < COUNT; ++c) {
        partial[r * COUNT + c] = fma_lanes(weight[c], input, partial[r * COUNT + c]);
      }
    }
  }
  float sum[ROWS * COUNT];
  fold_lanes<ROWS * COUNT>(partial, sum);
  for (int r = 0; r < ROWS; ++r) {
    for (int c = 0; c < COUNT; ++c) sums[r * COLUMNS + c * apart] = sum[r * COUNT + c];
  }
}

// ROWS rows by up to COLUMNS columns; what is written of a row is written at once.
template <int ROWS, int COUNT>
__device__ __noinline__ void band(const Product& y, int row, int column, int end) {
  float sums[ROWS * COLUMNS];
  const int count = end - column, apart = count / COUNT;
  int c = 0;
  for (; c < apart; ++c) tile<ROWS, COUNT>(y, row, column + c, apart, sums + c);
  for (c = apart * COUNT; c < count; ++c) tile<ROWS, 1>(y, row, column + c, 0, sums + c);
  for (int r = 0; r < ROWS; ++r) {
    float* sum = sums + r * COLUMNS;
    const long long at = static_cast<long long>(row + r) * y.columns + column;
    if (y.weight_scale != nullptr) {
      for (c = 0; c < count; ++c) sum[c] *= y.weight_scale[column + c];
    }
    if (y.residual != nullptr) {
      for (c = 0; c < count; ++c) sum[c] += y.residual[at + c];
    }
    memcpy(y.out + at, sum, sizeof(float) * count);
    if (y.tap != nullptr) {
      float* tap = y.tap + static_cast<long long>(row + r) * y.tap_stride + column;
      memcpy(tap, sum, sizeof(float) * count);
    }
  }
}

// Grid (columns / (COLUMNS * block), rows / ROW_BLOCK).
extern "C" __global__ void linear_thread(const WEIGHT* weight, const float* weight_scale,
                                         const float* x, const float* residual, float* out,
                                         float* tap, int rows, int columns, int inner,
                                         int tap_offset, int tap_stride) {
  wait_for_kernel_before();
  int column = (blockIdx.x * blockDim.x + threadIdx.x) * COLUMNS;
  const int last = column + COLUMNS < columns ? column + COLUMNS : columns;
  const Product y = {weight,   weight_scale, x,
                     residual, out,          tap != nullptr ? tap + tap_offset : nullptr,
                     columns,  inner,        tap_stride};
  const int first = blockIdx.y * ROW_BLOCK;
  const int end = first + ROW_BLOCK < rows ? first + ROW_BLOCK : rows;
  const int at_once = end - first < 6 ? COLUMNS : GROUP;
  for (; column < last; column += at_once) {
    const int to = column + at_once < last ? column + at_once : last;
    int row = first;
    for (; row + 6 <= end; row += 6) band<6, 2>(y, row, column, to);
    if (row + 4 <= end) {
      band<4, 2>(y, row, column, to);
      row += 4;
    }
    if (row + 2 <= end) {
      band<2, 4>(y, row, column, to);
      row += 2;
    }
    if (row < end) band<1, 4>(y, row, column, to);
  }
}
