// A row's columns from the best score on, one by one; ties go to the smaller column.
#pragma once

#include "row.cuh"

// A thread's columns fall into parts, and it knows the best of each: only the part that a column
// was taken from is looked through again.
constexpr int PARTS = BLOCK == 1 ? 64 : 8;

struct BestFirst {
  const float* score;
  int size;
  u64 own[PARTS];

  __device__ __forceinline__ BestFirst(const float* scores, int columns)
      : score(scores), size(columns) {
    for (int p = 0; p < PARTS; ++p) own[p] = below(p, ~0ull);
  }

  // The next column, the same for all threads; -1: none is left but those of score -inf.
  __device__ __forceinline__ int next(Scratch& scratch) {
    u64 best = 0;
    for (int p = 0; p < PARTS; ++p) best = own[p] > best ? own[p] : best;
    const u64 packed = block_reduce(best, scratch, Max());
    if (packed == 0) return -1;
    for (int p = 0; p < PARTS; ++p) {
      if (own[p] == packed) own[p] = below(p, packed);
    }
    return static_cast<int>(0xffffffffu - static_cast<u32>(packed));
  }

  // The largest (score, smaller column first) below `last` of one part; 0: none is left.
  __device__ inline u64 below(int part, u64 last) const {
    u64 best = 0;
    for (int i = static_cast<int>(threadIdx.x) + BLOCK * part; i < size; i += BLOCK * PARTS) {
      const int key = order_key(score[i]);
      if (key <= KEY_NEGATIVE_INFINITY) continue;
      const u64 packed = (static_cast<u64>(static_cast<u32>(key) ^ 0x80000000u) << 32) |
                         (0xffffffffu - static_cast<u32>(i));
      if (packed < last && packed > best) best = packed;
    }
    return best;
  }
};
