// What verification and drafting would write, from rows that were recorded.
#include "graft.cuh"

// Copies `count` words of each slot to word `at` of its part of the exchange; a block per slot.
extern "C" __global__ void place(int* exchange, int stride, int at, const int* rows, int count) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    exchange[blockIdx.x * stride + at + i] = rows[blockIdx.x * count + i];
  }
}
