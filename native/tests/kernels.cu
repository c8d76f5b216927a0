// Kernels of the stress test: each writes one cell of kWords words from up to three others, and
// from what the cell held before. model.h computes the same.
#include "stress_cell.h"

extern "C" __global__ void plain_cell(unsigned* cells, int out, unsigned salt, int a, int b,
                                      int c) {
  const int word = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  cells[out * kWords + word] = gather_word(cells, out, salt, a, b, c, word);
}

// Each word also takes its right neighbour's, around the block.
extern "C" __global__ void barrier_cell(unsigned* cells, int out, unsigned salt, int a, int b,
                                        int c) {
  __shared__ unsigned words[kBlock];
  const int thread = static_cast<int>(threadIdx.x);
  const int word = static_cast<int>(blockIdx.x) * kBlock + thread;
  words[thread] = gather_word(cells, out, salt, a, b, c, word);
  __syncthreads();
  cells[out * kWords + word] = mix_word(words[thread], words[(thread + 1) % kBlock]);
}

// Each word also takes that of the lane whose number differs in bit 3.
extern "C" __global__ void warp_cell(unsigned* cells, int out, unsigned salt, int a, int b, int c) {
  const int word = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const unsigned own = gather_word(cells, out, salt, a, b, c, word);
  const unsigned other = __shfl_xor_sync(0xffffffffu, own, 8);
  cells[out * kWords + word] = mix_word(own, other);
}

// Writes where nothing is.
extern "C" __global__ void stray_cell(unsigned* cells, int out) { cells[out] = 1; }
