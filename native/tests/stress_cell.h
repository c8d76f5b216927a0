// Functions that the kernels, the host steps and the sequential model of the stress test share.
//
// The test's memory is an array of cells of kWords words, one cell per graph node. A node computes
// new words for its cell from the old words and from the cells of nodes that it depends on.
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

// Returns the new value of word `word` of cell `out`. It is a hash of `salt`, of the word's old
// value and of the same word in the cells a, b and c. A cell index of -1 is ignored.
CELL_CODE unsigned gather_word(const unsigned* cells, int out, unsigned salt, int a, int b, int c,
                               int word) {
  unsigned hash = mix_word(salt, cells[out * kWords + word]);
  if (a >= 0) hash = mix_word(hash, cells[a * kWords + word]);
  if (b >= 0) hash = mix_word(hash, cells[b * kWords + word]);
  if (c >= 0) hash = mix_word(hash, cells[c * kWords + word]);
  return hash;
}
