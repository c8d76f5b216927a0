// Categorical draws by the exponential race: argmax(weight / E) over the vocabulary, which is
// argmax(log weight + Gumbel). The noise is indexed by TARGET id, so a drafter with its own
// vocabulary and the target see the same number for the same token.
#pragma once

#include "block.cuh"
#include "philox.cuh"

// Column with the largest weight(i) / E(id of i), ties to the smaller column; -1 if no weight is
// positive. `weight` is a callable of the column; weights need no normalisation. All threads call
// it and all receive the result; rows written by other threads need a barrier before.
template <class Weight>
__device__ __forceinline__ int draw_column(int size, const int* map, const Noise& noise,
                                           Scratch& scratch, Weight weight) {
  u64 packed = 0;
  float best = 0.0f;
  u32 cached = 0xffffffffu;
  Words4 words = {};
  // Four neighbouring columns a step: where columns are ids, they share one Philox block.
  for (int first = static_cast<int>(threadIdx.x) * 4; first < size; first += BLOCK * 4) {
    const int end = size - first < 4 ? size : first + 4;
    for (int i = first; i < end; ++i) {
      const float w = weight(i);
      if (!(w > 0.0f)) continue;
      const u32 id = static_cast<u32>(map ? map[i] : i);
      if ((id >> 2) != cached) {
        cached = id >> 2;
        words = noise_words(noise, cached);
      }
      const u32 x = words.x[id & 3u];
      // E >= v, so a token that loses even with v in place of E needs no logarithm. The slack is
      // far above the rounding of either side: no winner is ever skipped.
      if (w < best * (static_cast<float>(x) * 2.328e-10f)) continue;
      const float score = fdiv(w, exponential(x));
      if (packed != 0 && !(score > best)) continue;
      best = score;
      packed =
          (static_cast<u64>(__float_as_uint(score)) << 32) | (0xffffffffu - static_cast<u32>(i));
    }
  }
  packed = block_reduce(packed, scratch, Max());
  return packed == 0 ? -1 : static_cast<int>(0xffffffffu - static_cast<u32>(packed));
}
