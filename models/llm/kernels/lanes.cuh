// The type Lanes: a vector register of eight floats, for the kernels that the soft device runs on
// the CPU. A loop over the lanes compiles to one instruction. An array of Lanes stays in registers
// if the loops over it are UNROLLED.
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

// Compilers do not vectorize the generic load_lanes well for 16-bit types. These overloads use
// vector instructions directly.
#ifdef __AVX2__
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
  // The 4-bit exponent is placed in a 5-bit field, which scales the value by 2^-8.
  return __builtin_ia32_vcvtph2ps256((bits & 0x7f) << 7 | (bits & 0x80) << 8) * 256.0f;
}
#endif

__device__ __forceinline__ void store_lanes(float* to, const Lanes& x) { memcpy(to, &x, sizeof x); }

// Converts the first `count` values to floats and fills the rest with zeros.
template <typename T>
__device__ __noinline__ void pad(const T* from, int count, float* padded) {
  for (int i = 0; i < LANES; ++i) padded[i] = i < count ? to_float(from[i]) : 0.0f;
}

// Returns x in a register. Without this function, compilers reload a value from memory each time it
// is used.
__device__ __forceinline__ Lanes in_register(Lanes x) {
#ifdef __AVX__
  asm("" : "+v"(x));
#endif
  return x;
}

__device__ __forceinline__ Lanes fma_lanes(Lanes a, Lanes b, Lanes c) {
  UNROLLED for (int i = 0; i < LANES; ++i) c[i] = fmaf(a[i], b[i], c[i]);
  return c;
}

// fold_eight reduces each of eight vectors to one value; lane i of the result is the reduction of
// vector i. The order is a fixed tree: lane i + 4 is folded onto lane i, then lane i + 2 onto lane
// i, and then lane 1 onto lane 0. A vector of 16 lanes is two groups of eight that are reduced
// separately.
typedef int LaneIds __attribute__((vector_size(4 * LANES)));
typedef int WideIds __attribute__((vector_size(8 * LANES)));
#ifdef __clang__
#define SHUFFLE(ids, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(ids, a, b, ...) __builtin_shuffle(a, b, ids{__VA_ARGS__})
#endif

// Shuffles every group of eight lanes. Index I selects lane I of `a` if I < 8, else lane I - 8 of
// `b`.
template <int... I, typename T>
__device__ __forceinline__ T shuffle_groups(T a, T b) {
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
    half[j] = op(shuffle_groups<0, 1, 2, 3, 8, 9, 10, 11>(a, b),
                 shuffle_groups<4, 5, 6, 7, 12, 13, 14, 15>(a, b));
  }
  UNROLLED for (int j = 0; j < 2; ++j) {
    const T a = half[2 * j], b = half[2 * j + 1];
    quarter[j] = op(shuffle_groups<0, 1, 8, 9, 4, 5, 12, 13>(a, b),
                    shuffle_groups<2, 3, 10, 11, 6, 7, 14, 15>(a, b));
  }
  const T a = quarter[0], b = quarter[1];
  return op(shuffle_groups<0, 2, 8, 10, 4, 6, 12, 14>(a, b),
            shuffle_groups<1, 3, 9, 11, 5, 7, 13, 15>(a, b));
}

template <typename T>
__device__ __forceinline__ T sum_eight(const T* of) {
  return fold_eight(of, [](T a, T b) { return a + b; });
}
