// Iterates over the columns of a row in descending order of score; ties go to the smaller column.
#pragma once

#include "row.cuh"

// Each thread divides its columns into PARTS parts and caches the best remaining column of each
// part. After next() has returned a column, the thread scans only the part that contained this
// column again.
constexpr int PARTS = BLOCK == 1 ? 64 : 8;

struct BestFirst {
  const float* score;
  int size;
  int lowest;  // order_key of the lowest score to return
  u64 best_of[PARTS];

  __device__ __forceinline__ BestFirst(const float* scores, int columns,
                                       int lowest_key = KEY_NEGATIVE_INFINITY + 1)
      : score(scores), size(columns), lowest(lowest_key) {
    for (int p = 0; p < PARTS; ++p) best_of[p] = below(p, ~0ull);
  }

  // Returns the best remaining column, the same to all threads of the block. Returns -1 if the
  // order_key of every remaining score is less than `lowest`; with the default of `lowest`, this
  // means that all remaining scores are -inf.
  __device__ __forceinline__ int next(Scratch& scratch) {
    u64 best = 0;
    for (int p = 0; p < PARTS; ++p) best = best_of[p] > best ? best_of[p] : best;
    const u64 packed = block_reduce(best, scratch, Max());
    if (packed == 0) return -1;
    for (int p = 0; p < PARTS; ++p) {
      if (best_of[p] == packed) best_of[p] = below(p, packed);
    }
    return static_cast<int>(0xffffffffu - static_cast<u32>(packed));
  }

  // Returns the best column that is worse than `last` among this thread's columns in a part (0 to
  // PARTS - 1); 0 if there is none. A column is packed with its score into an integer, which is
  // greater for a higher score and, for equal scores, for a smaller column.
  __device__ inline u64 below(int part, u64 last) const {
    u64 best = 0;
    for (int i = static_cast<int>(threadIdx.x) + BLOCK * part; i < size; i += BLOCK * PARTS) {
      const int key = order_key(score[i]);
      if (key < lowest) continue;
      const u64 packed = pack_key(key, i);
      if (packed < last && packed > best) best = packed;
    }
    return best;
  }
};
