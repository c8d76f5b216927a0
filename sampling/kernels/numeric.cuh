// exp and log in plain fp32 operations.
//
// Every product and sum is rounded on its own (no contraction), and division is IEEE, so that a
// GPU, the soft device and NumPy return the same bits: sampled tokens then agree everywhere, with
// no excuse for near-ties. The loops that use them have no calls and vectorise on the soft device.
#pragma once

#include "graft.cuh"

#ifdef __CUDA_ARCH__
__device__ __forceinline__ float fmul(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float fadd(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float fdiv(float a, float b) { return __fdiv_rn(a, b); }
#else
__device__ __forceinline__ float fmul(float a, float b) { return a * b; }
__device__ __forceinline__ float fadd(float a, float b) { return a + b; }
__device__ __forceinline__ float fdiv(float a, float b) { return a / b; }
#endif

// log 2 in two parts: the first has 16 significant bits, so its product with an exponent is exact.
#define LN2_HIGH 0.693145751953125f
#define LN2_LOW 1.42860682030941723212e-06f

// exp(x) for x <= 0; below -87 (under the smallest normal number) exactly 0.
// Range reduction by log 2, then the Taylor polynomial of degree 7 on |r| <= log(2) / 2.
__device__ __forceinline__ float exp_nonpositive(float x) {
  const float y = x < -87.0f ? -87.0f : x;
  // Adding and subtracting 1.5 * 2^23 rounds to the nearest integer.
  const float n = fadd(fadd(fmul(y, 1.44269504088896341f), 12582912.0f), -12582912.0f);
  const float r = fadd(fadd(y, -fmul(n, LN2_HIGH)), -fmul(n, LN2_LOW));
  float s = 1.98412698e-04f;
  s = fadd(fmul(s, r), 1.38888889e-03f);
  s = fadd(fmul(s, r), 8.33333333e-03f);
  s = fadd(fmul(s, r), 4.16666667e-02f);
  s = fadd(fmul(s, r), 1.66666667e-01f);
  s = fadd(fmul(s, r), 0.5f);
  s = fadd(fadd(fmul(fmul(s, r), r), r), 1.0f);
  const unsigned int scale = static_cast<unsigned int>(static_cast<int>(n)) << 23;
  const float result = __uint_as_float(__float_as_uint(s) + scale);
  return x < -87.0f ? 0.0f : result;
}

// log(1 + f) for -0.2929 < f <= 0.4143: 2 artanh(f / (2 + f)) by its series, accurate down to f =
// 0.
__device__ __forceinline__ float log1p_small(float f) {
  const float s = fdiv(f, fadd(2.0f, f));
  const float z = fmul(s, s);
  float t = 1.11111111e-01f;
  t = fadd(fmul(t, z), 1.42857143e-01f);
  t = fadd(fmul(t, z), 2.0e-01f);
  t = fadd(fmul(t, z), 3.33333333e-01f);
  const float twice = fadd(s, s);
  return fadd(twice, fmul(twice, fmul(t, z)));
}

// log(y) for normal y > 0: mantissa in [sqrt(1/2), sqrt(2)), exponent apart.
__device__ __forceinline__ float log_positive(float y) {
  const unsigned int bits = __float_as_uint(y);
  const unsigned int shifted = bits - 0x3f3504f3u;  // sqrt(1/2)
  const int k = static_cast<int>(shifted) >> 23;
  const float m = __uint_as_float(bits - (static_cast<unsigned int>(k) << 23));
  const float n = static_cast<float>(k);
  return fadd(fmul(n, LN2_HIGH), fadd(fmul(n, LN2_LOW), log1p_small(fadd(m, -1.0f))));
}
