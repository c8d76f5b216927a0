// Divides the work of attention_split or attention_prompt among blocks (attention_plan.cuh). All
// layers of a forward pass use the same division, the plan. The plan depends on the positions of
// the rows: several blocks share the work for a request with a long context, while one block does
// the work for many requests with short contexts.
#include "attention_plan.cuh"

#define LOADS 8  // forward rows whose slot and position a lane loads at once

// Returns the number of splits (groups of SPLIT positions) of a tile (rows of one slot) whose rows
// attend to positions 0..last. A tile of padding rows (last < 0) counts as one split, because a
// block has to write zeros for it.
__device__ __forceinline__ int splits_at(int last) { return last < 0 ? 1 : last / SPLIT + 1; }

// Returns how many of the `tile_splits` splits (groups of SPLIT positions) of a tile belong to a
// part: the splits part, part + PARTS, ...
__device__ __forceinline__ int part_splits(int tile_splits, int part) {
  return tile_splits / PARTS + (part < tile_splits % PARTS ? 1 : 0);
}

__device__ __forceinline__ int inclusive_sum(int x) {
  const int lane = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int offset = 1; offset < 32; offset <<= 1) {
    const int other = __shfl_up_sync(FULL_WARP, x, offset);
    x += lane >= offset ? other : 0;
  }
  return x;
}

// Writes a plan: the tiles (consecutive rows of one slot, at most `tile_rows`), and where the work
// of each block begins. begin[blocks] is the end of the last block's work. Padding rows belong to
// tiles that attend to no position. The launch has one warp, and dynamic shared memory of 8 bytes
// per row.
extern "C" __global__ void attention_plan(const int* slot, const int* pos, int rows, int slots,
                                          int max_pages, int page_shift, int tile_rows, int blocks,
                                          PlanTile* tiles, PlanBegin* begin) {
  wait_for_previous_kernel();
  // For each tile: its first row, and the last position to which its rows attend.
  extern __shared__ int first_rows[];  // [rows]
  int* const last_positions = first_rows + rows;
  const int lane = static_cast<int>(threadIdx.x);
  const unsigned int up_to_lane = 0xffffffffu >> (31 - lane);
  const Pages pages = {nullptr, slots, max_pages, page_shift, 0, 0};

  // Find the tiles. A run is a sequence of consecutive rows of one slot, which is cut into tiles.
  // In each step, lane i handles row base + i. Slots and positions for LOADS steps are loaded at
  // once, because the latency of a load is longer than the rest of a step.
  int tile_count = 0, run_begin = 0, run_slot = -2;
  for (int chunk = 0; chunk < rows; chunk += 32 * LOADS) {
    int own_slot[LOADS], own_pos[LOADS];
#pragma unroll
    for (int k = 0; k < LOADS; ++k) {
      const int r = chunk + 32 * k + lane;
      own_slot[k] = r < rows ? slot[r] : -1;
      own_pos[k] = r < rows ? pos[r] : -1;
    }
#pragma unroll
    for (int k = 0; k < LOADS; ++k) {
      const int base = chunk + 32 * k, r = base + lane;
      const bool is_live = row_is_live(pages, own_slot[k], own_pos[k]);
      const int own = is_live ? own_slot[k] : -1;
      const int above = __shfl_up_sync(FULL_WARP, own, 1);
      const bool begins = r < rows && own != (lane == 0 ? run_slot : above);
      const unsigned int begun = __ballot_sync(FULL_WARP, begins) & up_to_lane;
      const int own_begin = begun ? base + 31 - __clz(static_cast<int>(begun)) : run_begin;
      const bool is_first = r < rows && (r - own_begin) % tile_rows == 0;
      const unsigned int found = __ballot_sync(FULL_WARP, is_first);
      const int index = tile_count + __popc(found & up_to_lane) - 1;
      if (is_first) {
        first_rows[index] = r;
        last_positions[index] = -1;
      }
      __syncwarp();
      if (is_live) atomicMax(last_positions + index, own_pos[k]);
      tile_count += __popc(found);
      run_begin = __shfl_sync(FULL_WARP, own_begin, 31);
      run_slot = __shfl_sync(FULL_WARP, own, 31);
    }
  }
  __syncwarp();

  int total = 0;  // splits of all tiles
  for (int base = 0; base < tile_count; base += 32) {
    const int i = base + lane;
    const int splits = i < tile_count ? splits_at(last_positions[i]) : 0;
    total += __shfl_sync(FULL_WARP, inclusive_sum(splits), 31);
  }

  // Every block gets an equal share of the splits of all tiles. The splits of a tile are divided
  // into up to PARTS parts. A block computes the parts whose middle is in its share.
  const auto middle_of = [&](int splits_before, int splits) {
    return (2ll * splits_before + splits) * blocks;
  };
  const auto block_of = [&](int splits_before, int splits) {
    return static_cast<int>(middle_of(splits_before, splits) / (2ll * total));
  };
  int before = 0;          // splits of the tiles before these 32
  int previous_block = 0;  // block of the last part before these 32 tiles
  if (lane == 0) begin[0] = {0, 0};
  for (int base = 0; base < tile_count; base += 32) {
    const int i = base + lane;
    const int splits = i < tile_count ? splits_at(last_positions[i]) : 0;
    const int parts = min(splits, PARTS);
    const int end = before + inclusive_sum(splits);
    const int last_splits = part_splits(splits, parts - 1);
    const int last_block = block_of(end - last_splits, last_splits);
    int block = __shfl_up_sync(FULL_WARP, last_block, 1);
    if (lane == 0) block = previous_block;
    const int first_block = block_of(end - splits, part_splits(splits, 0));
    int at = end - splits, own = first_block, used = 1;
    for (int part = 0; part < parts; ++part) {
      const int here = part_splits(splits, part);
      // This loop finds the block of the part without a division, which takes long.
      while (middle_of(at, here) >= 2ll * total * (own + 1)) ++own;
      if (part > 0 && own != block) ++used;
      for (; block < own; ++block) begin[block + 1] = {i, part};
      at += here;
    }
    if (i < tile_count) {
      const int next = i + 1 < tile_count ? first_rows[i + 1] : rows;
      tiles[i] = {first_rows[i], next - first_rows[i], first_block, used};
    }
    before = __shfl_sync(FULL_WARP, end, 31);
    previous_block = __shfl_sync(FULL_WARP, last_block, min(31, tile_count - base - 1));
  }
  for (int b = previous_block + 1 + lane; b <= blocks; b += 32) begin[b] = {tile_count, 0};
}
