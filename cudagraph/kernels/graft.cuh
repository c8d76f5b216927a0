// Device helpers for all kernels of graft. NVRTC compiles this file for GPUs and the C++ compiler
// compiles it for the soft device, so it includes no CUDA header.
//
// Floating point: a fused multiply-add is always an explicit fmaf. Nothing here depends on the
// number of rows, the number of blocks or the occupancy, so the result of a row is bit-identical
// for every batch.
#pragma once

#define FULL_WARP 0xffffffffu

// Storage types for 16-bit floats (bfloat16 and float16) and 8-bit floats (E4M3). Such a struct
// contains only the bits of a value. Kernels convert it to float with to_float() before they
// compute.
struct bf16_t {
  unsigned short bits;
};
struct fp16_t {
  unsigned short bits;
};
struct e4m3_t {
  unsigned char bits;
};

__device__ __forceinline__ float to_float(float x) { return x; }

__device__ __forceinline__ float to_float(bf16_t x) {
  return __uint_as_float(static_cast<unsigned int>(x.bits) << 16);
}

__device__ __forceinline__ float to_float(fp16_t x) {
#ifdef __CUDA_ARCH__
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x.bits));
  return f;
#else
  // Expands the bits without a branch. Subnormals are multiplied by a power of two, which is exact
  // in fp32.
  const unsigned int sign = (static_cast<unsigned int>(x.bits) & 0x8000u) << 16;
  const unsigned int magnitude = (static_cast<unsigned int>(x.bits) & 0x7fffu);
  const unsigned int exponent = magnitude & 0x7c00u;
  const unsigned int normal = (magnitude << 13) + 0x38000000u;
  const unsigned int special = (magnitude << 13) | 0x7f800000u;
  const float subnormal = static_cast<float>(static_cast<int>(magnitude)) * 5.9604644775390625e-08f;
  unsigned int bits = exponent == 0x7c00u ? special : normal;
  bits = exponent == 0u ? __float_as_uint(subnormal) : bits;
  return __uint_as_float(bits | sign);
#endif
}

// Converts any 8-bit code except NaN. Subnormals are multiples of 2^-9.
__device__ __forceinline__ float to_float(e4m3_t x) {
  const unsigned int magnitude = x.bits & 0x7fu;
  const float subnormal = static_cast<float>(static_cast<int>(magnitude)) * 0.001953125f;
  const unsigned int normal = (magnitude << 20) + 0x3c000000u;
  const unsigned int bits = magnitude < 8u ? __float_as_uint(subnormal) : normal;
  return __uint_as_float(bits | (x.bits & 0x80u) << 24);
}

// The from_float() functions round to nearest even; NaN stays NaN.
__device__ __forceinline__ void from_float(float f, float* out) { *out = f; }

__device__ __forceinline__ void from_float(float f, bf16_t* out) {
  unsigned int bits = __float_as_uint(f);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    out->bits = static_cast<unsigned short>((bits >> 16) | 0x40u);
    return;
  }
  bits += 0x7fffu + ((bits >> 16) & 1u);
  out->bits = static_cast<unsigned short>(bits >> 16);
}

__device__ __forceinline__ void from_float(float f, fp16_t* out) {
#ifdef __CUDA_ARCH__
  unsigned short h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
  out->bits = h;
#else
  const unsigned int bits = __float_as_uint(f);
  const unsigned int sign = (bits >> 16) & 0x8000u;
  const unsigned int magnitude = bits & 0x7fffffffu;
  unsigned int half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u;  // NaN
  } else if (magnitude >= 0x477ff000u) {
    half = 0x7c00u;  // rounds to infinity
  } else if (magnitude < 0x38800000u) {
    // The result is subnormal or zero. Adding 0.5 aligns the mantissa so that the addition itself
    // rounds the value to the right bit.
    const float aligned = __uint_as_float(magnitude) + 0.5f;
    half = __float_as_uint(aligned) - 0x3f000000u;
  } else {
    half = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
  }
  out->bits = static_cast<unsigned short>(half | sign);
#endif
}

// Waits until the previous kernel of the lane has completed and its writes are visible, and allows
// the next kernel to be launched (programmatic dependent launch). Every thread must call this
// function at the top of the kernel. Before the call, a thread may read only memory that no kernel
// of the graph writes. The call is required in graphs with programmatic edges and has no effect
// elsewhere.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Returns the sum of x over a full warp. The values are added in a fixed order (xor butterfly), so
// that every lane of the warp receives the same bits.
__device__ __forceinline__ float warp_sum(float x) {
  for (int offset = 16; offset > 0; offset >>= 1) x += __shfl_xor_sync(FULL_WARP, x, offset);
  return x;
}

__device__ __forceinline__ float warp_max(float x) {
  for (int offset = 16; offset > 0; offset >>= 1) {
    const float other = __shfl_xor_sync(FULL_WARP, x, offset);
    x = other > x ? other : x;
  }
  return x;
}

// Stores `value` in a word of mapped host memory with release order. A host thread that reads the
// value with an acquire load then also sees all earlier writes of this thread.
__device__ __forceinline__ void store_release_system(int* word, int value) {
#ifdef __CUDA_ARCH__
  asm volatile("st.release.sys.global.s32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
#else
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
#endif
}

// Loads a word of mapped host memory with acquire order. This thread then also sees all writes that
// precede the host's release store of the value.
__device__ __forceinline__ int load_acquire_system(const int* word) {
#ifdef __CUDA_ARCH__
  int value;
  asm volatile("ld.acquire.sys.global.s32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
#else
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
#endif
}

// Loads a word of mapped host memory that the host may store at any time. The load orders no other
// accesses.
__device__ __forceinline__ int load_relaxed_system(const int* word) {
#ifdef __CUDA_ARCH__
  int value;
  asm volatile("ld.relaxed.sys.global.s32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
#else
  return __atomic_load_n(word, __ATOMIC_RELAXED);
#endif
}

// Returns the device's global timer in nanoseconds. Its resolution is about 1 us on GPUs.
__device__ __forceinline__ unsigned long long global_timer_ns() {
#ifdef __CUDA_ARCH__
  unsigned long long t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
#else
  return softcuda_globaltimer();
#endif
}
