// Functions that kernels, host steps and the model of the stress test share.
#pragma once

#ifdef __SOFTCUDA__
#define CELL_CODE __device__ inline
#else
#define CELL_CODE inline
#endif

constexpr int kWords = 128, kBlock = 64;

CELL_CODE unsigned mix_word(unsigned hash, unsigned word) {
  hash = (hash ^ word) * 0x9e3779b1u;
  return hash ^ (hash >> 15);
}

// Returns the new value of a word from cell `out` and up to three others; a, b and c may be -1.
CELL_CODE unsigned gather_word(const unsigned* cells, int out, unsigned salt, int a, int b, int c,
                               int word) {
  unsigned hash = mix_word(salt, cells[out * kWords + word]);
  if (a >= 0) hash = mix_word(hash, cells[a * kWords + word]);
  if (b >= 0) hash = mix_word(hash, cells[b * kWords + word]);
  if (c >= 0) hash = mix_word(hash, cells[c * kWords + word]);
  return hash;
}
