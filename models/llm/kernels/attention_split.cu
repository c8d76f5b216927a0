// Attention on tensor cores for few rows per slot, as in decoding. attention_step.cuh explains the
// division of the work and the order of the sums. A tile is one query tile. Each warp of a block
// computes one quarter of a part; it loads keys and values to registers.
#define QUERY_TILES 1
#define WARPS 4
#include "attention_step.cuh"

static_assert(WARPS == QUARTERS, "a warp computes a quarter of each part");

// Returns the index in the KV cache of position `first` + lane % 16 of a row's slot. If this
// position is after the row's own position, the function returns the index of the row's own
// position, and the caller masks the value that it loads.
__device__ __forceinline__ int locate(const Pages& pages, const TileRow& row, int first) {
  const int cached =
      cached_at(row.path, min(first + static_cast<int>(threadIdx.x) % STEP, row.pos));
  const int inside = cached & ((1 << pages.page_shift) - 1);
  return (page_of(pages, row.slot, cached) << pages.page_shift) + inside;
}

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

// Returns element j of `low` in the lower 16 bits and element j of `high` in the upper 16 bits.
__device__ __forceinline__ unsigned int pair_of(const Pack16& low, const Pack16& high, int j) {
  return __byte_perm(low.u[j / 2], high.u[j / 2], j % 2 ? 0x7632 : 0x5410);
}

// Grid: (blocks, head tiles). A head tile contains `tile_heads` query heads of one KV head. A row
// of `qkv` has heads + 2 kv_heads heads, queries first.
//
// `tiles` and `begin` are the plan: tiles of rows whose positions are divided into parts, and the
// parts that each block computes (attention_plan.cuh). A tile has up to 16 / tile_heads rows. No
// row has more than `part_count` parts. If several blocks compute the parts of a tile, they store
// the results in `parts` [gridDim.x, gridDim.y, part_count, QUERIES, PART_WIDTH], and count in
// `arrived` [gridDim.x, gridDim.y] how many of them have finished. The first index of both arrays
// is the number of the first of these blocks. The counters in `arrived` must be zero before a
// launch, and are zero again after it.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 2)
    attention_split(const float* qkv, const int* slot, const int* pos,
                    const unsigned long long* ancestors, const int* page_table, const CACHE16* keys,
                    const CACHE16* values, OUT* out, int heads, int kv_heads, int slots,
                    int max_pages, int page_shift, float scale, int tile_heads,
                    const PlanTile* tiles, const PlanBegin* begin, int part_count, float* parts,
                    unsigned int* arrived) {
  wait_for_previous_kernel();
  // Queries, split into high and low parts, as operands A of mma steps. They are indexed [chunk of
  // 32 dimensions][high or low part][half of the chunk's mma steps][lane].
  __shared__ Pack16 query[CHUNKS][2][2][32];
  __shared__ Tile tile;
  __shared__ Floats4 quarter_sum[QUARTERS][16][WIDE_HEAD / 4 + 1];  // + 1: against bank conflicts
  __shared__ float quarter_top[QUARTERS][16];
  __shared__ float quarter_mass[QUARTERS][16];
  __shared__ int is_last;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const Pages pages = {page_table, slots, max_pages, page_shift, kv_heads, WIDE_HEAD};
  const Heads of_block = heads_of_block(heads, kv_heads, tile_heads);
  const int kv_head = of_block.kv_head;
  const int row_in_tile[2] = {g / tile_heads, (g + 8) / tile_heads};  // of queries g and g + 8

  // When the results of the quarters are added, each thread adds 4 dimensions of one query per
  // pass.
  const int own_query = threadIdx.x / 8;
  const auto dimension_of = [&](int pass) { return 32 * pass + threadIdx.x % 8 * 4; };
  const PlanBegin from = begin[blockIdx.x], to = begin[blockIdx.x + 1];
  const bool is_idle = from.tile == to.tile && from.part == to.part;
  const int end_tile = is_idle ? from.tile : to.tile + (to.part > 0);
  for (int index = from.tile; index < end_tile; ++index) {
    const PlanTile span = tiles[index];
    if (warp == 0) load_tile(&tile, span, slot, pos, ancestors, pages, of_block);
    __syncthreads();
    const int first_part = index == from.tile ? from.part : 0;
    const int end_part = index == to.tile ? to.part : parts_at(tile.last);
    const long long number = static_cast<long long>(span.first_block) * gridDim.y + blockIdx.y;
    float* const workspace = parts + number * part_count * QUERIES * PART_WIDTH;

    // Load the tile's queries to shared memory. Each warp loads every WARPS-th chunk.
    for (int c = warp; c < CHUNKS; c += WARPS) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        load_query(qkv, tile, of_block, kv_heads, scale, g + 8 * side, c, side,
                   [&](int low_part, int half, int i) -> unsigned int& {
                     return query[c][low_part][half][lane].u[i];
                   });
      }
    }
    float folded_top = LOWEST, folded_mass = 0.0f;
    Floats4 folded_sum[2 * HALVES] = {};
    __syncthreads();

    for (int part = first_part; part < end_part; ++part) {
      Sums sums;
      // State of the loop over the steps of this warp in this part. `number` counts the steps, and
      // `first` is the first of the 16 positions of a step. Usually a step is computed for all rows
      // at once, and `only` is -1. If the rows do not attend to the same positions, the step is
      // repeated for each row, from the last row to the first one: `only` is the current row, and
      // `waiting` the set of remaining rows.
      int number = -1, first = 0, only = -1;
      unsigned int waiting = 0;
      const auto next_step = [&] {
        if (waiting == 0) {
          ++number;
          const int split = number / (SPLIT / STEP / WARPS) * PARTS + part;
          first = split * SPLIT + (number % (SPLIT / STEP / WARPS) * WARPS + warp) * STEP;
          only = -1;
          if (first + STEP - 1 <= tile.common || first > tile.last) return first <= tile.last;
          waiting = __ballot_sync(FULL_WARP, lane < QUERIES && tile.row[lane % 16].pos >= first);
        }
        only = 31 - __clz(static_cast<int>(waiting));
        waiting &= ~(1u << only);
        return true;
      };
      bool more = next_step(), loads = more;
      int at = more ? locate(pages, tile.row[max(only, 0)], first) : -1;
      Pack16 key[2][CHUNKS], value[4][HALVES];
      if (more) load_keys(keys, pages, kv_head, at, key);
      // Computes the current step, of kind `step`, and prepares the next one.
      const auto compute_step = [&](auto step) {
        using Step = decltype(step);
        if (loads) load_values(values, pages, kv_head, at, value);
        const int row = only, here = first;
        const int seen = tile.row[max(row, 0)].pos - first;  // last visible of the 16 positions
        more = next_step();
        // If the next step has the same positions for another row of a chain, their keys and values
        // are already loaded, unless that row attends to later positions than the current row.
        loads = more && (Step::FOR_ALL || first != here || !tile.is_chain ||
                         tile.row[only].pos > tile.row[row].pos);
        if (loads) at = locate(pages, tile.row[max(only, 0)], first);
        const Scores score = compute_scores(
            [&](int c, int low_part, int half) { return query[c][low_part][half][lane]; },
            [&](int j, int c) { return key[j][c]; });
        if (loads) load_keys(keys, pages, kv_head, at, key);
        const bool is_active[2] = {row_in_tile[0] == row, row_in_tile[1] == row};
        // Sum 8 h + j has dimension 64 h + 8 n + j in column n.
        add_step<Step>(&sums, score, is_active, seen, [&](int p) {
          const int h = p / 4, j = 2 * p % 8;
          return Pack16{{pair_of(value[0][h], value[1][h], j), pair_of(value[2][h], value[3][h], j),
                         pair_of(value[0][h], value[1][h], j + 1),
                         pair_of(value[2][h], value[3][h], j + 1)}};
        });
      };
      if (more && only < 0) {
        compute_step(FirstStep());
      } else {
        // Without this barrier, the compiler clears the sums before a FirstStep too.
        __syncwarp();
        sums.clear();
      }
      while (more && only < 0) compute_step(NextStep());
      while (more) compute_step(RowStep());

      // Add the results of the quarters in order.
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        quarter_top[warp][g + 8 * side] = sums.top[side];
        quarter_mass[warp][g + 8 * side] = sums.whole_mass(side);
#pragma unroll
        for (int k = 0; k < SUMS / 2; ++k) {
          // Four sums with adjacent dimensions: column 2t + e, and j from 4 * (k % 2) on.
          const int e = k / 2 % 2, d = 64 * (k / 4) + 16 * t + 8 * e + 4 * (k % 2);
          Floats4 four;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            four.f[j] = sums.value[k / 4 * 8 + k % 2 * 4 + j].f[2 * side + e];
          }
          quarter_sum[warp][g + 8 * side][d / 4] = four;
        }
      }
      __syncthreads();
      if (part < tile.parts[own_query]) {
        float all_top = LOWEST, all_mass = 0.0f, factor[QUARTERS];
        for (int w = 0; w < QUARTERS; ++w) all_top = fmaxf(all_top, quarter_top[w][own_query]);
#pragma unroll
        for (int w = 0; w < QUARTERS; ++w) {
          // A quarter without positions of the row has mass 0 and adds exact zeros.
          const float mass = quarter_mass[w][own_query];
          factor[w] = mass > 0.0f ? exp_bounded(quarter_top[w][own_query] - all_top) : 0.0f;
          all_mass = fmaf(mass, factor[w], all_mass);
        }
        const FoldFactors factors(folded_top, all_top);
        folded_mass = fmaf(all_mass, factors.by, folded_mass * factors.shrink);
        folded_top = factors.top;
#pragma unroll
        for (int pass = 0; pass < 2 * HALVES; ++pass) {
          const int d = dimension_of(pass);
          Floats4 all_sum = {};
#pragma unroll
          for (int w = 0; w < QUARTERS; ++w) {
            add_scaled(&all_sum, quarter_sum[w][own_query][d / 4], factor[w]);
          }
          if (span.blocks == 1) {
            fold_sum(&folded_sum[pass], factors.shrink, all_sum, factors.by);
          } else {
            store_part(workspace, out, tile, own_query, part, d, all_sum, all_top, all_mass);
          }
        }
      }
      __syncthreads();  // the next part overwrites the arrays quarter_*
    }
    if (span.blocks == 1) {
      if (tile.parts[own_query] > 0) {
        OUT* const to_query = out + static_cast<long long>(tile.index[own_query]) * WIDE_HEAD;
#pragma unroll
        for (int pass = 0; pass < 2 * HALVES; ++pass) {
          store_quotient(to_query + dimension_of(pass), folded_sum[pass], folded_mass);
        }
      }
      __syncthreads();  // the next tile overwrites the rows of this one
      continue;
    }
    if (!is_last_block(arrived + number, span.blocks, &is_last)) continue;
    static_assert(sizeof quarter_sum >= 3 * QUERIES * PARTS * sizeof(float), "the factors fit");
    add_parts(workspace, out, tile, quarter_sum[0][0][0].f);
  }
}
