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

// Sums of eight times eight lanes, each as one fixed tree: lanes i + 4 to i, i + 2 to i, the last
// two.
#ifdef __SOFTCUDA__
#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int LaneIds __attribute__((vector_size(4 * LANES)));
#define PICK(a, b, ...) __builtin_shuffle(a, b, LaneIds{__VA_ARGS__})
#endif
__device__ __forceinline__ Lanes fold_eight(const Lanes* of) {
  Lanes half[4], quarter[2];
  UNROLLED for (int j = 0; j < 4; ++j) {
    const Lanes a = of[j], b = of[j + 4];
    half[j] = PICK(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + PICK(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
  }
  UNROLLED for (int j = 0; j < 2; ++j) {
    const Lanes a = half[2 * j], b = half[2 * j + 1];
    quarter[j] = PICK(a, b, 0, 1, 8, 9, 4, 5, 12, 13) + PICK(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
  }
  const Lanes a = quarter[0], b = quarter[1];
  return PICK(a, b, 0, 2, 8, 10, 4, 6, 12, 14) + PICK(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
}
#else
__device__ __forceinline__ Lanes fold_eight(const Lanes* of) {
  Lanes sum;
  for (int j = 0; j < LANES; ++j) {
    const Lanes& x = of[j];
    sum[j] = ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
  }
  return sum;
}
#endif

// The same of COUNT.
template <int COUNT>
__device__ __forceinline__ void fold_lanes(const Lanes* of, float* sum) {
  UNROLLED for (int first = 0; first < COUNT; first += LANES) {
    Lanes eight[LANES] = {};
    UNROLLED for (int j = 0; j < LANES && first + j < COUNT; ++j) eight[j] = of[first + j];
    const Lanes folded = fold_eight(eight);
    UNROLLED for (int j = 0; j < LANES && first + j < COUNT; ++j) sum[first + j] = folded[j];
  }
}
