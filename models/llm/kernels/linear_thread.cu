// y = x W^T (+ residual): one thread per COLUMNS output columns, no barrier.
//
// Each (row, column) owns LANES partial sums: partial i takes the inner indices i, i + LANES, ...
// in order; the partials are folded as a tree. The order depends on `inner` alone, so a row's bits
// do not depend on how many rows share the pass. Tiles of rows by columns are as many as vector
// registers hold. A few rows take all of a thread's columns by turns, a tile's far apart, so that
// memory is read in several long runs; many take GROUP after GROUP, which stays in a cache as the
// rows' input does.
#include "pairs.cuh"

#ifndef WEIGHT
#define WEIGHT bf16_t
#endif
#define COLUMNS 64
#define GROUP 32
#define ROW_BLOCK 48
#define MOST (WIDE ? 12 : 6)  // rows of a tile
#define MANY (WIDE ? 8 : 6)   // rows up to which weights come from memory
#define FETCH 32              // weights that one prefetch brings, or more

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

// Sums of ROWS rows from `row` on by pairs of columns from `column` on that stand `apart`; those of
// a row lie COLUMNS apart.
template <int ROWS, int PAIRS>
__device__ __forceinline__ void tile(const Product& y, int row, int column, int apart,
                                     float* sums) {
  const WEIGHT* w = y.weight + static_cast<long long>(column) * y.inner;
  const float* x = y.x + static_cast<long long>(row) * y.inner;
  const long long inner = y.inner, next = apart * inner;
  Pair partial[ROWS * PAIRS] = {};
  long long k = 0;
  for (; k + LANES <= inner; k += LANES) {
    Pair weight[PAIRS];
    if (ROWS <= MANY && k % FETCH == 0) {  // what comes from memory for a few rows
      UNROLLED for (int c = 0; c < 2 * PAIRS; ++c) __builtin_prefetch(w + c * next + inner + k);
    }
    UNROLLED for (int c = 0; c < PAIRS; ++c) {
      const WEIGHT* from = w + 2 * c * next + k;
      weight[c] = load_both(from, from + next);
    }
    UNROLLED for (int r = 0; r < ROWS; ++r) {
      const Pair input = load_twice(x + r * inner + k);
      UNROLLED for (int c = 0; c < PAIRS; ++c) {
        partial[r * PAIRS + c] = fma_pair(weight[c], input, partial[r * PAIRS + c]);
      }
    }
  }
  if (k < inner) {
    const int left = static_cast<int>(inner - k);
    float padded[2 * LANES];
    UNROLLED for (int r = 0; r < ROWS; ++r) {
      pad(x + r * inner + k, left, padded);
      const Pair input = load_twice(padded);
      UNROLLED for (int c = 0; c < PAIRS; ++c) {
        const WEIGHT* from = w + 2 * c * next + k;
        pad(from, left, padded);
        pad(from + next, left, padded + LANES);
        partial[r * PAIRS + c] = fma_pair(load_pair(padded), input, partial[r * PAIRS + c]);
      }
    }
  }
  float sum[ROWS * PAIRS][2];
  fold_pairs<ROWS * PAIRS>(partial, sum);
  for (int r = 0; r < ROWS; ++r) {
    for (int c = 0; c < 2 * PAIRS; ++c) {
      sums[r * COLUMNS + c * apart] = sum[r * PAIRS + c / 2][c % 2];
    }
  }
}

// ROWS rows by up to COLUMNS columns; what is written of a row is written at once.
template <int ROWS, int PAIRS>
__device__ __noinline__ void band(const Product& y, int row, int column, int end) {
  float sums[ROWS * COLUMNS];
  const int count = end - column, tiles = count / (2 * PAIRS);
  int c = 0;
  for (int i = 0; i < tiles; ++i, c += 2 * PAIRS) {
    if (ROWS > MANY) {
      tile<ROWS, PAIRS>(y, row, column + c, 1, sums + c);
    } else {
      tile<ROWS, PAIRS>(y, row, column + i, tiles, sums + i);
    }
  }
  for (; c < count; ++c) tile<ROWS, 1>(y, row, column + c, 0, sums + c);
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
  wait_for_previous_kernel();
  int column = (blockIdx.x * blockDim.x + threadIdx.x) * COLUMNS;
  const int last = column + COLUMNS < columns ? column + COLUMNS : columns;
  const Product y = {weight,   weight_scale, x,
                     residual, out,          tap != nullptr ? tap + tap_offset : nullptr,
                     columns,  inner,        tap_stride};
  const int first = blockIdx.y * ROW_BLOCK;
  const int end = first + ROW_BLOCK < rows ? first + ROW_BLOCK : rows;
  const int at_once = end - first <= MANY ? COLUMNS : GROUP;
  for (; column < last; column += at_once) {
    const int to = column + at_once < last ? column + at_once : last;
    int row = first;
    for (; row + MOST <= end; row += MOST) band<MOST, 1 + WIDE>(y, row, column, to);
    if (MOST > 8 && row + 8 <= end) {
      band<8, 1>(y, row, column, to);
      row += 8;
    }
    if (row + 4 <= end) {
      band<4, 1>(y, row, column, to);
      row += 4;
    }
    if (row + 2 <= end) {
      band<2, 2>(y, row, column, to);
      row += 2;
    }
    if (row < end) band<1, 2>(y, row, column, to);
  }
}
