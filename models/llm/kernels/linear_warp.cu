// Computes y = x W^T (+ bias) (+ residual) without tensor cores. Each warp computes COLUMNS output
// columns of up to 8 rows, so the weights are read once for all rows.
//
// Reduction order: the inner indices are divided into packs of PACK indices. Lane l adds packs
// l, l + 32, ... in order, then at most one of the indices after the last full pack. The sums of
// the lanes are added as a butterfly. The order depends only on `inner` and on the weight type, so
// the kernel is row invariant.
#include "graft.cuh"

#ifndef WEIGHT
#define WEIGHT bf16_t
#endif
#define PACK (sizeof(WEIGHT) == 4 ? 4 : 8)
#define COLUMNS 2
#define ROW_TILE 8

template <typename T, int COUNT>
struct alignas(COUNT * sizeof(T)) Pack {
  T item[COUNT];
};

// Loads PACK adjacent values and converts them to float. If ALIGNED (each row of W and x begins at
// a multiple of PACK values), these are vector loads, otherwise scalar loads.
template <bool ALIGNED, typename T>
__device__ __forceinline__ void load_pack(const T* from, float* to) {
  if (ALIGNED) {
    const int count = sizeof(T) == 4 ? 4 : PACK;
#pragma unroll
    for (int part = 0; part < PACK; part += count) {
      const Pack<T, count> pack = *reinterpret_cast<const Pack<T, count>*>(from + part);
#pragma unroll
      for (int i = 0; i < count; ++i) to[part + i] = to_float(pack.item[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < PACK; ++i) to[i] = to_float(from[i]);
  }
}

// Computes the dot products of ROWS rows of x with COLUMNS rows of W.
template <int ROWS, bool ALIGNED>
__device__ __forceinline__ void dot(const WEIGHT* const* w, const float* const* x, int inner,
                                    float (*sum)[COLUMNS]) {
  const int lane = threadIdx.x % 32;
  const int packed = inner / PACK * PACK;
#pragma unroll 2
  for (int k = lane * PACK; k < packed; k += 32 * PACK) {
    float weight[COLUMNS][PACK];
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) load_pack<ALIGNED>(w[c] + k, weight[c]);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      float input[PACK];
      load_pack<ALIGNED>(x[r] + k, input);
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
#pragma unroll
        for (int i = 0; i < PACK; ++i) sum[r][c] = fmaf(weight[c][i], input[i], sum[r][c]);
      }
    }
  }
  if (packed + lane < inner) {
    const int k = packed + lane;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) sum[r][c] = fmaf(to_float(w[c][k]), x[r][k], sum[r][c]);
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) sum[r][c] = warp_sum(sum[r][c]);
  }
}

struct Output {
  const float* weight_scale;  // [columns], scales of the weight rows; may be null
  const float* bias;          // [columns]; null adds nothing
  const float* residual;      // [rows, columns], may be `out`; null adds nothing
  float* out;
  float* copy;  // receives a copy of the result, with row stride copy_stride; may be null
  int columns;
  int copy_stride;
};

// Computes ROWS x COLUMNS outputs. For rows after `last` and columns after the end, the function
// loads the last row or column, and it does not store the results.
template <int ROWS>
__device__ __forceinline__ void rows_by_columns(const WEIGHT* weight, const float* x, int inner,
                                                const Output& y, int row, int last, int column) {
  const WEIGHT* w[COLUMNS];
  const float* input[ROWS];
  float sum[ROWS][COLUMNS] = {};
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) {
    const int at = column + c < y.columns ? column + c : y.columns - 1;
    w[c] = weight + static_cast<long long>(at) * inner;
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int at = row + r <= last ? row + r : last;
    input[r] = x + static_cast<long long>(at) * inner;
  }
  if (inner % PACK == 0) {
    dot<ROWS, true>(w, input, inner, sum);
  } else {
    dot<ROWS, false>(w, input, inner, sum);
  }
  if (threadIdx.x % 32 != 0) return;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      if (row + r > last || column + c >= y.columns) continue;
      const long long at = static_cast<long long>(row + r) * y.columns + column + c;
      float value = sum[r][c];
      if (y.weight_scale != nullptr) value *= y.weight_scale[column + c];
      if (y.bias != nullptr) value += y.bias[column + c];
      if (y.residual != nullptr) value += y.residual[at];
      y.out[at] = value;
      if (y.copy != nullptr) {
        y.copy[static_cast<long long>(row + r) * y.copy_stride + column + c] = value;
      }
    }
  }
}

// Grid: (columns / (COLUMNS * warps per block), rows / ROW_TILE).
extern "C" __global__ void linear_warp(const WEIGHT* weight, const float* weight_scale,
                                       const float* bias, const float* x, const float* residual,
                                       float* out, float* copy, int rows, int columns, int inner,
                                       int copy_offset, int copy_stride) {
  wait_for_previous_kernel();
  const int warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  const int column = warp * COLUMNS;
  if (column >= columns) return;
  const Output y = {
      weight_scale, bias,       residual, out, copy != nullptr ? copy + copy_offset : nullptr,
      columns,      copy_stride};
  const int row = blockIdx.y * ROW_TILE;
  const int count = rows - row < ROW_TILE ? rows - row : ROW_TILE;
  const int last = row + count - 1;
  if (count > 4) {
    rows_by_columns<8>(weight, x, inner, y, row, last, column);
  } else if (count > 2) {
    rows_by_columns<4>(weight, x, inner, y, row, last, column);
  } else if (count > 1) {
    rows_by_columns<2>(weight, x, inner, y, row, last, column);
  } else {
    rows_by_columns<1>(weight, x, inner, y, row, last, column);
  }
}
