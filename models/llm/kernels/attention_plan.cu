// Divides the work of attention_split (attention_plan.cuh). All layers of a forward pass use the
// same plan. It depends on the positions of the rows: the work for a request with a long context is
// divided among several blocks, while many requests with short contexts share a block.
#include "attention_plan.cuh"

// Returns the number of splits of a tile whose rows attend to positions 0..last. Padding counts as
// one split, because a block has to write its zeros.
__device__ __forceinline__ int splits_at(int last) { return last < 0 ? 1 : last / SPLIT + 1; }

// Returns the number of splits of a part of a tile.
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

// Writes a plan: `tiles`, and the `blocks` + 1 entries of `begin`. A tile has at most `tile_rows`
// rows. Padding rows belong to tiles without positions. The launch has one warp.
extern "C" __global__ void attention_plan(const int* slot, const int* pos, int rows, int slots,
                                          int max_pages, int page_shift, int tile_rows, int blocks,
                                          PlanTile* tiles, PlanBegin* begin) {
  wait_for_previous_kernel();
  const int lane = static_cast<int>(threadIdx.x);
  const Pages pages = {nullptr, slots, max_pages, page_shift, 0, 0};

  // Find the tiles: lane i handles row base + i. A run is a sequence of rows of one slot.
  int tile_count = 0, run_begin = 0, run_slot = -2;
  for (int base = 0; base < rows; base += 32) {
    const int r = base + lane;
    int own = -2;
    if (r < rows) own = row_is_live(pages, slot[r], pos[r]) ? slot[r] : -1;
    const int above = __shfl_up_sync(FULL_WARP, own, 1);
    const bool begins = r < rows && own != (lane == 0 ? run_slot : above);
    const unsigned int up_to_lane = 0xffffffffu >> (31 - lane);
    const unsigned int begun = __ballot_sync(FULL_WARP, begins) & up_to_lane;
    const int own_begin = begun ? base + 31 - __clz(static_cast<int>(begun)) : run_begin;
    const bool is_tile = r < rows && (r - own_begin) % tile_rows == 0;
    const unsigned int found = __ballot_sync(FULL_WARP, is_tile);
    if (is_tile) tiles[tile_count + __popc(found & up_to_lane) - 1].first_row = r;
    tile_count += __popc(found);
    run_begin = __shfl_sync(FULL_WARP, own_begin, 31);
    run_slot = __shfl_sync(FULL_WARP, own, 31);
  }
  __syncwarp();

  // Compute the number of splits of each tile (in `blocks`, for now) and of all tiles.
  int total = 0;
  for (int base = 0; base < tile_count; base += 32) {
    const int i = base + lane;
    int splits = 0;
    if (i < tile_count) {
      const int first = tiles[i].first_row;
      const int end = i + 1 < tile_count ? tiles[i + 1].first_row : rows;
      int last = -1;
      for (int r = first; r < end; ++r) {
        if (row_is_live(pages, slot[r], pos[r])) last = max(last, pos[r]);
      }
      splits = splits_at(last);
      tiles[i].rows = end - first;
      tiles[i].blocks = splits;
    }
    total += __shfl_sync(FULL_WARP, inclusive_sum(splits), 31);
  }

  // Every block gets an equal share of the splits of all tiles, which are counted part by part. The
  // block whose share contains the middle of a part computes the part.
  const auto block_of = [&](int splits_before, int splits) {
    return static_cast<int>((2ll * splits_before + splits) * blocks / (2ll * total));
  };
  int before = 0;          // splits of the tiles before these 32
  int previous_block = 0;  // block of the last part before these 32 tiles
  if (lane == 0) begin[0] = {0, 0};
  for (int base = 0; base < tile_count; base += 32) {
    const int i = base + lane;
    const int splits = i < tile_count ? tiles[i].blocks : 0;
    const int parts = min(splits, PARTS);
    const int end = before + inclusive_sum(splits);
    const int last_splits = part_splits(splits, parts - 1);
    const int last_block = block_of(end - last_splits, last_splits);
    int block = __shfl_up_sync(FULL_WARP, last_block, 1);
    if (lane == 0) block = previous_block;
    int at = end - splits, used = 0, first_block = 0;
    for (int part = 0; part < parts; ++part) {
      const int own = block_of(at, part_splits(splits, part));
      if (part == 0) first_block = own;
      if (part == 0 || own != block) ++used;
      for (; block < own; ++block) begin[block + 1] = {i, part};
      at += part_splits(splits, part);
    }
    if (i < tile_count) {
      tiles[i].first_block = first_block;
      tiles[i].blocks = used;
    }
    before = __shfl_sync(FULL_WARP, end, 31);
    previous_block = __shfl_sync(FULL_WARP, last_block, min(31, tile_count - base - 1));
  }
  for (int b = previous_block + 1 + lane; b <= blocks; b += 32) begin[b] = {tile_count, 0};
}
