// half and half2 for the soft device: the commonly used part of CUDA's header of this name.
#pragma once

#ifdef __SOFTCUDA__
#include "softcuda_half.h"

SOFTCUDA_16BIT(__half, __half2, softcuda_half_to_float, softcuda_float_to_half)
typedef __half half;
typedef __half2 half2;

static inline float __half2float(half h) { return h; }
static inline half __float2half(float f) { return half(f); }
static inline half __float2half_rn(float f) { return half(f); }
static inline half __double2half(double f) { return half(f); }
static inline half __int2half_rn(int i) { return half(i); }
static inline int __half2int_rn(half h) { return __float2int_rn(h); }
static inline int __half2int_rz(half h) { return __float2int_rz(h); }
static inline unsigned short __half_as_ushort(half h) { return h.bits; }
static inline half __ushort_as_half(unsigned short bits) {
  half h;
  h.bits = bits;
  return h;
}
static inline half2 make_half2(half x, half y) { return half2{x, y}; }
static inline half2 __halves2half2(half x, half y) { return half2{x, y}; }
static inline half2 __half2half2(half x) { return half2{x, x}; }
static inline half2 __float2half2_rn(float f) { return half2{half(f), half(f)}; }
static inline half2 __floats2half2_rn(float x, float y) { return half2{half(x), half(y)}; }
static inline half2 __float22half2_rn(float2 f) { return half2{half(f.x), half(f.y)}; }
static inline float2 __half22float2(half2 h) { return make_float2(h.x, h.y); }
static inline half __low2half(half2 h) { return h.x; }
static inline half __high2half(half2 h) { return h.y; }
static inline float __low2float(half2 h) { return h.x; }
static inline float __high2float(half2 h) { return h.y; }
#endif
