// Math functions and intrinsics. The functions are those of libm. Fast intrinsics such as __expf
// call the accurate functions, so their error is at most the error on a GPU.
#pragma once

#define SOFTCUDA_LIBM1(name)                \
  extern "C" float name##f(float) noexcept; \
  extern "C" double name(double) noexcept;  \
  static inline float name(float x) { return name##f(x); }
#define SOFTCUDA_LIBM2(name)                       \
  extern "C" float name##f(float, float) noexcept; \
  extern "C" double name(double, double) noexcept; \
  static inline float name(float x, float y) { return name##f(x, y); }

SOFTCUDA_LIBM1(exp)
SOFTCUDA_LIBM1(exp2)
SOFTCUDA_LIBM1(expm1)
SOFTCUDA_LIBM1(log)
SOFTCUDA_LIBM1(log2)
SOFTCUDA_LIBM1(log10)
SOFTCUDA_LIBM1(log1p)
SOFTCUDA_LIBM1(sqrt)
SOFTCUDA_LIBM1(cbrt)
SOFTCUDA_LIBM1(sin)
SOFTCUDA_LIBM1(cos)
SOFTCUDA_LIBM1(tan)
SOFTCUDA_LIBM1(tanh)
SOFTCUDA_LIBM1(sinh)
SOFTCUDA_LIBM1(cosh)
SOFTCUDA_LIBM1(asin)
SOFTCUDA_LIBM1(acos)
SOFTCUDA_LIBM1(atan)
SOFTCUDA_LIBM1(erf)
SOFTCUDA_LIBM1(erfc)
SOFTCUDA_LIBM1(floor)
SOFTCUDA_LIBM1(ceil)
SOFTCUDA_LIBM1(trunc)
SOFTCUDA_LIBM1(round)
SOFTCUDA_LIBM1(rint)
SOFTCUDA_LIBM1(nearbyint)
SOFTCUDA_LIBM1(fabs)
SOFTCUDA_LIBM2(pow)
SOFTCUDA_LIBM2(fmod)
SOFTCUDA_LIBM2(atan2)
SOFTCUDA_LIBM2(copysign)
SOFTCUDA_LIBM2(fmax)
SOFTCUDA_LIBM2(fmin)
SOFTCUDA_LIBM2(hypot)
#undef SOFTCUDA_LIBM1
#undef SOFTCUDA_LIBM2

extern "C" float fmaf(float, float, float) noexcept;
extern "C" double fma(double, double, double) noexcept;
extern "C" float ldexpf(float, int) noexcept;
extern "C" float scalbnf(float, int) noexcept;
extern "C" long lrintf(float) noexcept;
extern "C" int abs(int) noexcept;
extern "C" void* memcpy(void*, const void*, size_t) noexcept;
extern "C" void* memset(void*, int, size_t) noexcept;
static inline float fma(float a, float b, float c) { return fmaf(a, b, c); }
static inline float abs(float x) { return fabsf(x); }
static inline long long abs(long long x) { return x < 0 ? -x : x; }

static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline double rsqrt(double x) { return 1.0 / sqrt(x); }
static inline float __expf(float x) { return expf(x); }
static inline float __exp2f(float x) { return exp2f(x); }
static inline float __logf(float x) { return logf(x); }
static inline float __log2f(float x) { return log2f(x); }
static inline float __sinf(float x) { return sinf(x); }
static inline float __cosf(float x) { return cosf(x); }
static inline float __powf(float x, float y) { return powf(x, y); }
static inline void sincosf(float x, float* s, float* c) {
  *s = sinf(x);
  *c = cosf(x);
}
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __frcp_rn(float x) { return 1.0f / x; }
static inline float __fsqrt_rn(float x) { return sqrtf(x); }
static inline float __frsqrt_rn(float x) { return static_cast<float>(1.0 / sqrt((double)x)); }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
static inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
static inline float fdividef(float a, float b) { return a / b; }

// isnan, isinf and isfinite test the bits, so that they do not depend on a compiler's assumptions
// about NaN.
template <class To, class From>
static inline To softcuda_bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}
static inline int __float_as_int(float x) { return softcuda_bit_cast<int>(x); }
static inline unsigned __float_as_uint(float x) { return softcuda_bit_cast<unsigned>(x); }
static inline float __int_as_float(int x) { return softcuda_bit_cast<float>(x); }
static inline float __uint_as_float(unsigned x) { return softcuda_bit_cast<float>(x); }
static inline long long __double_as_longlong(double x) { return softcuda_bit_cast<long long>(x); }
static inline double __longlong_as_double(long long x) { return softcuda_bit_cast<double>(x); }
static inline bool isnan(float x) { return (__float_as_uint(x) & 0x7fffffffu) > 0x7f800000u; }
static inline bool isinf(float x) { return (__float_as_uint(x) & 0x7fffffffu) == 0x7f800000u; }
static inline bool isfinite(float x) { return (__float_as_uint(x) & 0x7fffffffu) < 0x7f800000u; }
static inline bool isnan(double x) { return x != x; }

// Conversions saturate and convert NaN to 0, as on a GPU. The C++ cast of such a value is
// undefined.
static inline int softcuda_to_int(float x) {
  if (isnan(x)) return 0;
  if (x >= 2147483648.0f) return 2147483647;
  if (x < -2147483648.0f) return -2147483647 - 1;
  return static_cast<int>(x);
}
static inline unsigned softcuda_to_uint(float x) {
  if (!(x > 0.0f)) return 0;
  if (x >= 4294967296.0f) return 0xffffffffu;
  return static_cast<unsigned>(x);
}
static inline int __float2int_rz(float x) { return softcuda_to_int(x); }
static inline int __float2int_rn(float x) { return softcuda_to_int(rintf(x)); }
static inline int __float2int_rd(float x) { return softcuda_to_int(floorf(x)); }
static inline int __float2int_ru(float x) { return softcuda_to_int(ceilf(x)); }
static inline unsigned __float2uint_rz(float x) { return softcuda_to_uint(x); }
static inline unsigned __float2uint_rn(float x) { return softcuda_to_uint(rintf(x)); }
static inline float __int2float_rn(int x) { return static_cast<float>(x); }
static inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }

static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __ffsll(long long x) { return __builtin_ffsll(x); }
static inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
static inline int __clzll(long long x) {
  return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x));
}
static inline unsigned __brev(unsigned x) {
  x = (x >> 16) | (x << 16);
  x = ((x & 0xff00ff00u) >> 8) | ((x & 0x00ff00ffu) << 8);
  x = ((x & 0xf0f0f0f0u) >> 4) | ((x & 0x0f0f0f0fu) << 4);
  x = ((x & 0xccccccccu) >> 2) | ((x & 0x33333333u) << 2);
  return ((x & 0xaaaaaaaau) >> 1) | ((x & 0x55555555u) << 1);
}
static inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>((static_cast<unsigned long long>(a) * b) >> 32);
}
static inline int __mulhi(int a, int b) {
  return static_cast<int>((static_cast<long long>(a) * b) >> 32);
}
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
}
static inline int __mul24(int a, int b) { return a * b; }
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned s) {
  const unsigned long long both = (static_cast<unsigned long long>(y) << 32) | x;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i)
    out |= static_cast<unsigned>((both >> (8 * ((s >> (4 * i)) & 7u))) & 0xffu) << (8 * i);
  return out;
}
static inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  shift &= 31u;
  return shift == 0 ? high : (high << shift) | (low >> (32u - shift));
}
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  shift &= 31u;
  return shift == 0 ? low : (low >> shift) | (high << (32u - shift));
}
template <class T>
static inline T __ldg(const T* p) {
  return *p;
}
template <class T>
static inline T __ldcs(const T* p) {
  return *p;
}
template <class T>
static inline T __ldcg(const T* p) {
  return *p;
}

#define SOFTCUDA_MINMAX(type)                                      \
  static inline type min(type a, type b) { return b < a ? b : a; } \
  static inline type max(type a, type b) { return a < b ? b : a; }
SOFTCUDA_MINMAX(int)
SOFTCUDA_MINMAX(unsigned int)
SOFTCUDA_MINMAX(long)
SOFTCUDA_MINMAX(unsigned long)
SOFTCUDA_MINMAX(long long)
SOFTCUDA_MINMAX(unsigned long long)
#undef SOFTCUDA_MINMAX
static inline unsigned min(int a, unsigned b) { return min(static_cast<unsigned>(a), b); }
static inline unsigned min(unsigned a, int b) { return min(a, static_cast<unsigned>(b)); }
static inline unsigned max(int a, unsigned b) { return max(static_cast<unsigned>(a), b); }
static inline unsigned max(unsigned a, int b) { return max(a, static_cast<unsigned>(b)); }
// If one operand is NaN the result is the other one, as with fminf and fmaxf.
static inline float min(float a, float b) { return fminf(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }
static inline double min(double a, double b) { return fmin(a, b); }
static inline double max(double a, double b) { return fmax(a, b); }
