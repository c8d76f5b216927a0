// Common parts of the tensor-core products linear_few and linear_many: y = x W^T (+ residual). In
// each mma instruction operand A is 16 rows of W and operand B is 8 rows of x.
//
// Reduction order: a dot product consists of PARTS partial sums. The inner indices are divided into
// chunks of CHUNK indices. Part p starts from zero and adds chunks p, p + PARTS, ... in order; the
// parts are then added in order. Within a chunk the order is always the same: the products of 32
// indices are added by two mma steps. Lane 4 g + t has loaded indices 8 t to 8 t + 7 of the 32; the
// first step takes the first four indices of each lane, the second step the last four. The bits of
// a row therefore do not depend on the other rows of a tile, nor on which kernel, block or warp
// sums a part (row invariance).
//
// Input: x is float and is rounded to WEIGHT16. With X16, x already has the type WEIGHT16; the
// result has the same bits. With SPLIT_X each row of x becomes two rows of B, the rounded values
// and the remainders. For each part, the sums of the two rows are added to each other before the
// parts are added. With WEIGHT8 the weights are stored as E4M3 and are converted to WEIGHT16. If
// there are scales, each sum is multiplied by the scale of its row of W. With BIAS, the bias of the
// column is then added.
//
// Folded norms: an RMSNorm between two products is computed by the products themselves. If `norm`
// (the norm weight) is not null, the first product writes its result times the norm weight as x of
// the next product, and the sums of the squares of its result. The next product gets these sums as
// `square_sums`, and divides its result by the root mean square of each row, which it computes from
// them. linear_few writes and reads a sum per 16 columns. linear_many, whose blocks read the sums
// of many rows, writes and reads a sum per 64 columns. Both products have the same rows, so the
// same kernel computes them. The order of the additions is the same in both kernels.
//
// Epilogues: with GATED the rows of W are interleaved, alternating between eight rows of the gate
// projection and the same eight rows of the up projection; silu(gate) * up is stored. With
// ROPE_HEAD_DIM (the head size) the rows of W give queries, keys and values. Within a head they
// alternate between eight rows of the first half and the eight rows of the second half that are
// rotated with them. Rotated queries are stored to `out`. Rotated keys, and values, which are not
// rotated, are stored to the KV cache.
#pragma once
#include "mma.cuh"
#include "model.cuh"

#ifndef WEIGHT16
#define WEIGHT16 bf16_t
#endif
#ifndef WEIGHT8
#define WEIGHT8 0
#endif
#ifndef SPLIT_X
#define SPLIT_X 0
#endif
#ifndef X16
#define X16 0
#endif
#ifndef BIAS
#define BIAS 0
#endif
#ifndef GATED
#define GATED 0
#endif
#ifndef ROPE_HEAD_DIM
#define ROPE_HEAD_DIM 0
#endif
#ifndef OUT
#define OUT float
#endif
#ifndef CACHE
#define CACHE bf16_t
#endif
#if X16 && SPLIT_X
#error "X16 and SPLIT_X exclude each other: a rounded x has no remainder"
#endif
#define PARTS 4
#define CHUNK 128
#define SQUARES_COLUMNS 64  // columns whose squares are added before those of other columns
// A kernel defines WARPS, the number of warps of a block, and GROUP, the number of output columns
// per entry of norm_square_sums.
#define NOT_STORED -1

#if X16
typedef WEIGHT16 Input;
#else
typedef float Input;
#endif
#if SPLIT_X
typedef float NormOut;
#else
typedef WEIGHT16 NormOut;
#endif

#if WEIGHT8
typedef e4m3_t Weight;
typedef Pack8 Weights;
#else
typedef WEIGHT16 Weight;
typedef Pack16 Weights;
#endif

struct Output {
  const float* weight_scale;  // [columns], scales of the weight rows; may be null
  const float* bias;          // [columns], read with BIAS only
  const float* residual;      // [rows, columns], may be `out`; null adds nothing
  OUT* out;
  float* copy;  // receives a copy of the result, with row stride copy_stride; may be null
  int rows;
  int columns;
  int copy_stride;
  const float* norm;        // weight of a norm that is folded into this product; may be null
  NormOut* norm_out;        // receives the result multiplied by `norm`
  float* norm_square_sums;  // [rows, groups_of(columns)], receives sums of squares of the result
};

// Returns the number of entries of norm_square_sums per row.
__device__ __forceinline__ int groups_of(int columns) { return (columns + GROUP - 1) / GROUP; }

// Operands of the epilogue (code that stores results) that applies RoPE and writes the KV cache.
// This epilogue is compiled if ROPE_HEAD_DIM is not 0.
struct RopeStore {
  const float* rope_table;  // [positions, head_dim]: cosines, then sines
  const int* slot;
  const int* pos;
  const unsigned long long* ancestors;
  Pages pages;
  CACHE* keys;
  CACHE* values;
  int heads;
  int scratch_page;
};

struct RowState {
  int pos;
  int slot;
  unsigned long long ancestors;
};

// What the epilogue (the code that stores results) needs for outputs `column` and `column` + 8 of a
// row. These inputs are loaded before the sums are complete, so that the latencies of all loads
// overlap. Unused inputs are 0.
struct EpilogueInputs {
  float residual[2];
  float norm[2];
  float weight_scale[2];
#if BIAS
  float bias[2];
#endif
#if ROPE_HEAD_DIM
  float cosine;
  float sine;
  int cached;  // position in the KV cache
  int page;    // page of the KV cache, or NOT_STORED
#endif
};

// Loads the residual. The previous kernel may write it, so wait for that kernel before the call.
__device__ __forceinline__ void load_residual(EpilogueInputs* in, const Output& y, int row,
                                              int column) {
#pragma unroll
  for (int i = 0; i < 2; ++i) in->residual[i] = 0.0f;
  if (GATED || ROPE_HEAD_DIM || y.residual == nullptr) return;
  if (row >= y.rows || column >= y.columns) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    in->residual[i] = y.residual[static_cast<long long>(row) * y.columns + column + 8 * i];
  }
}

// Loads norm weights, weight scales and biases.
__device__ __forceinline__ void load_factors(EpilogueInputs* in, const Output& y, int column) {
  const bool has_norm = !GATED && !ROPE_HEAD_DIM && y.norm != nullptr && column < y.columns;
  const bool has_scale = y.weight_scale != nullptr && column < y.columns;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    in->norm[i] = has_norm ? y.norm[column + 8 * i] : 0.0f;
    in->weight_scale[i] = has_scale ? y.weight_scale[column + 8 * i] : 0.0f;
#if BIAS
    in->bias[i] = column < y.columns ? y.bias[column + 8 * i] : 0.0f;
#endif
  }
}

// Adds the residual to an output, and stores the result, its copy (Output::copy) and its product
// with the norm weight if these are requested. Returns the result. `which` is the index of the
// output in the arrays of `in`: 0 or 1.
__device__ __forceinline__ float store(const Output& y, const EpilogueInputs& in, int which,
                                       int row, int column, float value) {
  const long long at = static_cast<long long>(row) * y.columns + column;
  if (y.residual != nullptr) value += in.residual[which];
  from_float(value, y.out + at);
  if (y.copy != nullptr) y.copy[static_cast<long long>(row) * y.copy_stride + column] = value;
  if (y.norm != nullptr) from_float(value * in.norm[which], y.norm_out + at);
  return value;
}

#if ROPE_HEAD_DIM
// The rows of the weight matrix are interleaved: its outputs `column` and `column` + 8 are
// dimensions i and i + ROPE_HEAD_DIM / 2 of a head, which are rotated together. Returns the number
// of this pair, which is i plus ROPE_HEAD_DIM / 2 for each head before it.
__device__ __forceinline__ int rotation_of(int column) { return column / 16 * 8 + column % 16; }

// Rotates dimensions i and i + ROPE_HEAD_DIM / 2 of a head, which have the values `a` and `b`, and
// stores both. The arithmetic is that of rope.cu, so the results have the same bits.
__device__ __forceinline__ void store_rotated(const Output& y, const EpilogueInputs& in,
                                              const RopeStore& to, int row, int column, float a,
                                              float b) {
  const int kv_heads = to.pages.kv_heads, half = ROPE_HEAD_DIM / 2;
  const int head = rotation_of(column) / half, i = rotation_of(column) % half;
  const int of_cache = head - to.heads;
  if (in.page == NOT_STORED) return;
  if (of_cache < kv_heads) {
    const float rotated = fmaf(a, in.cosine, -(b * in.sine));
    b = fmaf(b, in.cosine, a * in.sine);
    a = rotated;
  }
  if (of_cache < 0) {
    OUT* out = y.out;
    out += (static_cast<long long>(row) * (to.heads + 2 * kv_heads) + head) * ROPE_HEAD_DIM + i;
    from_float(a, out);
    from_float(b, out + half);
    return;
  }
  const long long at = element_of(to.pages, in.page, in.cached, of_cache % kv_heads);
  CACHE* cache = (of_cache < kv_heads ? to.keys : to.values) + at + i;
  from_float(a, cache);
  from_float(b, cache + half);
}
#endif

// Loads the position of a row, its slot and its ancestors in the draft tree (Path::drafts). For a
// row after the last row of the output, position and slot are -1.
__device__ __forceinline__ RowState load_row_state(const Output& y, const RopeStore& to, int row) {
  if (!ROPE_HEAD_DIM || row >= y.rows) return {-1, -1, 0};
  return {to.pos[row], to.slot[row], to.ancestors != nullptr ? to.ancestors[row] : 0};
}

// Loads the cosine and the sine for the rotation of an output, and the KV-cache page that a key or
// value is stored to. Both depend on the position and slot of the row (`state`).
__device__ __forceinline__ void load_rotation(EpilogueInputs* in, const Output& y,
                                              const RopeStore& to, const RowState& state,
                                              int column) {
#if ROPE_HEAD_DIM
  const int half = ROPE_HEAD_DIM / 2, i = rotation_of(column) % half;
  const int of_cache = rotation_of(column) / half - to.heads;
  in->page = NOT_STORED;
  if (column >= y.columns || !row_is_live(to.pages, state.slot, state.pos)) return;
  if (of_cache < to.pages.kv_heads) {
    const float* at = to.rope_table + static_cast<long long>(state.pos) * ROPE_HEAD_DIM + i;
    in->cosine = at[0];
    in->sine = at[half];
  }
  const Path path = {state.ancestors, state.pos - __popcll(state.ancestors)};
  in->cached = cached_at(path, state.pos);
  in->page = of_cache < 0 ? 0 : page_of(to.pages, state.slot, in->cached);
  if (of_cache >= 0 && in->page == to.scratch_page) in->page = NOT_STORED;
#endif
}

// Stores outputs `column` and `column` + 8 of a row, whose sums are `top` and `low`. GROUP / 2
// adjacent lanes store GROUP columns. All lanes of the warp must call the function, because it
// contains a shuffle. Rows and columns after the end are skipped.
__device__ __forceinline__ void store_pair(const Output& y, const EpilogueInputs& in,
                                           const RopeStore& to, int row, int column, float top,
                                           float low) {
  const bool in_range = row < y.rows && column < y.columns;
  if (in_range && y.weight_scale != nullptr) {
    top *= in.weight_scale[0];
    low *= in.weight_scale[1];
  }
#if BIAS
  top += in.bias[0];
  low += in.bias[1];
#endif
#if GATED
  const long long at =
      static_cast<long long>(row) * (y.columns / 2) + column / 16 * 8 + column % 16;
  if (in_range) from_float(gated(top, low), y.out + at);
#elif ROPE_HEAD_DIM
  if (in_range) store_rotated(y, in, to, row, column, top, low);
#else
  float sum = 0.0f;
  if (in_range) {
    top = store(y, in, 0, row, column, top);
    low = store(y, in, 1, row, column + 8, low);
    sum = fmaf(top, top, low * low);
  }
  if (y.norm == nullptr) return;
  for (int offset = 1; offset < GROUP / 2; offset *= 2) {
    sum += __shfl_xor_sync(FULL_WARP, sum, offset);
  }
  if (!in_range || threadIdx.x % (GROUP / 2) != 0) return;
  y.norm_square_sums[static_cast<long long>(row) * groups_of(y.columns) + column / GROUP] = sum;
#endif
}

// Computes the factors by which rows [first, first + COUNT) of the result are multiplied: 1 / root
// mean square of the row before the norm if `square_sums` is not null (folded norm), otherwise 1.
template <int COUNT>
__device__ __forceinline__ void load_scales(const float* square_sums, float eps, int first,
                                            int rows, int inner, float* scale) {
  const int groups = groups_of(inner);
  // Number of rows that a warp loads at once, so that their memory latencies overlap.
  constexpr int AT_ONCE = COUNT >= 4 * WARPS ? 4 : (COUNT + WARPS - 1) / WARPS;
  for (int r = threadIdx.x / 32; r < COUNT; r += AT_ONCE * WARPS) {
    float sum[AT_ONCE] = {};
    const int step = SQUARES_COLUMNS / GROUP;  // adjacent sums that are added to each other first
    for (int k = threadIdx.x % 32 * step; square_sums != nullptr && k < groups; k += 32 * step) {
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const int row = r + i * WARPS;
        if (row >= COUNT || first + row >= rows) continue;
        const float* const of = square_sums + static_cast<long long>(first + row) * groups + k;
        float added = of[0];
        if (step == 4) {
          const float second = k + 1 < groups ? of[1] : 0.0f;
          const float third = k + 2 < groups ? of[2] : 0.0f;
          const float fourth = k + 3 < groups ? of[3] : 0.0f;
          added = (added + second) + (third + fourth);
        }
        sum[i] += added;
      }
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int row = r + i * WARPS;
      const float whole = warp_sum(sum[i]);
      if (threadIdx.x % 32 != 0 || row >= COUNT) continue;
      const float mean = whole / static_cast<float>(inner);
      scale[row] = square_sums == nullptr ? 1.0f : 1.0f / sqrtf(mean + eps);
    }
  }
}

// Packs eight adjacent values of a row of x, rounded to 16 bits. With SPLIT_X and split 1, packs
// the rounded differences between the values and the rounded values instead.
__device__ __forceinline__ Pack16 pack_x(const Floats4* from, int split) {
  Pack16 pack;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float low = from[i / 2].f[i % 2 * 2], high = from[i / 2].f[i % 2 * 2 + 1];
    if (SPLIT_X) {
      const unsigned int near = pack_pair<WEIGHT16>(low, high);
      low -= split ? half_of<WEIGHT16>(near, 0) : 0.0f;
      high -= split ? half_of<WEIGHT16>(near, 1) : 0.0f;
    }
    pack.u[i] = pack_pair<WEIGHT16>(low, high);
  }
  return pack;
}

// Sets `a` to operand A of an mma instruction for 16 inner indices. Lane 4 g + t (t < 4) has packs
// of eight weights for inner indices 8 t to 8 t + 7 of 32: `top` of row g of the mma tile, `low` of
// row g + 8. The operand consists of the first four weights of each pack if h is 0, of the last
// four if h is 1.
__device__ __forceinline__ void load_operand(const Pack16& top, const Pack16& low, int h,
                                             unsigned int* a) {
  a[0] = top.u[2 * h];
  a[1] = low.u[2 * h];
  a[2] = top.u[2 * h + 1];
  a[3] = low.u[2 * h + 1];
}

// Returns the number of partial sums that are not empty: PARTS, or the number of chunks of the
// inner dimension if there are fewer.
__device__ __forceinline__ int parts_of(int inner) {
  return inner / CHUNK < PARTS ? inner / CHUNK : PARTS;
}
