// Attention on tensor cores for many rows per slot, as in prompts. attention_step.cuh explains the
// division of the work and the order of the sums. All warps of a block read the same keys and
// values, which are copied to shared memory. Two warps compute each query tile: member 0 computes
// quarters 0 and 1 of a part, one after the other, and member 1 quarters 2 and 3. A warp keeps its
// queries and sums in registers, and adds the results of the parts for half of the queries of its
// query tile.
#define QUERY_TILES 4
#define WARPS (2 * QUERY_TILES)
#include "attention_step.cuh"

#define STAGES 3  // asynchronous copies keep STAGES - 1 stages of the pipeline in flight
// A stage of the pipeline contains two steps of a split, one for each member of the query tiles. A
// step has 16-byte packs of keys, in the order in which a lane reads them [2][CHUNKS][32 lanes],
// and of values [STEP][ROW_PACKS].
#define KEY_PACKS (2 * CHUNKS * 32)
#define ROW_PACKS (WIDE_HEAD / 8)
#define STEP_PACKS (KEY_PACKS + STEP * ROW_PACKS)
#define STAGE_PACKS (2 * STEP_PACKS)

// Return where pack `pack` of the key or value of a position is stored in a step. The order of the
// packs avoids bank conflicts: the lanes of a warp read keys in the order of the lanes, and the
// same pack of several values.
__device__ __forceinline__ int key_pack(int position, int pack) {
  return (position / 8 * CHUNKS + pack / 4) * 32 + 4 * (position % 8) + pack % 4;
}

__device__ __forceinline__ int value_pack(int position, int pack) {
  return KEY_PACKS + position * ROW_PACKS + (pack ^ position % 8);
}

// Iterates over the stages of the parts [part, end) of a tile. In phase 0, the members compute
// their first quarters, quarters 0 and 2, of all splits of the part; in phase 1, quarters 1 and 3.
struct StageIterator {
  int part;
  int end;
  int last_split;
  int phase;
  int split;

  __device__ __forceinline__ bool valid() const { return part < end; }
  __device__ __forceinline__ void next() {
    split += PARTS;
    if (split <= last_split) return;
    part += phase;
    phase = 1 - phase;
    split = part;
  }
};

// Type of an argument whose value is a constant.
template <int VALUE_>
struct Constant {
  static constexpr int VALUE = VALUE_;
};

// The arguments are those of attention_split, without `ancestors`, because the kernel does not
// support draft trees. A tile has up to QUERY_TILES * (16 / tile_heads) rows.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    attention_prompt(const float* qkv, const int* slot, const int* pos, const int* page_table,
                     const CACHE16* keys, const CACHE16* values, OUT* out, int heads, int kv_heads,
                     int slots, int max_pages, int page_shift, float scale, int tile_heads,
                     const PlanTile* tiles, const PlanBegin* begin, int part_count, float* parts,
                     unsigned int* arrived) {
  wait_for_previous_kernel();
  extern __shared__ Pack16 staged[];  // [STAGES][2 members][STEP_PACKS][32 lanes]
  // Sums of quarters that the members of a query tile exchange: [QUERY_TILES][2 members that read
  // them][QUARTERS - 1][SUMS][32 lanes]. Each member keeps its last quarter in registers.
  Floats2* const exchanged = reinterpret_cast<Floats2*>(staged + STAGES * STAGE_PACKS);
  __shared__ Tile tile;
  __shared__ float quarter_top[QUERY_TILES][QUARTERS][16];
  __shared__ float quarter_mass[QUERY_TILES][QUARTERS][16];
  __shared__ int is_last;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int q = warp % QUERY_TILES, member = warp / QUERY_TILES;
  const Pages pages = {page_table, slots, max_pages, page_shift, kv_heads, WIDE_HEAD};
  const Heads of_block = heads_of_block(heads, kv_heads, tile_heads);
  const int tile_rows = 16 / tile_heads;  // rows of a query tile

  // The queries on side 0 are those for which the warp adds the results of the quarters. Member 1
  // therefore has queries g + 8 on side 0, and queries g on side 1.
  const auto query_of = [&](int side) { return g + 8 * (side ^ member); };
  const int own_query = 16 * q + query_of(0);
  const auto exchanged_sum = [&](int reader, int quarter, int i) -> Floats2& {
    const int at = quarter - (quarter > 2 * reader + 1);  // the reader keeps this quarter
    return exchanged[(((q * 2 + reader) * (QUARTERS - 1) + at) * SUMS + i) * 32 + lane];
  };

  // What this thread copies to every stage: of one position of its member's step, packs lane % 8
  // + 8 i (i < HALVES) of the key and of the value.
  const int own_row = 4 * q + lane / 8, own_pack = lane % 8;
  const int key_to = member * STEP_PACKS + key_pack(own_row, own_pack);
  const int value_to = member * STEP_PACKS + value_pack(own_row, own_pack);
  const int own_offset = of_block.kv_head * WIDE_HEAD + 8 * own_pack;
  const int own_value = value_pack(lane % 16, lane / 16);  // first pack that this lane loads

  const PlanBegin from = begin[blockIdx.x], to = begin[blockIdx.x + 1];
  const bool is_idle = from.tile == to.tile && from.part == to.part;
  const int end_tile = is_idle ? from.tile : to.tile + (to.part > 0);
  for (int index = from.tile; index < end_tile; ++index) {
    const PlanTile span = tiles[index];
    if (warp == 0) load_tile(&tile, span, slot, pos, nullptr, pages, of_block);
    __syncthreads();
    const int last = tile.last, last_split = max(last, 0) / SPLIT;
    const int first_part = index == from.tile ? from.part : 0;
    const int end_part = index == to.tile ? to.part : parts_at(last);
    const long long number = static_cast<long long>(span.first_block) * gridDim.y + blockIdx.y;
    float* const workspace = parts + number * part_count * QUERIES * PART_WIDTH;

    StageIterator next_copy = {first_part, end_part, last_split, 0, first_part};
    const int* const pages_of_slot =
        page_table + static_cast<long long>(max(tile.row[0].slot, 0)) * max_pages;
    const auto copy_next = [&](int stage) {
      if (next_copy.valid() && last >= 0) {
        // A position after the last one is replaced by it, and add_step masks its value.
        const int first = next_copy.split * SPLIT + (2 * member + next_copy.phase) * STEP;
        const int at = min(first + own_row, last), inside = at & ((1 << page_shift) - 1);
        const int index = (pages_of_slot[at >> page_shift] << page_shift) + inside;
        const long long from = static_cast<long long>(index) * (kv_heads * WIDE_HEAD) + own_offset;
        Pack16* const to_stage = staged + stage * STAGE_PACKS;
#pragma unroll
        for (int i = 0; i < HALVES; ++i) {
          copy_async(to_stage + key_to + i * 64, keys + from + 64 * i);
          copy_async(to_stage + value_to + i * 8, values + from + 64 * i);
        }
        next_copy.next();
      }
      commit_copies();
    };
    for (int s = 0; s < STAGES - 1; ++s) copy_next(s);

    // The last position to which all rows of this query tile attend; -1 if they are padding.
    int tile_common = tile.row[q * tile_rows].pos;
    for (int r = 0; r < tile_rows; ++r) {
      const int row_pos = tile.row[q * tile_rows + r].pos;
      if (row_pos >= 0) tile_common = min(tile_common, row_pos);
    }
    Pack16 query[CHUNKS][2][2];  // operands A, as load_query describes them
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        load_query(qkv, tile, of_block, kv_heads, scale, 16 * q + query_of(side), c, side,
                   [&](int low_part, int half, int i) -> unsigned int& {
                     return query[c][low_part][half].u[i];
                   });
      }
    }

    float folded_top = LOWEST, folded_mass = 0.0f;
    Floats2 folded_sum[SUMS] = {};
    int stage = STAGES - 1;
    // Waits for the copies of the next stage, and starts the copies of a later one.
    const auto begin_stage = [&] {
      wait_copies<STAGES - 2>();
      __syncthreads();
      copy_next(stage);
      stage = stage + 1 < STAGES ? stage + 1 : 0;
    };
    for (int part = first_part; part < end_part; ++part) {
      Sums sums;
      for (int phase = 0; phase < 2; ++phase) {
        const int quarter = 2 * member + phase;
        // Computes the scores of 16 positions and adds the step to `sums`: for row `row` of the
        // query tile if `step` is a RowStep, otherwise for all rows.
        const auto compute_step = [&](auto step, int row, int seen) {
          const Pack16* const of_step = staged + stage * STAGE_PACKS + member * STEP_PACKS;
          const Scores score = compute_scores(
              [&](int c, int low_part, int half) { return query[c][low_part][half]; },
              [&](int j, int c) { return of_step[(j * CHUNKS + c) * 32 + lane]; });
          const bool is_active[2] = {query_of(0) / tile_heads == row,
                                     query_of(1) / tile_heads == row};
          // Sum i has dimensions 8 i .. 8 i + 7.
          add_step<decltype(step)>(&sums, score, is_active, seen, [&](int p) {
            return load_transposed(of_step + (own_value ^ 2 * p));
          });
        };
        int first = part * SPLIT + quarter * STEP;
        begin_stage();
        bool for_all = first + STEP - 1 <= tile_common;
        if (for_all) {
          compute_step(FirstStep(), -1, STEP);
        } else {
          // Without this barrier, the compiler clears the sums before a FirstStep too.
          __syncwarp();
          sums.clear();
        }
        for (int split = part;;) {
          for (int r = 0; r < tile_rows && !for_all; ++r) {
            const int seen = tile.row[q * tile_rows + r].pos - first;
            if (seen >= 0) compute_step(RowStep(), r, seen);
          }
          split += PARTS;
          if (split > last_split) break;
          first += PARTS * SPLIT;
          begin_stage();
          for_all = first + STEP - 1 <= tile_common;
          if (for_all) compute_step(NextStep(), -1, STEP);
        }

        // Exchange the sums of the quarter.
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          quarter_top[q][quarter][query_of(side)] = sums.top[side];
          quarter_mass[q][quarter][query_of(side)] = sums.whole_mass(side);
          if (side == 0 && phase == 1) continue;
#pragma unroll
          for (int i = 0; i < SUMS; ++i) {
            exchanged_sum(member ^ side, quarter, i) = sums.of_side(side, i);
          }
        }
      }
      // Add the results of the quarters in order. Lane t computes the factor of quarter t.
      __syncthreads();
      const int own = query_of(0);
      float all_top = LOWEST, all_mass = 0.0f, factor[QUARTERS];
      for (int w = 0; w < QUARTERS; ++w) all_top = fmaxf(all_top, quarter_top[q][w][own]);
      // A quarter without positions of the row has mass 0 and adds exact zeros.
      const float by =
          quarter_mass[q][t][own] > 0.0f ? exp_bounded(quarter_top[q][t][own] - all_top) : 0.0f;
#pragma unroll
      for (int w = 0; w < QUARTERS; ++w) {
        factor[w] = __shfl_sync(FULL_WARP, by, lane / 4 * 4 + w);
        all_mass = fmaf(quarter_mass[q][w][own], factor[w], all_mass);
      }
      if (part >= tile.parts[own_query]) continue;
      const FoldFactors factors(folded_top, all_top);
      folded_mass = fmaf(all_mass, factors.by, folded_mass * factors.shrink);
      folded_top = factors.top;
      const auto fold = [&](auto kept) {
        Floats2 all_sum[SUMS] = {};
#pragma unroll
        for (int i = 0; i < SUMS; ++i) {
#pragma unroll
          for (int w = 0; w < QUARTERS; ++w) {
            const bool is_kept = w == decltype(kept)::VALUE;
            const Floats2 sum = is_kept ? sums.of_side(0, i) : exchanged_sum(member, w, i);
            all_sum[i].f[0] = fmaf(sum.f[0], factor[w], all_sum[i].f[0]);
            all_sum[i].f[1] = fmaf(sum.f[1], factor[w], all_sum[i].f[1]);
          }
          if (span.blocks > 1) continue;
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            folded_sum[i].f[e] =
                fmaf(all_sum[i].f[e], factors.by, folded_sum[i].f[e] * factors.shrink);
          }
        }
        if (span.blocks == 1) return;
#pragma unroll
        for (int i = 0; i < SUMS; ++i) {
          store_part(workspace, out, tile, own_query, part, 8 * i + 2 * t, all_sum[i], all_top,
                     all_mass);
        }
      };
      if (member == 0) {
        fold(Constant<1>());
      } else {
        fold(Constant<3>());
      }
    }
    if (span.blocks == 1) {
      if (tile.parts[own_query] > 0) {
        OUT* const to_query = out + static_cast<long long>(tile.index[own_query]) * WIDE_HEAD;
#pragma unroll
        for (int i = 0; i < SUMS; ++i) {
          store_quotient(to_query + 8 * i + 2 * t, folded_sum[i], folded_mass);
        }
      }
      __syncthreads();  // the next tile overwrites the rows of this one
      continue;
    }
    if (!is_last_block(arrived + number, span.blocks, &is_last)) continue;
    add_parts(workspace, out, tile, exchanged[0].f);
  }
}
