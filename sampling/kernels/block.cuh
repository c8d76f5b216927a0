// Block-wide helpers for kernels that give one block to one row of logits.
//
// SAMPLE_BLOCK (threads of a block) is a compile-time choice of the loader: wide on a GPU, 1 on the
// soft device, where a barrier costs more than the work it separates. Results do not depend on it:
// sums are integers, maxima carry their index, so no order of threads shows in a bit.
//
// Ownership: element i of a row belongs to thread i mod SAMPLE_BLOCK, so passes that only touch own
// elements need no barrier between them.
#pragma once

#include "graft.cuh"

#ifndef SAMPLE_BLOCK
#define SAMPLE_BLOCK 512
#endif

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int BLOCK = SAMPLE_BLOCK;
constexpr int LANES = BLOCK < 32 ? BLOCK : 32;  // threads that share a 32-bit mask word
constexpr int WARPS = BLOCK / LANES;
static_assert(BLOCK == 1 || BLOCK % 32 == 0, "SAMPLE_BLOCK is 1 or a multiple of 32");

constexpr int BINS = 256;
constexpr int STAGED_WORDS = BLOCK == 1 ? 1 : 8192;  // 2^18 token ids in 32 KiB

struct Scratch {
  u32 words[STAGED_WORDS];
  u64 partial[BLOCK];
  u64 group[LANES];
  u64 mass[BINS];
  u32 members[BINS];
  u64 cut;
  u64 need;
  int token;
};

__device__ __forceinline__ void block_sync() {
  if (BLOCK > 1) __syncthreads();
}

struct Max {
  __device__ __forceinline__ u64 operator()(u64 a, u64 b) const { return a > b ? a : b; }
};

struct Sum {
  __device__ __forceinline__ u64 operator()(u64 a, u64 b) const { return a + b; }
};

// Combine one value of every thread; all threads receive the result. Two barriers: the first of the
// next call orders this call's reads of `group` before they are overwritten.
template <class Op>
__device__ __forceinline__ u64 block_reduce(u64 value, Scratch& scratch, Op op) {
  if (BLOCK == 1) return value;
  const int tid = static_cast<int>(threadIdx.x);
  scratch.partial[tid] = value;
  __syncthreads();
  if (tid < LANES) {
    u64 x = scratch.partial[tid];
    for (int i = tid + LANES; i < BLOCK; i += LANES) x = op(x, scratch.partial[i]);
    scratch.group[tid] = x;
  }
  __syncthreads();
  u64 x = scratch.group[0];
  for (int i = 1; i < LANES; ++i) x = op(x, scratch.group[i]);
  return x;
}
