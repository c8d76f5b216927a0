// The type Pair: two groups of eight floats, for two columns, two keys or two parts of a row. A
// Pair is one 512-bit register if the processor has AVX-512, else two registers. Results have the
// same bits in both cases.
#pragma once
#include "lanes.cuh"

#ifndef WIDE
#ifdef __AVX512BW__
#define WIDE 1
#else
#define WIDE 0
#endif
#endif

// The functions for a 512-bit `Pair` use inline assembly, because GCC splits 512-bit vectors that
// are loaded from memory.
#if WIDE
typedef float Pair __attribute__((vector_size(8 * LANES)));

template <typename T>
__device__ __forceinline__ Pair load_both(const T* a, const T* b) {
  Pair x;
  asm("vinsertf64x4 $1, %2, %g1, %0" : "=v"(x) : "v"(load_lanes(a)), "v"(load_lanes(b)));
  return x;
}

__device__ __forceinline__ Pair load_both(const bf16_t* a, const bf16_t* b) {
  typedef const bf16_t Eight[LANES];
  const short ids __attribute__((vector_size(8 * LANES))) = {0, 0,  0, 1,  0, 2,  0,  3,  0,  4, 0,
                                                             5, 0,  6, 0,  7, 0,  32, 0,  33, 0, 34,
                                                             0, 35, 0, 36, 0, 37, 0,  38, 0,  39};
  Pair x, y;
  asm("vmovdqu16 %1, %x0" : "=v"(x) : "m"(*reinterpret_cast<Eight*>(a)));
  asm("vmovdqu16 %1, %x0" : "=v"(y) : "m"(*reinterpret_cast<Eight*>(b)));
  // Places each bfloat16 in the upper 16 bits of a float; the mask clears the lower 16 bits.
  asm("vpermt2w %2, %1, %0%{%3%}%{z%}" : "+v"(x) : "v"(ids), "v"(y), "Yk"(0xaaaaaaaau));
  return x;
}

__device__ __forceinline__ Pair load_pair(const float* from) {
  Pair x;
  memcpy(&x, from, sizeof x);
  return x;
}

__device__ __forceinline__ Pair load_twice(const float* from) {
  Pair x;
  asm("vbroadcastf64x4 %1, %0" : "=v"(x) : "m"(*reinterpret_cast<const float (*)[LANES]>(from)));
  return x;
}

__device__ __forceinline__ Pair broadcast(const float& x) {
  Pair all;
  asm("vbroadcastss %1, %0" : "=v"(all) : "m"(x));
  return all;
}

__device__ __forceinline__ void store_pair(float* to, Pair x) { memcpy(to, &x, sizeof x); }

__device__ __forceinline__ Pair scaled(Pair x, float by) { return x * by; }

__device__ __forceinline__ Pair fma_pair(Pair a, Pair b, Pair c) {
  return __builtin_ia32_vfmaddps512_mask(a, b, c, 0xffff, 4);  // 4: current rounding mode
}
#else
struct Pair {
  Lanes half[2];
};

template <typename T>
__device__ __forceinline__ Pair load_both(const T* a, const T* b) {
  return {{load_lanes(a), load_lanes(b)}};
}

__device__ __forceinline__ Pair load_pair(const float* from) {
  return load_both(from, from + LANES);
}

__device__ __forceinline__ Pair load_twice(const float* from) {
  const Lanes x = in_register(load_lanes(from));
  return {{x, x}};
}

__device__ __forceinline__ Pair broadcast(float x) {
  Lanes all;
  UNROLLED for (int i = 0; i < LANES; ++i) all[i] = x;
  return {{all, all}};
}

__device__ __forceinline__ void store_pair(float* to, const Pair& x) {
  store_lanes(to, x.half[0]);
  store_lanes(to + LANES, x.half[1]);
}

__device__ __forceinline__ Pair scaled(Pair x, float by) {
  UNROLLED for (int i = 0; i < 2 * LANES; ++i) x.half[i / LANES][i % LANES] *= by;
  return x;
}

__device__ __forceinline__ Pair fma_pair(const Pair& a, const Pair& b, const Pair& c) {
  return {{fma_lanes(a.half[0], b.half[0], c.half[0]), fma_lanes(a.half[1], b.half[1], c.half[1])}};
}
#endif

// Sums the eight lanes of each half of COUNT pairs.
template <int COUNT>
__device__ __forceinline__ void fold_pairs(const Pair* of, float (*sum)[2]) {
#if WIDE
  UNROLLED for (int at = 0; at < COUNT; at += LANES) {
    Pair eight[LANES] = {};
    UNROLLED for (int j = 0; j < LANES && at + j < COUNT; ++j) eight[j] = of[at + j];
    const Pair folded = sum_eight(eight);
    const Pair interleaved =
        SHUFFLE(WideIds, folded, folded, 0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
    memcpy(sum + at, &interleaved,
           COUNT - at < LANES ? (COUNT - at) * sizeof *sum : sizeof interleaved);
  }
#else
  UNROLLED for (int at = 0; at < 2 * COUNT; at += LANES) {
    Lanes eight[LANES] = {};
    UNROLLED for (int j = 0; j < LANES && at + j < 2 * COUNT; ++j) {
      eight[j] = of[(at + j) / 2].half[(at + j) % 2];
    }
    const Lanes folded = sum_eight(eight);
    UNROLLED for (int j = 0; j < LANES && at + j < 2 * COUNT; ++j) {
      sum[(at + j) / 2][(at + j) % 2] = folded[j];
    }
  }
#endif
}
