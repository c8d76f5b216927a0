// Kernels of the stress test: each writes one cell of kWords words from up to three others, and
// from what the cell held before. model.h computes the same.
#include "conditional.cuh"
#include "mailbox.cu"
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

// Conditions: what a cell holds, and how often a loop has turned.
extern "C" __global__ void decide_cell(unsigned long long condition, const unsigned* cells, int a,
                                       unsigned cases) {
  cudaGraphSetConditional(condition, cells[a * kWords] % cases);
}
extern "C" __global__ void turn_cell(unsigned long long condition, unsigned* turns, int place,
                                     unsigned limit) {
  if (++turns[place] == limit) turns[place] = 0;
  cudaGraphSetConditional(condition, turns[place]);
}

// The mailbox's kernels with stores and loads by functions of the program, for a sanitizer that
// must see them: it knows nothing of what runs in here.
using Post = void (*)(int* word, int value);
using Look = int (*)(const int* word);

extern "C" __global__ void post_cell(unsigned* counter, int* request, unsigned long long post) {
  reinterpret_cast<Post>(post)(request, next_number(counter));
}
extern "C" __global__ void await_cell(const unsigned* counter, const int* ack,
                                      unsigned long long look) {
  while (reinterpret_cast<Look>(look)(ack) != static_cast<int>(*counter)) rest();
}
