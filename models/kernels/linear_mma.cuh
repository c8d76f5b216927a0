// y = x W^T (+ residual) on tensor cores: weights are the 16 rows of A, rows of x the columns of B.
//
// A dot product is PARTS interleaved partial sums: part p takes the chunks p, p + PARTS, ... of
// CHUNK inner indices in order, from zero; the parts are added left to right. Within a chunk the
// order is the same everywhere: lane 4 g + t holds eight neighbours of 32, which are two steps. So
// neither the rows that share a pass, nor which entry, block or warp sums a part, touches a bit.
//
// x is float, and rounded to the weights' type, which changes no bit where X16 says that it has
// that type already; with SPLIT it is two rows, rounded and what is left, whose parts are added
// before the others are.
//
// With WEIGHT8 weights are E4M3, which WEIGHT16 holds when they are multiplied. Where rows of W
// have a scale, sums are multiplied by it.
//
// With GATED the rows of W are eight gates, the eight that these gate, and so on, and what is
// stored is silu(gate) * up.
#pragma once
#include "mma.cuh"
#include "model.cuh"

#ifndef WEIGHT16
#define WEIGHT16 bf16_t
#endif
#ifndef WEIGHT8
#define WEIGHT8 0
#endif
#ifndef SPLIT
#define SPLIT 0
#endif
#ifndef X16
#define X16 0
#endif
#ifndef GATED
#define GATED 0
#endif
#ifndef OUT
#define OUT float
#endif
#if X16 && SPLIT
#error "a rounded x leaves nothing to split off"
#endif
#define PARTS 8
#define CHUNK 128
#define WARPS 8

#if WEIGHT8
typedef e4m3_t Weight;
typedef Pack8 Weights;
#else
typedef WEIGHT16 Weight;
typedef Pack16 Weights;
#endif

struct Output {
  const float* weight_scale;  // by column; may be null
  const float* residual;      // may be null, may be `out`
  OUT* out;
  float* tap;  // second copy with its own row stride; may be null
  int rows;
  int columns;
  int tap_stride;
};

__device__ __forceinline__ void store(const Output& y, int row, int column, float value) {
  if (row >= y.rows || column >= y.columns) return;
  const long long at = static_cast<long long>(row) * y.columns + column;
  if (y.residual != nullptr) value += y.residual[at];
  from_float(value, y.out + at);
  if (y.tap != nullptr) y.tap[static_cast<long long>(row) * y.tap_stride + column] = value;
}

// Outputs `column` and `column` + 8 of the 16 of a tile.
__device__ __forceinline__ void store_pair(const Output& y, int row, int column, float top,
                                           float low) {
  if (y.weight_scale != nullptr && column < y.columns) {
    top *= y.weight_scale[column];
    low *= y.weight_scale[column + 8];
  }
  if (!GATED) {
    store(y, row, column, top);
    store(y, row, column + 8, low);
  } else if (row < y.rows && column < y.columns) {
    const long long at = static_cast<long long>(row) * (y.columns / 2);
    from_float(gated(top, low), y.out + at + column / 16 * 8 + column % 16);
  }
}

#if X16
typedef WEIGHT16 Input;
#else
typedef float Input;
#endif

// Eight neighbours of a row of x, as `split` (0: rounded, 1: what is left) has them.
__device__ __forceinline__ Pack16 pack_x(const Floats4* from, int split) {
  Pack16 pack;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float low = from[i / 2].f[i % 2 * 2], high = from[i / 2].f[i % 2 * 2 + 1];
    if (SPLIT) {
      const unsigned int near = pack_pair<WEIGHT16>(low, high);
      low -= split ? half_of<WEIGHT16>(near, 0) : 0.0f;
      high -= split ? half_of<WEIGHT16>(near, 1) : 0.0f;
    }
    pack.u[i] = pack_pair<WEIGHT16>(low, high);
  }
  return pack;
}

// The step `h` of 32 inner indices: `top` and `low` of weight rows g and g + 8.
__device__ __forceinline__ void step(float* sum, const Pack16& top, const Pack16& low,
                                     const Pack16& x, int h) {
  const unsigned int a[4] = {top.u[2 * h], low.u[2 * h], top.u[2 * h + 1], low.u[2 * h + 1]};
  mma_m16n8k16<WEIGHT16>(sum, a, x.u + 2 * h);
}

__device__ __forceinline__ int parts_of(int inner) {
  return inner / CHUNK < PARTS ? inner / CHUNK : PARTS;
}
