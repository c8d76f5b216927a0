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
// x may lack its norm's division: the sums of its rows then get it, by sums of squares that who
// wrote x left. And so may the result be left to who reads it, times the weight of a norm.
//
// With GATED the rows of W are eight gates, the eight that these gate, and so on, and what is
// stored is silu(gate) * up. With TURNED, the size of a head, they are eight of the first half of a
// head, the eight of the second that these are turned with, and so on, of queries, keys and values:
// the queries are stored turned, and keys and values go to the cache.
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
#ifndef TURNED
#define TURNED 0
#endif
#ifndef OUT
#define OUT float
#endif
#ifndef CACHE
#define CACHE bf16_t
#endif
#if X16 && SPLIT
#error "a rounded x leaves nothing to split off"
#endif
#define PARTS 8
#define CHUNK 128
#define WARPS 8
#define GROUP 16  // results whose squares are summed up

#if X16
typedef WEIGHT16 Input;
#else
typedef float Input;
#endif
#if SPLIT
typedef float Normed;
#else
typedef WEIGHT16 Normed;
#endif

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
  const float* norm;  // weight of a norm of the result; may be null
  Normed* normed;     // the result times that
  float* sums;        // of its squares, [rows, columns / GROUP]
};

// Of TURNED.
struct Heads {
  const float* turn;  // of each position cosines, then sines
  const int* slot;
  const int* pos;
  const unsigned long long* tree;
  Pages pages;
  CACHE* keys;
  CACHE* values;
  int heads;
  int scratch_page;
};

// The result, with what is added to it.
__device__ __forceinline__ float store(const Output& y, int row, int column, float value) {
  const long long at = static_cast<long long>(row) * y.columns + column;
  if (y.residual != nullptr) value += y.residual[at];
  from_float(value, y.out + at);
  if (y.tap != nullptr) y.tap[static_cast<long long>(row) * y.tap_stride + column] = value;
  if (y.norm != nullptr) from_float(value * y.norm[column], y.normed + at);
  return value;
}

#if TURNED
// Dimensions i and i + TURNED / 2 of a head; rotary embedding and cache as in rope.cu.
__device__ __forceinline__ void store_turned(const Heads& to, float* out, int row, int head, int i,
                                             float a, float b) {
  const int p = to.pos[row], slot = to.slot[row], half = TURNED / 2;
  const int kv_heads = to.pages.kv_heads, of_cache = head - to.heads;
  if (!row_is_live(to.pages, slot, p)) return;
  if (of_cache < kv_heads) {
    const float* cosine = to.turn + static_cast<long long>(p) * TURNED + i;
    const float turned = fmaf(a, cosine[0], -(b * cosine[half]));
    b = fmaf(b, cosine[0], a * cosine[half]);
    a = turned;
  }
  if (of_cache < 0) {
    out += (static_cast<long long>(row) * (to.heads + 2 * kv_heads) + head) * TURNED + i;
    out[0] = a;
    out[half] = b;
    return;
  }
  const int cached = cached_at(path_at(to.tree, row, p), p);
  const int page = page_of(to.pages, slot, cached);
  if (page == to.scratch_page) return;
  const long long at = element_of(to.pages, page, cached, of_cache % kv_heads);
  CACHE* cache = (of_cache < kv_heads ? to.keys : to.values) + at + i;
  from_float(a, cache);
  from_float(b, cache + half);
}
#endif

// Outputs `column` and `column` + 8 of the 16 of a tile, by eight neighbours of a warp that has no
// other work; a row or column past the end is left out.
__device__ __forceinline__ void store_pair(const Output& y, const Heads& to, int row, int column,
                                           float top, float low) {
  const bool there = row < y.rows && column < y.columns;
  const int half = column / 16 * 8 + column % 16;
  if (there && y.weight_scale != nullptr) {
    top *= y.weight_scale[column];
    low *= y.weight_scale[column + 8];
  }
#if GATED
  const long long at = static_cast<long long>(row) * (y.columns / 2) + half;
  if (there) from_float(gated(top, low), y.out + at);
#elif TURNED
  const int head = half / (TURNED / 2);
  if (there) store_turned(to, y.out, row, head, half % (TURNED / 2), top, low);
#else
  float sum = 0.0f;
  if (there) {
    top = store(y, row, column, top);
    low = store(y, row, column + 8, low);
    sum = fmaf(top, top, low * low);
  }
  if (y.norm == nullptr) return;
  for (int offset = 1; offset < 8; offset *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, offset);
  if (!there || column % 8 != 0) return;
  y.sums[static_cast<long long>(row) * (y.columns / GROUP) + column / GROUP] = sum;
#endif
}

// What the sums of `count` rows of x from `first` on are still to be multiplied by.
__device__ __forceinline__ void load_scales(const float* squares, float eps, int first, int count,
                                            int rows, int inner, float* scale) {
  const int groups = inner / GROUP;
  constexpr int AT_ONCE = 4;  // rows of a warp, for one by one they would wait for memory
  for (int r = threadIdx.x / 32; r < count; r += AT_ONCE * WARPS) {
    float sum[AT_ONCE] = {};
    for (int k = threadIdx.x % 32; squares != nullptr && k < groups; k += 32) {
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const int row = r + i * WARPS;
        if (row >= count || first + row >= rows) continue;
        sum[i] += squares[static_cast<long long>(first + row) * groups + k];
      }
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int row = r + i * WARPS;
      const float whole = warp_sum(sum[i]);
      if (threadIdx.x % 32 != 0 || row >= count) continue;
      const float mean = whole / static_cast<float>(inner);
      scale[row] = squares == nullptr ? 1.0f : 1.0f / sqrtf(mean + eps);
    }
  }
}

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
