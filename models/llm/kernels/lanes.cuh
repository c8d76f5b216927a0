// Eight floats side by side, a vector register of the soft device's C++ compiler. Loops over single
// lanes become one instruction. Tiles of them stay in registers where their loops are UNROLLED.
#pragma once
#include "model.cuh"

#define LANES 8
typedef float Lanes __attribute__((vector_size(4 * LANES)));
#ifdef __clang__
#define UNROLLED _Pragma("unroll")
#else
#define UNROLLED _Pragma("GCC unroll 16")
#endif

template <typename T>
__device__ __forceinline__ Lanes load_lanes(const T* from) {
  Lanes x;
  UNROLLED for (int i = 0; i < LANES; ++i) x[i] = to_float(from[i]);
  return x;
}

__device__ __forceinline__ Lanes load_lanes(const float* from) {
  Lanes x;
  memcpy(&x, from, sizeof x);
  return x;
}

#ifdef __AVX2__  // the loop above is not vectorised for these, or badly
__device__ __forceinline__ Lanes load_lanes(const bf16_t* from) {
  int x __attribute__((vector_size(4 * LANES)));
  asm("vpmovzxwd %1, %0" : "=v"(x) : "m"(*reinterpret_cast<const bf16_t(*)[LANES]>(from)));
  return reinterpret_cast<Lanes>(x << 16);
}
#endif
#ifdef __F16C__
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

__device__ __forceinline__ void store_lanes(float* to, const Lanes& x) { memcpy(to, &x, sizeof x); }

// The first `count` of them as floats, zeros behind.
template <typename T>
__device__ __noinline__ void pad(const T* from, int count, float* padded) {
  for (int i = 0; i < LANES; ++i) padded[i] = i < count ? to_float(from[i]) : 0.0f;
}

// Eight floats kept in a register where they are used more than once; compilers would load them
// again.
__device__ __forceinline__ Lanes held(Lanes x) {
#ifdef __AVX__
  asm("" : "+v"(x));
#endif
  return x;
}

__device__ __forceinline__ Lanes fma_lanes(Lanes a, Lanes b, Lanes c) {
  UNROLLED for (int i = 0; i < LANES; ++i) c[i] = fmaf(a[i], b[i], c[i]);
  return c;
}

// What an operation makes of eight times eight lanes, each as one fixed tree: lanes i + 4 to i,
// i + 2 to i, the last two. Vectors of more than eight lanes are folded eight by eight.
typedef int LaneIds __attribute__((vector_size(4 * LANES)));
typedef int WideIds __attribute__((vector_size(8 * LANES)));
#ifdef __clang__
#define SHUFFLE(ids, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(ids, a, b, ...) __builtin_shuffle(a, b, ids{__VA_ARGS__})
#endif

// Of every eight lanes those at I, of `b` where that is eight or more.
template <int... I, typename T>
__device__ __forceinline__ T pick(T a, T b) {
  if constexpr (sizeof(T) == sizeof(Lanes)) {
    return SHUFFLE(LaneIds, a, b, I...);
  } else {
    return SHUFFLE(WideIds, a, b, (I < LANES ? I : I + LANES)...,
                   (I < LANES ? I + LANES : I + 2 * LANES)...);
  }
}

template <typename T, typename Op>
__device__ __forceinline__ T fold_eight(const T* of, Op op) {
  T half[4], quarter[2];
  UNROLLED for (int j = 0; j < 4; ++j) {
    const T a = of[j], b = of[j + 4];
    half[j] = op(pick<0, 1, 2, 3, 8, 9, 10, 11>(a, b), pick<4, 5, 6, 7, 12, 13, 14, 15>(a, b));
  }
  UNROLLED for (int j = 0; j < 2; ++j) {
    const T a = half[2 * j], b = half[2 * j + 1];
    quarter[j] = op(pick<0, 1, 8, 9, 4, 5, 12, 13>(a, b), pick<2, 3, 10, 11, 6, 7, 14, 15>(a, b));
  }
  const T a = quarter[0], b = quarter[1];
  return op(pick<0, 2, 8, 10, 4, 6, 12, 14>(a, b), pick<1, 3, 9, 11, 5, 7, 13, 15>(a, b));
}

template <typename T>
__device__ __forceinline__ T sum_eight(const T* of) {
  return fold_eight(of, [](T a, T b) { return a + b; });
}
