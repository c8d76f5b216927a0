// Kernels of the stress test. A kernel that writes a cell computes new words for cell `out` from
// its old words and from the cells a, b and c; see stress_cell.h. The sequential model (model.h)
// computes the same values.
#include "conditional.cuh"
#include "mailbox.cu"
#include "stress_cell.h"

extern "C" __global__ void plain_cell(unsigned* cells, int out, unsigned salt, int a, int b,
                                      int c) {
  const int word = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  cells[out * kWords + word] = gather_word(cells, out, salt, a, b, c, word);
}

// Mixes each word with the word of the next thread of the block.
extern "C" __global__ void barrier_cell(unsigned* cells, int out, unsigned salt, int a, int b,
                                        int c) {
  __shared__ unsigned words[kBlock];
  const int thread = static_cast<int>(threadIdx.x);
  const int word = static_cast<int>(blockIdx.x) * kBlock + thread;
  words[thread] = gather_word(cells, out, salt, a, b, c, word);
  __syncthreads();
  cells[out * kWords + word] = mix_word(words[thread], words[(thread + 1) % kBlock]);
}

// Mixes each word with the word of the warp lane whose index differs in bit 3.
extern "C" __global__ void warp_cell(unsigned* cells, int out, unsigned salt, int a, int b, int c) {
  const int word = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const unsigned own = gather_word(cells, out, salt, a, b, c, word);
  const unsigned other = __shfl_xor_sync(0xffffffffu, own, 8);
  cells[out * kWords + word] = mix_word(own, other);
}

// Writes to cells[out]; the test passes an index that is out of bounds.
extern "C" __global__ void stray_cell(unsigned* cells, int out) { cells[out] = 1; }

// Sets the condition of an IF node to the value of cell a modulo `cases`.
extern "C" __global__ void decide_cell(unsigned long long condition, const unsigned* cells, int a,
                                       unsigned cases) {
  cudaGraphSetConditional(condition, cells[a * kWords] % cases);
}
// Sets the condition of the WHILE node i, so that its body runs `limit` times.
extern "C" __global__ void loop_cell(unsigned long long condition, unsigned* iterations, int i,
                                     unsigned limit) {
  if (++iterations[i] == limit) iterations[i] = 0;
  cudaGraphSetConditional(condition, iterations[i]);
}

// Mailbox kernels that call functions of the host program to store and load their words.
// ThreadSanitizer does not instrument kernels, but sees the accesses in these functions.
using Store = void (*)(int* word, int value);
using Load = int (*)(const int* word);

extern "C" __global__ void post_cell(unsigned* counter, int* request, int* ack,
                                     unsigned long long store) {
  reinterpret_cast<Store>(store)(ack, 0);
  reinterpret_cast<Store>(store)(request, next_number(counter));
}
extern "C" __global__ void await_cell(const unsigned* counter, const int* ack,
                                      unsigned long long load) {
  while (reinterpret_cast<Load>(load)(ack) != static_cast<int>(*counter)) pause_polling();
}
