// The plan, which divides the work of attention_split or attention_prompt among blocks. It consists
// of tiles (groups of rows) and of the tiles and parts of their positions that each block computes.
#pragma once
#include "model.cuh"

#define SPLIT 64
#define PARTS 32

// A tile: consecutive forward rows of one slot.
struct PlanTile {
  int first_row;
  int rows;
  int first_block;  // number of the first block that computes parts of the tile
  int blocks;       // number of blocks that compute parts of the tile
};

// Where the work of a block begins. Block b computes all parts from begin[b] to begin[b + 1],
// exclusive, in the order of tiles and then of parts.
struct PlanBegin {
  int tile;
  int part;
};

// Returns the number of parts into which positions 0..pos, to which a row attends, are divided.
__device__ __forceinline__ int parts_at(int pos) {
  return pos / SPLIT + 1 < PARTS ? pos / SPLIT + 1 : PARTS;
}
