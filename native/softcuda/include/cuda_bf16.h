// __nv_bfloat16 and __nv_bfloat162 for the soft device: the commonly used part of CUDA's header of
// this name.
#pragma once

#ifdef __SOFTCUDA__
#include "softcuda_half.h"

SOFTCUDA_16BIT(__nv_bfloat16, __nv_bfloat162, softcuda_bfloat_to_float, softcuda_float_to_bfloat)
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;

static inline float __bfloat162float(__nv_bfloat16 h) { return h; }
static inline __nv_bfloat16 __float2bfloat16(float f) { return __nv_bfloat16(f); }
static inline __nv_bfloat16 __float2bfloat16_rn(float f) { return __nv_bfloat16(f); }
static inline __nv_bfloat16 __double2bfloat16(double f) { return __nv_bfloat16(f); }
static inline __nv_bfloat16 __int2bfloat16_rn(int i) { return __nv_bfloat16(i); }
static inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 h) { return h.bits; }
static inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
  __nv_bfloat16 h;
  h.bits = bits;
  return h;
}
static inline __nv_bfloat162 make_bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) {
  return __nv_bfloat162{x, y};
}
static inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) {
  return __nv_bfloat162{x, y};
}
static inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 x) { return __nv_bfloat162{x, x}; }
static inline __nv_bfloat162 __float2bfloat162_rn(float f) {
  return __nv_bfloat162{__nv_bfloat16(f), __nv_bfloat16(f)};
}
static inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return __nv_bfloat162{__nv_bfloat16(x), __nv_bfloat16(y)};
}
static inline float2 __bfloat1622float2(__nv_bfloat162 h) { return make_float2(h.x, h.y); }
static inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 h) { return h.x; }
static inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 h) { return h.y; }
#endif
