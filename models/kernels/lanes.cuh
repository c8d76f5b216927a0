// Eight floats side by side: a vector register to C++ compilers, an array to NVRTC. Loops over
// single lanes become one instruction. Tiles of them stay in registers where their loops are
// UNROLLED.
#pragma once
#include "model.cuh"

#define LANES 8
#ifdef __SOFTCUDA__
typedef float Lanes __attribute__((vector_size(4 * LANES)));
#else
struct Lanes {
  float lane[LANES];
  __device__ __forceinline__ float& operator[](int i) { return lane[i]; }
  __device__ __forceinline__ float operator[](int i) const { return lane[i]; }
};
#endif
#if defined(__SOFTCUDA__) && !defined(__clang__)
#define UNROLLED _Pragma("GCC unroll 16")
#else
#define UNROLLED _Pragma("unroll")
#endif

#ifdef __SOFTCUDA__
#define PREFETCH(address) __builtin_prefetch(address)
#else
#define PREFETCH(address)
#endif

template <typename T>
__device__ __forceinline__ Lanes load_lanes(const T* from) {
  Lanes x;
  UNROLLED for (int i = 0; i < LANES; ++i) x[i] = to_float(from[i]);
  return x;
}

#ifdef __SOFTCUDA__
__device__ __forceinline__ Lanes load_lanes(const float* from) {
  Lanes x;
  memcpy(&x, from, sizeof x);
  return x;
}
#ifdef __F16C__  // the loop above is not vectorised for these
__device__ __forceinline__ Lanes load_lanes(const fp16_t* from) {
  short bits __attribute__((vector_size(2 * LANES)));
  memcpy(&bits, from, sizeof bits);
  return __builtin_ia32_vcvtph2ps256(bits);
}

__device__ __forceinline__ Lanes load_lanes(const e4m3_t* from) {
  typedef short Halves __attribute__((vector_size(2 * LANES)));
  unsigned char codes __attribute__((vector_size(LANES)));
  memcpy(&codes, from, sizeof codes);
  const Halves bits = __builtin_convertvector(codes, Halves);
  // Four bits of exponent put where five are mean 2^-8 of the value.
  return __builtin_ia32_vcvtph2ps256((bits & 0x7f) << 7 | (bits & 0x80) << 8) * 256.0f;
}
#endif
#endif

// The first `count` of them, zeros behind.
template <typename T>
__device__ __noinline__ Lanes load_some(const T* from, int count) {
  float padded[LANES] = {};
  for (int i = 0; i < count; ++i) padded[i] = to_float(from[i]);
  return load_lanes(padded);
}

// The same, kept in a register where it is used more than once; compilers would load it again.
__device__ __forceinline__ Lanes held(Lanes x) {
#if defined(__SOFTCUDA__) && defined(__AVX__)
  asm("" : "+v"(x));
#endif
  return x;
}

__device__ __forceinline__ Lanes fma_lanes(Lanes a, Lanes b, Lanes c) {
  UNROLLED for (int i = 0; i < LANES; ++i) c[i] = fmaf(a[i], b[i], c[i]);
  return c;
}

// Sums of COUNT times eight lanes, each as one fixed tree, stage by stage. Not inlined, so that the
// compiler does not take the lanes apart before they are complete.
template <int COUNT>
__device__ __noinline__ void fold_lanes(const Lanes* of, float* sum) {
  float four[COUNT * 4];
  for (int j = 0; j < COUNT; ++j) {
    for (int i = 0; i < 4; ++i) four[j * 4 + i] = of[j][i] + of[j][i + 4];
  }
  for (int j = 0; j < COUNT; ++j) {
    sum[j] = (four[j * 4] + four[j * 4 + 2]) + (four[j * 4 + 1] + four[j * 4 + 3]);
  }
}
