// Computes y = x W^T (+ bias) (+ residual) on the soft device, which runs kernels on the CPU. Each
// thread computes COLUMNS output columns without barriers.
//
// Reduction order: each output has LANES partial sums. Partial sum i adds the inner indices i,
// i + LANES, ... in order; the partial sums are then folded as a tree. The order depends only on
// `inner`, so the kernel is row invariant.
//
// Register tiles of rows x columns are as large as the vector registers allow. With few rows, the
// columns of a tile are far apart, so memory is read in several long sequential streams. With
// many rows, columns are processed in groups of GROUP, whose weights stay in the CPU cache together
// with the input rows.
#include "pairs.cuh"

#ifndef WEIGHT
#define WEIGHT bf16_t
#endif
#define COLUMNS 64
#define GROUP 32
#define ROW_BLOCK 48
#define MAX_TILE_ROWS (WIDE ? 12 : 6)     // maximum rows of a tile
#define MAX_STREAMED_ROWS (WIDE ? 8 : 6)  // with more rows, columns are processed in groups
#define FETCH 32  // weights per prefetch: 32 weights of 16 bits fill a cache line of 64 bytes

struct Product {
  const WEIGHT* weight;
  const float* weight_scale;  // [columns], scales of the weight rows; may be null
  const float* bias;          // [columns]; null adds nothing
  const float* x;
  const float* residual;  // [rows, columns], may be `out`; null adds nothing
  float* out;
  float* copy;  // receives a copy of the result, with row stride copy_stride; may be null
  int columns;
  int inner;
  int copy_stride;
};

// Computes a register tile: ROWS rows from `row` on, and 2 * PAIRS columns that start at `column`
// and are `column_stride` apart. A row of `sums` has COLUMNS entries.
template <int ROWS, int PAIRS>
__device__ __forceinline__ void tile(const Product& y, int row, int column, int column_stride,
                                     float* sums) {
  const WEIGHT* w = y.weight + static_cast<long long>(column) * y.inner;
  const float* x = y.x + static_cast<long long>(row) * y.inner;
  const long long inner = y.inner, next = column_stride * inner;
  Pair partial[ROWS * PAIRS] = {};
  long long k = 0;
  for (; k + LANES <= inner; k += LANES) {
    Pair weight[PAIRS];
    if (ROWS <= MAX_STREAMED_ROWS && k % FETCH == 0) {  // weights are streamed from memory
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
      sums[r * COLUMNS + c * column_stride] = sum[r * PAIRS + c / 2][c % 2];
    }
  }
}

// Computes columns [column, end), at most COLUMNS, of ROWS rows. The results are collected on the
// stack, so that the columns of a row are written to memory together.
template <int ROWS, int PAIRS>
__device__ __noinline__ void band(const Product& y, int row, int column, int end) {
  float sums[ROWS * COLUMNS];
  const int count = end - column, tiles = count / (2 * PAIRS);
  int c = 0;
  for (int i = 0; i < tiles; ++i, c += 2 * PAIRS) {
    if (ROWS > MAX_STREAMED_ROWS) {
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
    if (y.bias != nullptr) {
      for (c = 0; c < count; ++c) sum[c] += y.bias[column + c];
    }
    if (y.residual != nullptr) {
      for (c = 0; c < count; ++c) sum[c] += y.residual[at + c];
    }
    memcpy(y.out + at, sum, sizeof(float) * count);
    if (y.copy != nullptr) {
      float* copy = y.copy + static_cast<long long>(row + r) * y.copy_stride + column;
      memcpy(copy, sum, sizeof(float) * count);
    }
  }
}

// Grid: (columns / (COLUMNS * block), rows / ROW_BLOCK), where `block` is the number of threads.
extern "C" __global__ void linear_thread(const WEIGHT* weight, const float* weight_scale,
                                         const float* bias, const float* x, const float* residual,
                                         float* out, float* copy, int rows, int columns, int inner,
                                         int copy_offset, int copy_stride) {
  wait_for_previous_kernel();
  int column = (blockIdx.x * blockDim.x + threadIdx.x) * COLUMNS;
  const int last = column + COLUMNS < columns ? column + COLUMNS : columns;
  const Product y = {weight,
                     weight_scale,
                     bias,
                     x,
                     residual,
                     out,
                     copy != nullptr ? copy + copy_offset : nullptr,
                     columns,
                     inner,
                     copy_stride};
  const int first = blockIdx.y * ROW_BLOCK;
  const int end = first + ROW_BLOCK < rows ? first + ROW_BLOCK : rows;
  const int at_once = end - first <= MAX_STREAMED_ROWS ? COLUMNS : GROUP;
  for (; column < last; column += at_once) {
    const int to = column + at_once < last ? column + at_once : last;
    int row = first;
    for (; row + MAX_TILE_ROWS <= end; row += MAX_TILE_ROWS)
      band<MAX_TILE_ROWS, 1 + WIDE>(y, row, column, to);
    if (MAX_TILE_ROWS > 8 && row + 8 <= end) {
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
