// Causal attention over the KV cache on tensor cores. A row attends to positions 0..pos of its
// slot. A row of a draft tree attends to the committed positions and to the drafts on its path.
// Several blocks may share the positions of a row, as in Flash-Decoding.
//
// A tile is a group of adjacent rows of one slot. For one KV head, it has QUERY_TILES query tiles
// of up to 16 queries each. A warp loads keys and values once for all queries of a tile. The plan
// (attention_plan.cu) says which tiles, and which parts of their positions, a block computes.
//
// Reduction order: positions are divided, from 0 on, into splits of SPLIT positions and steps of 16
// positions. Split s belongs to part s % PARTS. Within a part, warp w computes the steps whose
// number is w modulo WARPS, in order, with an online softmax. The sums of the warps are then added
// in order of the warps, and the parts in order of the parts (FoldFactors). The order depends only
// on the position of the row, not on the plan, so the kernel is row invariant.
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
#ifndef WIDE_HEAD
#define WIDE_HEAD 128
#endif
#ifndef CACHE16
#define CACHE16 bf16_t
#endif
// Type of the output. With a 16-bit type, this kernel rounds its results; the next product would
// otherwise round them to the same bits when it loads them.
#ifndef OUT
#define OUT float
#endif
// Number of query tiles in a tile. If there are several, the sums of a warp are in shared memory
// rather than in registers.
#ifndef QUERY_TILES
#define QUERY_TILES 1
#endif
#include "attention_plan.cuh"
#include "mma.cuh"

#define WARPS 4
#define STEP 16
#define CHUNKS (WIDE_HEAD / 32)
#define HALVES (WIDE_HEAD / 64)
#define QUERIES (16 * QUERY_TILES)
// Number of Floats4 in which a lane accumulates the results of a query tile: HALVES * 8 for
// weighted sums of values, and one for the maximum scores and the masses (sums of softmax weights)
// of queries g and g + 8.
#define SUMS (HALVES * 8 + 1)
// Number of floats in the workspace for one query and one part of its positions: the weighted sums
// of values, the maximum score, the mass (sum of the softmax weights) and padding.
#define PART_WIDTH (WIDE_HEAD + 4)
#define LOWEST -3.0e38f

struct TileRow {
  Path path;
  int slot;
  int pos;  // -1 for padding
};

struct Tile {
  int last;      // maximum position over the rows; -1 if the rows are padding
  int common;    // all rows attend to the same entries up to this position
  int is_chain;  // whether all rows are cached at their sequence positions
};

// Returns the index in the KV cache of position `first` + lane % 16 of a row's slot. If this
// position is after the row's own position, the function returns the index of the row's own
// position, and the caller masks the value that it loads.
__device__ __forceinline__ int locate(const Pages& pages, const TileRow& row, int first) {
  const int cached =
      cached_at(row.path, min(first + static_cast<int>(threadIdx.x) % STEP, row.pos));
  const int inside = cached & ((1 << pages.page_shift) - 1);
  return (page_of(pages, row.slot, cached) << pages.page_shift) + inside;
}

// Returns where a KV head begins in the cached keys or values: the offset in elements. `index` is
// the index of a position in the KV cache, as locate() returns it.
__device__ __forceinline__ long long head_at(const Pages& pages, int index, int kv_head) {
  return (static_cast<long long>(index) * pages.kv_heads + kv_head) * WIDE_HEAD;
}

// Types of the argument with which a step is compiled twice: for all rows at once, and for one row.
struct AllRows {
  static constexpr bool FOR_ALL = true;
};
struct OneRow {
  static constexpr bool FOR_ALL = false;
};

// Loads key fragments. For each c < CHUNKS, lane 4 g + t loads dimensions 32 c + 8 t ..
// 32 c + 8 t + 7 of keys g and g + 8, which are operand B of two mma steps.
__device__ __forceinline__ void load_keys(const CACHE16* keys, const Pages& pages, int kv_head,
                                          int at, Pack16 (*key)[CHUNKS]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int index = __shfl_sync(FULL_WARP, at, 8 * j + lane / 4);
    const CACHE16* from = keys + head_at(pages, index, kv_head) + 8 * (lane % 4);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) key[j][c] = *reinterpret_cast<const Pack16*>(from + 32 * c);
  }
}

// Loads value fragments. For each h < HALVES, lane 4 g + t loads dimensions 64 h + 8 g ..
// 64 h + 8 g + 7 of values 2t, 2t + 1, 2t + 8 and 2t + 9. Eight mma steps per h use them: dimension
// 64 h + 8 g + j is column g of operand B of step j.
__device__ __forceinline__ void load_values(const CACHE16* values, const Pages& pages, int kv_head,
                                            int at, Pack16 (*value)[HALVES]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int index = __shfl_sync(FULL_WARP, at, 2 * (lane % 4) + j % 2 + 8 * (j / 2));
    const CACHE16* from = values + head_at(pages, index, kv_head) + 8 * (lane / 4);
#pragma unroll
    for (int h = 0; h < HALVES; ++h) value[j][h] = *reinterpret_cast<const Pack16*>(from + 64 * h);
  }
}

// Splits x and y into two 16-bit floats each: `high` receives the rounded values, `low` the rounded
// differences between the values and their high parts.
__device__ __forceinline__ void split_pair(float x, float y, unsigned int* high,
                                           unsigned int* low) {
  *high = pack_pair<CACHE16>(x, y);
  *low = pack_pair<CACHE16>(x - half_of<CACHE16>(*high, 0), y - half_of<CACHE16>(*high, 1));
}

// Returns element j of `low` in the lower 16 bits and element j of `high` in the upper 16 bits.
__device__ __forceinline__ unsigned int pair_of(const Pack16& low, const Pack16& high, int j) {
  return __byte_perm(low.u[j / 2], high.u[j / 2], j % 2 ? 0x7632 : 0x5410);
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

__device__ __forceinline__ void store_four(float* y, const Floats4& x) {
  *reinterpret_cast<Floats4*>(y) = x;
}

template <typename T>
__device__ __forceinline__ void store_four(T* y, const Floats4& x) {
  *reinterpret_cast<Pack8*>(y) = {{pack_pair<T>(x.f[0], x.f[1]), pack_pair<T>(x.f[2], x.f[3])}};
}

// Stores sum / mass, the attention output of four dimensions. `mass` is the sum of the unnormalized
// softmax weights; it is 0 for padding rows, whose output is 0.
__device__ __forceinline__ void store_quotient(OUT* y, Floats4 sum, float mass) {
  const float inverse = mass == 0.0f ? 0.0f : 1.0f / mass;
#pragma unroll
  for (int i = 0; i < 4; ++i) sum.f[i] *= inverse;
  store_four(y, sum);
}

// Grid: (blocks, head tiles). A head tile contains `tile_heads` query heads of one KV head. A row
// of `qkv` has heads + 2 kv_heads heads, queries first.
//
// `tiles` and `begin` are the plan: tiles of rows whose positions are divided into parts, and the
// parts that each block computes (attention_plan.cuh). A query tile has up to 16 / tile_heads rows,
// and a tile of the plan QUERY_TILES times as many. No row has more than `part_count` parts. If
// several blocks compute the parts of a tile, they store the results in `parts` [gridDim.x,
// gridDim.y, part_count, QUERIES, PART_WIDTH], and count in `arrived` [gridDim.x, gridDim.y] how
// many of them have finished. The first index of both arrays is the number of the first of these
// blocks. The counters in `arrived` must be zero before a launch, and are zero again after it.
extern "C" __global__ void __launch_bounds__(WARPS * 32, QUERY_TILES == 1 ? 2 : 1)
    attention_split(const float* qkv, const int* slot, const int* pos,
                    const unsigned long long* ancestors, const int* page_table, const CACHE16* keys,
                    const CACHE16* values, OUT* out, int heads, int kv_heads, int slots,
                    int max_pages, int page_shift, float scale, int tile_heads,
                    const PlanTile* tiles, const PlanBegin* begin, int part_count, float* parts,
                    unsigned int* arrived) {
  wait_for_previous_kernel();
#if QUERY_TILES == 1
  // Queries, split into high and low parts, as operands A of mma steps. They are indexed [query
  // tile][chunk of 32 dimensions][high or low part][half of the chunk's mma steps][lane].
  __shared__ Pack16 query[1][CHUNKS][2][2][32];
  __shared__ Floats4 folded_sum[QUERIES][WIDE_HEAD / 4];  // each thread reads only its own values
#else
  // Dynamic shared memory: the arrays `query` and `folded_sum`, and the sums of the warps.
  extern __shared__ Floats4 dynamic[];
  auto* const query = reinterpret_cast<Pack16(*)[CHUNKS][2][2][32]>(dynamic);
  auto* const folded_sum =
      reinterpret_cast<Floats4(*)[WIDE_HEAD / 4]>(dynamic + QUERY_TILES * CHUNKS * 2 * 2 * 32);
  Floats4* const warp_sums = folded_sum[QUERIES];  // [WARPS][QUERY_TILES][SUMS][32]
#endif
  __shared__ TileRow tile[QUERIES];
  __shared__ Tile all;
  __shared__ int query_parts[QUERIES];  // number of parts of each query; 0 for a missing query
  __shared__ int query_index[QUERIES];
  __shared__ Floats4 part_sum[WARPS][16][8 + 1];  // + 1: padding against bank conflicts
  __shared__ float part_top[WARPS][16];
  __shared__ float part_mass[WARPS][16];
  __shared__ int is_last;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const Pages pages = {page_table, slots, max_pages, page_shift, kv_heads, WIDE_HEAD};

  const int shared_by = heads / kv_heads, head_tiles = static_cast<int>(gridDim.y) / kv_heads;
  const int kv_head = static_cast<int>(blockIdx.y) / head_tiles;
  const int of_kv = static_cast<int>(blockIdx.y) % head_tiles * tile_heads;
  const int first_head = kv_head * shared_by + of_kv;
  const int head_count = min(tile_heads, shared_by - of_kv);
  const int tile_rows = 16 / tile_heads;                              // rows of a query tile
  const int row_in_tile[2] = {g / tile_heads, (g + 8) / tile_heads};  // of queries g and g + 8

  // When the results of the warps are added, each thread adds 4 dimensions of one query per pass.
  const int own_query = threadIdx.x / 8, sum_index = threadIdx.x % 8;
  const auto dimension_of = [&](int pass) {
    return 64 * (pass / 2) + sum_index / 2 * 16 + 8 * (pass % 2) + sum_index % 2 * 4;
  };
  const PlanBegin from = begin[blockIdx.x], to = begin[blockIdx.x + 1];
  const bool is_idle = from.tile == to.tile && from.part == to.part;
  const int end_tile = is_idle ? from.tile : to.tile + (to.part > 0);
  for (int index = from.tile; index < end_tile; ++index) {
    const PlanTile span = tiles[index];
    if (warp == 0) {
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
        tile[r] = own;
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
      if (lane == 0) all = {last, common, is_chain};
      __syncwarp();
      for (int m = lane; m < QUERIES; m += 32) {
        const int r = m / 16 * tile_rows + m % 16 / tile_heads, head = m % 16 % tile_heads;
        const bool is_used = m % 16 / tile_heads < tile_rows && r < span.rows && head < head_count;
        query_parts[m] = is_used ? parts_at(tile[r].pos) : 0;
        query_index[m] = (span.first_row + r) * heads + first_head + head;
      }
    }
    __syncthreads();
    const int first_part = index == from.tile ? from.part : 0;
    const int end_part = index == to.tile ? to.part : parts_at(all.last);
    const long long number = static_cast<long long>(span.first_block) * gridDim.y + blockIdx.y;
    float* const tile_workspace = parts + number * part_count * QUERIES * PART_WIDTH;

    // Load the tile's queries to shared memory. Each warp loads every WARPS-th chunk of 32
    // dimensions of all queries.
    for (int q = 0; q < QUERY_TILES; ++q) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int m = 16 * q + g + 8 * side;
        const bool is_valid = query_parts[m] > 0 && all.last >= 0;
        const int row = query_index[m] / heads, head = query_index[m] % heads;
        const float* from_row =
            qkv + (static_cast<long long>(row) * (heads + 2 * kv_heads) + head) * WIDE_HEAD + 8 * t;
        for (int c = warp; c < CHUNKS; c += WARPS) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float x = is_valid ? from_row[32 * c + 2 * i] * scale : 0.0f;
            const float y = is_valid ? from_row[32 * c + 2 * i + 1] * scale : 0.0f;
            const int half = i / 2, at = 2 * (i % 2) + side;  // element of operand A
            split_pair(x, y, &query[q][c][0][half][lane].u[at], &query[q][c][1][half][lane].u[at]);
          }
        }
      }
    }
    float folded_top[QUERY_TILES], folded_mass[QUERY_TILES];
#pragma unroll
    for (int q = 0; q < QUERY_TILES; ++q) {
      folded_top[q] = LOWEST;
      folded_mass[q] = 0.0f;
      for (int pass = 0; pass < 2 * HALVES; ++pass) {
        folded_sum[16 * q + own_query][dimension_of(pass) / 4] = {};
      }
    }
    __syncthreads();

    for (int part = first_part; part < end_part; ++part) {
      // What this lane accumulates over the part for each query tile, see SUMS.
#if QUERY_TILES == 1
      Floats4 own_sums[SUMS] = {};
      const auto sums_of = [&](int, int i) -> Floats4& { return own_sums[i]; };
#else
      const auto sums_of = [&](int q, int i) -> Floats4& {
        return warp_sums[((warp * QUERY_TILES + q) * SUMS + i) * 32 + lane];
      };
      for (int i = 0; i < QUERY_TILES * SUMS; ++i) sums_of(0, i) = {};
#endif
      for (int q = 0; q < QUERY_TILES; ++q) sums_of(q, SUMS - 1) = {{LOWEST, LOWEST, 0.0f, 0.0f}};

      // State of the loop over the steps of this warp in this part. `number` counts the steps, and
      // `first` is the first of the 16 positions of a step. Usually a step is computed for all rows
      // at once, and `only` is -1. If the rows do not attend to the same positions, the step is
      // repeated for each row, from the last row to the first one: `only` is the current row, and
      // `waiting` the set of remaining rows.
      int number = -1, first = 0, only = -1;
      unsigned long long waiting = 0;
      const auto next_step = [&] {
        if (waiting == 0) {
          ++number;
          const int split = number / (SPLIT / STEP / WARPS) * PARTS + part;
          first = split * SPLIT + (number % (SPLIT / STEP / WARPS) * WARPS + warp) * STEP;
          only = -1;
          if (first + STEP - 1 <= all.common || first > all.last) return first <= all.last;
#pragma unroll
          for (int r = 0; r < QUERIES; r += 32) {
            const bool waits = r + lane < QUERIES && tile[(r + lane) % QUERIES].pos >= first;
            waiting |= static_cast<unsigned long long>(__ballot_sync(FULL_WARP, waits)) << r;
          }
        }
        only = 63 - __clzll(static_cast<long long>(waiting));
        waiting &= ~(1ull << only);
        return true;
      };
      bool more = next_step(), loads = more;
      int at = more ? locate(pages, tile[max(only, 0)], first) : -1;
      Pack16 key[2][CHUNKS], value[4][HALVES];
      if (more) load_keys(keys, pages, kv_head, at, key);
      // Computes the current step and prepares the next one. `which` is AllRows if the current step
      // is computed for all rows at once, and OneRow if it is computed for row `only`.
      const auto compute_step = [&](auto which) {
        constexpr bool FOR_ALL = which.FOR_ALL;
        if (loads) load_values(values, pages, kv_head, at, value);
        const int row = only, here = first;
        const int seen = tile[max(row, 0)].pos - first;  // last visible of the 16 positions
        more = next_step();
        // If the next step has the same positions for another row of a chain, their keys and values
        // are already loaded, unless that row attends to later positions than the current row.
        loads =
            more && (FOR_ALL || first != here || !all.is_chain || tile[only].pos > tile[row].pos);
        if (loads) at = locate(pages, tile[max(only, 0)], first);
        // Returns whether position i of the four positions of this lane is visible: 2t, 2t + 1,
        // 2t + 8 or 2t + 9.
        const auto is_visible = [&](int i) {
          return FOR_ALL || 2 * t + i % 2 + 8 * (i / 2) <= seen;
        };
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
          for (int i = 0; i < 4 * HALVES; ++i) {
            unsigned int* pair = value[j][i / 4].u + i % 4;
            *pair = is_visible(j) ? *pair : 0;
          }
        }

        const int first_q = FOR_ALL ? 0 : row / tile_rows;
        const int last_q = FOR_ALL ? QUERY_TILES - 1 : first_q;
        for (int q = first_q; q <= last_q; ++q) {
          // score[0] are products with the high parts of the queries, score[1] with the low parts.
          // score[.][h], in lane 4 g + t, has the products of query g with keys 2t + 8h and
          // 2t + 8h + 1, and then those of query g + 8 with these keys.
          float score[2][2][4] = {};
#pragma unroll
          for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
            for (int low_part = 0; low_part < 2; ++low_part) {
#pragma unroll
              for (int h = 0; h < 2; ++h) {
                const Pack16 a = query[q][c][low_part][h][lane];
                mma_m16n8k16<CACHE16>(score[low_part][0], a.u, key[0][c].u + 2 * h);
                mma_m16n8k16<CACHE16>(score[low_part][1], a.u, key[1][c].u + 2 * h);
              }
            }
          }
          if (loads && q == last_q) load_keys(keys, pages, kv_head, at, key);

          Floats4 state = sums_of(q, SUMS - 1);
          float* const top = state.f;
          float* const mass = state.f + 2;
          bool is_active[2];
          float shrink[2];
          unsigned int high[4], low[4];
#pragma unroll
          for (int side = 0; side < 2; ++side) {
            is_active[side] = FOR_ALL || q * tile_rows + row_in_tile[side] == row;
            float x[4], tile_top = top[side];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const float s = score[0][i / 2][2 * side + i % 2] + score[1][i / 2][2 * side + i % 2];
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
            shrink[side] = exp_bounded(top[side] - tile_top);
            if (is_active[side]) {
              mass[side] = fmaf(mass[side], shrink[side], (x[0] + x[1]) + (x[2] + x[3]));
              top[side] = tile_top;
            }
            split_pair(x[0], x[1], high + side, low + side);
            split_pair(x[2], x[3], high + side + 2, low + side + 2);
          }
#pragma unroll
          for (int h = 0; h < HALVES; ++h) {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
              const unsigned int b[2] = {pair_of(value[0][h], value[1][h], j),
                                         pair_of(value[2][h], value[3][h], j)};
              const Floats4 sum = sums_of(q, h * 8 + j);
              Floats4 next;
#pragma unroll
              for (int i = 0; i < 4; ++i) next.f[i] = sum.f[i] * shrink[i / 2];
              mma_m16n8k16<CACHE16>(next.f, high, b);
              mma_m16n8k16<CACHE16>(next.f, low, b);
#pragma unroll
              for (int i = 0; i < 4; ++i) next.f[i] = is_active[i / 2] ? next.f[i] : sum.f[i];
              sums_of(q, h * 8 + j) = next;
            }
          }
          sums_of(q, SUMS - 1) = state;
        }
      };
      while (more && only < 0) compute_step(AllRows());
      while (more) compute_step(OneRow());

      // Add the results of the warps in the order of the warps, 32 dimensions per `pass`. A pass
      // covers half of the 64 dimensions from 64 * (pass / 2) on: of every 16 dimensions, the first
      // 8 if `pass` is even, otherwise the last 8.
#pragma unroll
      for (int q = 0; q < QUERY_TILES; ++q) {
        Floats4 state = sums_of(q, SUMS - 1);
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          float mass = state.f[2 + side];
#pragma unroll
          for (int offset = 1; offset < 4; offset <<= 1) {
            mass += __shfl_xor_sync(FULL_WARP, mass, offset);
          }
          part_top[warp][g + 8 * side] = state.f[side];
          part_mass[warp][g + 8 * side] = mass;
        }
        __syncthreads();
        const int m = 16 * q + own_query;
        const bool is_used = part < query_parts[m];
        float all_top = LOWEST, all_mass = 0.0f, warp_factor[WARPS];
        for (int w = 0; w < WARPS; ++w) all_top = fmaxf(all_top, part_top[w][own_query]);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
          // A warp that has processed no positions of the row has mass 0 and adds exact zeros.
          const float mass = part_mass[w][own_query];
          const float by = mass > 0.0f ? exp_bounded(part_top[w][own_query] - all_top) : 0.0f;
          all_mass = fmaf(mass, by, all_mass);
          warp_factor[w] = by;
        }
        const FoldFactors factors(folded_top[q], all_top);
        if (is_used) {
          folded_mass[q] = fmaf(all_mass, factors.by, folded_mass[q] * factors.shrink);
          folded_top[q] = factors.top;
        }
#pragma unroll
        for (int pass = 0; pass < 2 * HALVES; ++pass) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int of = i / 2 * 2 + pass % 2, first_sum = pass / 2 * 8 + i % 2 * 4;
            Floats4* to_sum = &part_sum[warp][g + 8 * (i / 2)][2 * t + i % 2];
#pragma unroll
            for (int j = 0; j < 4; ++j) to_sum->f[j] = sums_of(q, first_sum + j).f[of];
          }
          __syncthreads();
          if (is_used) {
            Floats4 all_sum = {};
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
              add_scaled(&all_sum, part_sum[w][own_query][sum_index], warp_factor[w]);
            }
            const int d = dimension_of(pass);
            const long long at_head = query_index[m];
            if (span.blocks == 1) {
              fold_sum(&folded_sum[m][d / 4], factors.shrink, all_sum, factors.by);
            } else if (query_parts[m] == 1) {
              store_quotient(out + at_head * WIDE_HEAD + d, all_sum, all_mass);
            } else {
              float* of_part = tile_workspace + (part * QUERIES + m) * PART_WIDTH;
              *reinterpret_cast<Floats4*>(of_part + d) = all_sum;
              if (d == 0) {
                of_part[WIDE_HEAD] = all_top;
                of_part[WIDE_HEAD + 1] = all_mass;
              }
            }
          }
          __syncthreads();
        }
      }
    }
    if (span.blocks == 1) {
#pragma unroll
      for (int q = 0; q < QUERY_TILES; ++q) {
        const int m = 16 * q + own_query;
        if (query_parts[m] == 0) continue;
        const long long at_head = query_index[m];
#pragma unroll
        for (int pass = 0; pass < 2 * HALVES; ++pass) {
          const int d = dimension_of(pass);
          store_quotient(out + at_head * WIDE_HEAD + d, folded_sum[m][d / 4], folded_mass[q]);
        }
      }
      __syncthreads();  // the next tile overwrites the rows of this one
      continue;
    }

    // The last block to arrive adds the results of the parts in order. Lane p computes the factors
    // of part p (FoldFactors), for which it needs the maximum score over the parts before p.
    const bool combines = is_last_block(arrived + number, span.blocks, &is_last);
    if (!combines) continue;
#if QUERY_TILES == 1
    float* const shrink_of = part_sum[0][0][0].f;  // [QUERIES][PARTS], like the next two arrays
    static_assert(sizeof(part_sum) >= 3 * QUERIES * PARTS * sizeof(float), "the arrays fit");
#else
    float* const shrink_of = warp_sums[0].f;
    static_assert(WARPS * QUERY_TILES * SUMS * 32 * 4 >= 3 * QUERIES * PARTS, "the arrays fit");
#endif
    float* const by_of = shrink_of + QUERIES * PARTS;
    float* const mass_of = by_of + QUERIES * PARTS;
    for (int m = warp; m < QUERIES; m += WARPS) {
      const bool is_valid = lane < query_parts[m];
      const float* of_part = tile_workspace + (lane * QUERIES + m) * PART_WIDTH + WIDE_HEAD;
      const float top = is_valid ? of_part[0] : LOWEST;
      float highest = top;  // maximum over parts 0 .. lane, after the loop
#pragma unroll
      for (int offset = 1; offset < PARTS; offset <<= 1) {
        const float other = __shfl_sync(FULL_WARP, highest, max(lane - offset, 0));
        highest = other > highest ? other : highest;
      }
      const float before = __shfl_sync(FULL_WARP, highest, max(lane - 1, 0));
      const FoldFactors factors(lane == 0 ? LOWEST : before, top);
      shrink_of[m * PARTS + lane] = factors.shrink;
      by_of[m * PARTS + lane] = factors.by;
      mass_of[m * PARTS + lane] = is_valid ? of_part[1] : 0.0f;
    }
    __syncthreads();
    for (int item = threadIdx.x; item < QUERIES * WIDE_HEAD / 4; item += WARPS * 32) {
      const int m = item / (WIDE_HEAD / 4), d = item % (WIDE_HEAD / 4) * 4;
      if (query_parts[m] <= 1) continue;
      const long long at_head = query_index[m];
      Floats4 all_sum = {};
      float all_mass = 0.0f;
#pragma unroll 8
      for (int part = 0; part < query_parts[m]; ++part) {
        const float* of_part = tile_workspace + (part * QUERIES + m) * PART_WIDTH + d;
        const float shrink = shrink_of[m * PARTS + part], by = by_of[m * PARTS + part];
        fold_sum(&all_sum, shrink, *reinterpret_cast<const Floats4*>(of_part), by);
        all_mass = fmaf(mass_of[m * PARTS + part], by, all_mass * shrink);
      }
      store_quotient(out + at_head * WIDE_HEAD + d, all_sum, all_mass);
    }
    __syncthreads();  // the next tile overwrites the factors of this one
  }
}
