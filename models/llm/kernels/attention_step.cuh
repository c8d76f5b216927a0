// Common parts of the kernels that compute causal attention over the KV cache on tensor cores:
// attention_split (few rows per slot) and attention_prompt (many rows per slot). A row attends to
// positions 0..pos of its slot. Several blocks may share the positions of a row, as in
// Flash-Decoding.
//
// A tile is a group of adjacent rows of one slot. For one KV head, it has QUERY_TILES query tiles
// of up to 16 queries each. The plan (attention_plan.cu) says which tiles, and which parts of their
// positions, a block computes.
//
// Reduction order: positions are divided, from 0 on, into splits of SPLIT positions and steps of 16
// positions. Split s belongs to part s % PARTS. Step s belongs to quarter s % QUARTERS of its part.
// The steps of a quarter are computed in order, with an online softmax. The sums of the quarters
// are then added in order, and the parts in order of the parts (FoldFactors). The order depends
// only on the position of the row, not on the plan or the kernel, so both kernels give the same
// bits and are row invariant.
//
// If one block computes all parts of a tile, it adds their results in shared memory and registers.
// Otherwise the blocks write the result of each part to a workspace, and the last block to finish
// adds the results.
//
// If all rows attend to all 16 positions of a step, the step is computed for all rows at once.
// Otherwise it is computed row by row, with zeros in place of the values of later positions. Values
// to which a row must not attend (positions after it, drafts of other branches) therefore never
// enter its sums, not even multiplied by zero, so they may be NaN. Queries and softmax weights are
// each split into two 16-bit floats, high and low, which keep at least 16 bits of mantissa.
#pragma once
#ifndef WIDE_HEAD
#define WIDE_HEAD 128
#endif
#ifndef CACHE16
#define CACHE16 bf16_t
#endif
// Type of the output. With a 16-bit type, the kernels round their results; the next product would
// otherwise round them to the same bits when it loads them.
#ifndef OUT
#define OUT float
#endif
#include "attention_plan.cuh"
#include "mma.cuh"

#define STEP 16
#define QUARTERS 4
#define CHUNKS (WIDE_HEAD / 32)
#define HALVES (WIDE_HEAD / 64)
#define QUERIES (16 * QUERY_TILES)
// Number of floats in the workspace for one query and one part of its positions: the weighted sums
// of values, the maximum score, the mass (sum of the softmax weights) and padding.
#define PART_WIDTH (WIDE_HEAD + 4)
#define LOWEST -3.0e38f

struct alignas(8) Floats2 {
  float f[2];
};

struct TileRow {
  Path path;
  int slot;
  int pos;  // -1 for padding
};

// A tile of the plan, for the query heads that a block computes.
struct Tile {
  TileRow row[QUERIES];
  int parts[QUERIES];  // number of parts of each query; 0 for a missing query
  int index[QUERIES];  // index of each query among all queries of all rows
  int last;            // maximum position over the rows; -1 if the rows are padding
  int common;          // all rows attend to the same entries up to this position
  int is_chain;        // whether all rows are cached at their sequence positions
};

// The query heads that a block computes: `count` heads from `first` on, which have the KV head
// `kv_head`. A query tile contains `per_tile` heads of each of its rows.
struct Heads {
  int all;
  int kv_head;
  int first;
  int count;
  int per_tile;
};

// Returns the heads of this block. gridDim.y is the number of head tiles.
__device__ __forceinline__ Heads heads_of_block(int heads, int kv_heads, int tile_heads) {
  const int shared_by = heads / kv_heads, head_tiles = static_cast<int>(gridDim.y) / kv_heads;
  const int kv_head = static_cast<int>(blockIdx.y) / head_tiles;
  const int of_kv = static_cast<int>(blockIdx.y) % head_tiles * tile_heads;
  const int count = min(tile_heads, shared_by - of_kv);
  return {heads, kv_head, kv_head * shared_by + of_kv, count, tile_heads};
}

// Sets `tile` to a tile of the plan. One warp calls the function.
__device__ __forceinline__ void load_tile(Tile* tile, const PlanTile& span, const int* slot,
                                          const int* pos, const unsigned long long* ancestors,
                                          const Pages& pages, const Heads& heads) {
  const int lane = threadIdx.x % 32;
  int last = -1, common = 0x7fffffff;
  bool is_chain = true;
#pragma unroll
  for (int r = lane; r < QUERIES; r += 32) {
    TileRow own = {{0, -1}, -1, -1};
    if (r < span.rows) {
      const int row = span.first_row + r;
      own.slot = slot[row];
      own.pos = pos[row];
      own.path = path_at(ancestors, row, own.pos);
      if (!row_is_live(pages, own.slot, own.pos)) own.pos = -1;
    }
    tile->row[r] = own;
    last = max(last, own.pos);
    if (own.pos >= 0) common = min(common, own.path.base);
    is_chain = is_chain && own.path.drafts == 0;
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) {
    last = max(last, __shfl_xor_sync(FULL_WARP, last, offset));
    common = min(common, __shfl_xor_sync(FULL_WARP, common, offset));
  }
  is_chain = __all_sync(FULL_WARP, is_chain);
  if (lane == 0) {
    tile->last = last;
    tile->common = common;
    tile->is_chain = is_chain;
  }
  __syncwarp();
  const int tile_rows = 16 / heads.per_tile;
  for (int m = lane; m < QUERIES; m += 32) {
    const int of_tile = m % 16 / heads.per_tile, head = m % 16 % heads.per_tile;
    const int r = m / 16 * tile_rows + of_tile;
    const bool is_used = of_tile < tile_rows && r < span.rows && head < heads.count;
    tile->parts[m] = is_used ? parts_at(tile->row[r].pos) : 0;
    tile->index[m] = (span.first_row + r) * heads.all + heads.first + head;
  }
}

// Returns where a KV head begins in the cached keys or values: the offset in elements. `index` is
// the index of a position in the KV cache, as locate() returns it.
__device__ __forceinline__ long long head_at(const Pages& pages, int index, int kv_head) {
  return (static_cast<long long>(index) * pages.kv_heads + kv_head) * WIDE_HEAD;
}

// Splits x and y into two 16-bit floats each: `high` receives the rounded values, `low` the rounded
// differences between the values and their high parts.
__device__ __forceinline__ void split_pair(float x, float y, unsigned int* high,
                                           unsigned int* low) {
  *high = pack_pair<CACHE16>(x, y);
  *low = pack_pair<CACHE16>(x - half_of<CACHE16>(*high, 0), y - half_of<CACHE16>(*high, 1));
}

// Computes sum += part * by.
__device__ __forceinline__ void add_scaled(Floats4* sum, const Floats4& part, float by) {
#pragma unroll
  for (int i = 0; i < 4; ++i) sum->f[i] = fmaf(part.f[i], by, sum->f[i]);
}

// Multiplies sum by `shrink` and adds part * by.
__device__ __forceinline__ void fold_sum(Floats4* sum, float shrink, const Floats4& part,
                                         float by) {
#pragma unroll
  for (int i = 0; i < 4; ++i) sum->f[i] *= shrink;
  add_scaled(sum, part, by);
}

// Factors of an online softmax for one query, whose positions are divided into parts: they scale
// the weighted sums of all earlier parts and those of the next part before both are added.
struct FoldFactors {
  float shrink;  // factor of the sums of the earlier parts
  float by;      // factor of the sums of the next part
  float top;     // maximum score of all these parts

  // `before` is the maximum score of the earlier parts, `part_top` that of the next part.
  __device__ __forceinline__ FoldFactors(float before, float part_top) {
    top = part_top > before ? part_top : before;
    shrink = exp_bounded(before - top);
    by = exp_bounded(part_top - top);
  }
};

// The functions below store two (Floats2) or four (Floats4) adjacent dimensions.
__device__ __forceinline__ void store_floats(float* y, const Floats2& x) {
  *reinterpret_cast<Floats2*>(y) = x;
}

__device__ __forceinline__ void store_floats(float* y, const Floats4& x) {
  *reinterpret_cast<Floats4*>(y) = x;
}

template <typename T>
__device__ __forceinline__ void store_floats(T* y, const Floats2& x) {
  *reinterpret_cast<unsigned int*>(y) = pack_pair<T>(x.f[0], x.f[1]);
}

template <typename T>
__device__ __forceinline__ void store_floats(T* y, const Floats4& x) {
  *reinterpret_cast<Pack8*>(y) = {{pack_pair<T>(x.f[0], x.f[1]), pack_pair<T>(x.f[2], x.f[3])}};
}

// Stores sum / mass, which is attention output. `mass` is the sum of the unnormalized softmax
// weights; it is 0 for padding rows, whose output is 0.
template <typename Floats>
__device__ __forceinline__ void store_quotient(OUT* y, Floats sum, float mass) {
  const float inverse = mass == 0.0f ? 0.0f : 1.0f / mass;
#pragma unroll
  for (float& x : sum.f) x *= inverse;
  store_floats(y, sum);
}

// Loads dimensions 32 c + 8 t .. 32 c + 8 t + 7 of query m of the tile, multiplied by `scale`, and
// splits them into high and low parts. In operands A of mma steps, the query is row g + 8 * `side`.
// word(low_part, half, i) returns word i of the operand with the high (0) or low (1) parts for one
// of the two mma steps (`half`) of the 32 dimensions.
template <typename Word>
__device__ __forceinline__ void load_query(const float* qkv, const Tile& tile, const Heads& heads,
                                           int kv_heads, float scale, int m, int c, int side,
                                           Word word) {
  const bool is_valid = tile.parts[m] > 0 && tile.last >= 0;
  const int row = tile.index[m] / heads.all, head = tile.index[m] % heads.all;
  const long long at = static_cast<long long>(row) * (heads.all + 2 * kv_heads) + head;
  const float* const from = qkv + at * WIDE_HEAD + 32 * c + 8 * (threadIdx.x % 4);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float x = is_valid ? from[2 * i] * scale : 0.0f;
    const float y = is_valid ? from[2 * i + 1] * scale : 0.0f;
    const int half = i / 2, element = 2 * (i % 2) + side;
    split_pair(x, y, &word(0, half, element), &word(1, half, element));
  }
}

#define SUMS (8 * HALVES)

// What a warp accumulates for the 16 queries of a query tile. Lane 4 g + t holds results of row g
// (side 0) and of row g + 8 (side 1) of the mma operands.
struct Sums {
  // Weighted sums of values: value[i].f[2 side + e] belongs to the dimension in column 2t + e of
  // the operand B with which sum i is computed.
  Floats4 value[SUMS];
  float top[2];   // maximum scores
  float mass[2];  // sums of the softmax weights of this lane's positions

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < SUMS; ++i) value[i] = {};
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      top[side] = LOWEST;
      mass[side] = 0.0f;
    }
  }

  __device__ __forceinline__ Floats2 of_side(int side, int i) const {
    return {{value[i].f[2 * side], value[i].f[2 * side + 1]}};
  }

  // Returns the sum of the softmax weights of all lanes of the row.
  __device__ __forceinline__ float whole_mass(int side) const {
    float whole = mass[side];
#pragma unroll
    for (int offset = 1; offset < 4; offset <<= 1) {
      whole += __shfl_xor_sync(FULL_WARP, whole, offset);
    }
    return whole;
  }
};

// Kinds of steps. A step is compiled once for each kind with which it is used.
// FirstStep: for all rows at once; it is the first step of its quarter and sets the sums.
struct FirstStep {
  static constexpr bool FOR_ALL = true, IS_FIRST = true;
};
// NextStep: for all rows at once; it adds to the sums of earlier steps.
struct NextStep {
  static constexpr bool FOR_ALL = true, IS_FIRST = false;
};
// RowStep: for one row; it adds to the sums, which the caller clears before the first step of a
// quarter.
struct RowStep {
  static constexpr bool FOR_ALL = false, IS_FIRST = false;
};

// The scores of a step: products with the high parts (0) and the low parts (1) of the queries.
// part[.][h], in lane 4 g + t, has the products of row g with keys 2t + 8h and 2t + 8h + 1, and
// then those of row g + 8 with these keys.
struct Scores {
  float part[2][2][4];
};

// Computes the scores of a step. query(c, low_part, half) returns an operand of load_query. key(j,
// c) returns dimensions 32 c + 8 t .. 32 c + 8 t + 7 of key g + 8 j in lane 4 g + t.
template <typename Query, typename Key>
__device__ __forceinline__ Scores compute_scores(Query query, Key key) {
  Scores score = {};
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    const Pack16 b[2] = {key(0, c), key(1, c)};
#pragma unroll
    for (int low_part = 0; low_part < 2; ++low_part) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Pack16 a = query(c, low_part, half);
        mma_m16n8k16<CACHE16>(score.part[low_part][0], a.u, b[0].u + 2 * half);
        mma_m16n8k16<CACHE16>(score.part[low_part][1], a.u, b[1].u + 2 * half);
      }
    }
  }
  return score;
}

// Adds a step of the kind `Step` to the sums. value(p) returns the operands B of two mma steps,
// for sums 2 p and 2 p + 1: the values of 16 positions in one dimension per column. A RowStep adds
// the step to the rows with is_active[side] only, which attend to the positions up to the last
// visible one (`seen`) of the 16.
template <typename Step, typename Value>
__device__ __forceinline__ void add_step(Sums* sums, const Scores& score, const bool* is_active,
                                         int seen, Value value) {
  // Returns whether position i of the four positions of this lane is visible.
  const auto is_visible = [&](int i) {
    return Step::FOR_ALL || 2 * static_cast<int>(threadIdx.x % 4) + i % 2 + 8 * (i / 2) <= seen;
  };
  float shrink[2];
  unsigned int high[4], low[4];
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    float x[4], tile_top = Step::IS_FIRST ? LOWEST : sums->top[side];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = 2 * side + i % 2;
      const float s = score.part[0][i / 2][at] + score.part[1][i / 2][at];
      x[i] = is_visible(i) ? s : LOWEST;
      tile_top = fmaxf(tile_top, x[i]);
    }
#pragma unroll
    for (int offset = 1; offset < 4; offset <<= 1) {
      const float other = __shfl_xor_sync(FULL_WARP, tile_top, offset);
      tile_top = fmaxf(tile_top, other);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float e = exp_bounded(x[i] - tile_top);
      x[i] = is_visible(i) ? e : 0.0f;
    }
    const float added = (x[0] + x[1]) + (x[2] + x[3]);
    shrink[side] = Step::IS_FIRST ? 0.0f : exp_bounded(sums->top[side] - tile_top);
    if (Step::FOR_ALL || is_active[side]) {
      sums->mass[side] = Step::IS_FIRST ? added : fmaf(sums->mass[side], shrink[side], added);
      sums->top[side] = tile_top;
    }
    split_pair(x[0], x[1], high + side, low + side);
    split_pair(x[2], x[3], high + side + 2, low + side + 2);
  }
  // Masks of the pairs of 16-bit values 2t, 2t + 1 and 2t + 8, 2t + 9.
  unsigned int visible[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    visible[i] = (is_visible(2 * i) ? 0xffffu : 0u) | (is_visible(2 * i + 1) ? 0xffff0000u : 0u);
  }
#pragma unroll
  for (int p = 0; p < SUMS / 2; ++p) {
    Pack16 b = value(p);
#pragma unroll
    for (int i = 0; i < 4; ++i) b.u[i] &= visible[i % 2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      Floats4* const sum = sums->value + 2 * p + n;
      Floats4 next = {};
#pragma unroll
      for (int i = 0; i < 4 && !Step::IS_FIRST; ++i) next.f[i] = sum->f[i] * shrink[i / 2];
      mma_m16n8k16<CACHE16>(next.f, high, b.u + 2 * n);
      mma_m16n8k16<CACHE16>(next.f, low, b.u + 2 * n);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (Step::FOR_ALL || is_active[i / 2]) sum->f[i] = next.f[i];
      }
    }
  }
}

// Results of several blocks --------------------------------------------------------------------

// Stores dimensions from d on of the result of a part of the positions of query m. If the query
// has only this part, stores the attention output instead. `workspace` [parts, QUERIES,
// PART_WIDTH] contains the results of the tile's parts.
template <typename Floats>
__device__ __forceinline__ void store_part(float* workspace, OUT* out, const Tile& tile, int m,
                                           int part, int d, const Floats& sum, float top,
                                           float mass) {
  if (tile.parts[m] == 1) {
    store_quotient(out + static_cast<long long>(tile.index[m]) * WIDE_HEAD + d, sum, mass);
    return;
  }
  float* const of_part = workspace + (part * QUERIES + m) * PART_WIDTH;
  store_floats(of_part + d, sum);
  if (d == 0) {
    of_part[WIDE_HEAD] = top;
    of_part[WIDE_HEAD + 1] = mass;
  }
}

// Adds the results of the parts of all queries in order, and stores the attention output. The last
// block to arrive calls this function. Lane p of a warp computes the factors of part p
// (FoldFactors), for which it needs the maximum score over the parts before p. `factors` is shared
// memory for 3 * QUERIES * PARTS floats.
__device__ __forceinline__ void add_parts(const float* workspace, OUT* out, const Tile& tile,
                                          float* factors) {
  const int lane = threadIdx.x % 32;
  float* const shrink_of = factors;  // [QUERIES][PARTS], like the next two arrays
  float* const by_of = shrink_of + QUERIES * PARTS;
  float* const mass_of = by_of + QUERIES * PARTS;
  for (int m = threadIdx.x / 32; m < QUERIES; m += WARPS) {
    const bool is_valid = lane < tile.parts[m];
    const float* of_part = workspace + (lane * QUERIES + m) * PART_WIDTH + WIDE_HEAD;
    const float top = is_valid ? of_part[0] : LOWEST;
    float highest = top;  // maximum over parts 0 .. lane, after the loop
#pragma unroll
    for (int offset = 1; offset < PARTS; offset <<= 1) {
      const float other = __shfl_sync(FULL_WARP, highest, max(lane - offset, 0));
      highest = other > highest ? other : highest;
    }
    const float before = __shfl_sync(FULL_WARP, highest, max(lane - 1, 0));
    const FoldFactors of_lane(lane == 0 ? LOWEST : before, top);
    shrink_of[m * PARTS + lane] = of_lane.shrink;
    by_of[m * PARTS + lane] = of_lane.by;
    mass_of[m * PARTS + lane] = is_valid ? of_part[1] : 0.0f;
  }
  __syncthreads();
  for (int item = threadIdx.x; item < QUERIES * WIDE_HEAD / 4; item += WARPS * 32) {
    const int m = item / (WIDE_HEAD / 4), d = item % (WIDE_HEAD / 4) * 4;
    if (tile.parts[m] <= 1) continue;
    Floats4 all_sum = {};
    float all_mass = 0.0f;
#pragma unroll 8
    for (int part = 0; part < tile.parts[m]; ++part) {
      const float* of_part = workspace + (part * QUERIES + m) * PART_WIDTH + d;
      const float shrink = shrink_of[m * PARTS + part], by = by_of[m * PARTS + part];
      fold_sum(&all_sum, shrink, *reinterpret_cast<const Floats4*>(of_part), by);
      all_mass = fmaf(mass_of[m * PARTS + part], by, all_mass * shrink);
    }
    store_quotient(out + static_cast<long long>(tile.index[m]) * WIDE_HEAD + d, all_sum, all_mass);
  }
  __syncthreads();  // the next tile overwrites the factors of this one
}
