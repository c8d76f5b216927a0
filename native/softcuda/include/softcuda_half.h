// 16-bit floating-point types. Arithmetic is done in fp32 and rounded once to the 16-bit format.
// With p bits of precision in the 16-bit format, fp32 has at least 2p + 2 bits, so +, -, *, / and
// sqrt are rounded correctly. For a fused multiply-add this is not enough; its intermediate result
// is rounded to odd instead.
#pragma once

static inline float softcuda_half_to_float(unsigned short bits) {
  const unsigned sign = static_cast<unsigned>(bits & 0x8000u) << 16;
  const unsigned magnitude = bits & 0x7fffu;
  const unsigned exponent = magnitude & 0x7c00u;
  const unsigned normal = (magnitude << 13) + 0x38000000u;
  const unsigned special = (magnitude << 13) | 0x7f800000u;
  // Subnormal halves are normal floats, so the product is exact, and flushing denormals does not
  // affect it.
  const unsigned small =
      __float_as_uint(static_cast<float>(static_cast<int>(magnitude)) * 5.9604644775390625e-08f);
  const unsigned finite = exponent == 0 ? small : normal;
  return __uint_as_float((exponent == 0x7c00u ? special : finite) | sign);
}

static inline unsigned short softcuda_float_to_half(float f) {
  const unsigned bits = __float_as_uint(f);
  const unsigned sign = (bits >> 16) & 0x8000u;
  const unsigned magnitude = bits & 0x7fffffffu;
  unsigned half;
  if (magnitude > 0x7f800000u) {
    half = 0x7fffu;  // as on a GPU, which converts every NaN to 0x7fff
  } else if (magnitude >= 0x477ff000u) {
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {
    // Adding 0.5 aligns the mantissa with the last bit of a subnormal half. The processor rounds
    // the sum to nearest even.
    half = __float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
  }
  return static_cast<unsigned short>(half | sign);
}

static inline float softcuda_bfloat_to_float(unsigned short bits) {
  return __uint_as_float(static_cast<unsigned>(bits) << 16);
}

static inline unsigned short softcuda_float_to_bfloat(float f) {
  const unsigned bits = __float_as_uint(f);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
  return static_cast<unsigned short>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Rounds to odd. `value` is a rounded result, and `lost` is its rounding error. If `lost` is not 0
// and the last bit of `value` is 0, the function returns the neighbour of `value` in the direction
// of the exact result. Rounding this neighbour again, to at most 22 bits, gives the same value as
// rounding the exact result once (Boldo and Melquiond, 2008).
static inline double softcuda_to_odd(double value, double lost) {
  long long bits = __double_as_longlong(value);
  if (lost == 0.0 || (bits & 1) != 0) return value;
  bits += (lost > 0.0) == (value > 0.0) ? 1 : -1;
  return __longlong_as_double(bits);
}
// Converts a double to a float, rounded to odd (see softcuda_to_odd).
static inline float softcuda_odd_float(double value) {
  const float f = static_cast<float>(value);
  if (!isfinite(f) || static_cast<double>(f) == value) return f;
  unsigned bits = __float_as_uint(f);
  if ((bits & 1u) == 0) {
    const bool grow = (value > f) == (f > 0.0f);
    bits += grow ? 1u : 0xffffffffu;
  }
  return __uint_as_float(bits);
}
// Returns a * b + c as a float that rounds correctly to either 16-bit format. The operands have at
// most 11 significant bits, so their product is exact in double.
static inline float softcuda_fma16(float a, float b, float c) {
  const double p = static_cast<double>(a) * b;
  const double s = p + c;
  const double part = s - p;
  const double lost = (p - (s - part)) + (c - part);
  if (!(lost == lost) || s - s != 0.0) return static_cast<float>(s);  // inf or NaN
  if (s == 0.0) return static_cast<float>(s);
  return softcuda_odd_float(softcuda_to_odd(s, lost));
}

// Defines a 16-bit type and its vector of two elements, with the operators and intrinsics of CUDA's
// headers.
#define SOFTCUDA_16BIT(type, pair, to_float, to_bits)                                         \
  struct type {                                                                               \
    unsigned short bits;                                                                      \
    type() = default;                                                                         \
    type(float f) : bits(to_bits(f)) {}                                                       \
    type(double f) : bits(to_bits(softcuda_odd_float(f))) {}                                  \
    type(int i) : bits(to_bits(softcuda_odd_float(static_cast<double>(i)))) {}                \
    type(unsigned i) : bits(to_bits(softcuda_odd_float(static_cast<double>(i)))) {}           \
    operator float() const { return to_float(bits); }                                         \
    type& operator+=(type o) { return *this = type(to_float(bits) + to_float(o.bits)); }      \
    type& operator-=(type o) { return *this = type(to_float(bits) - to_float(o.bits)); }      \
    type& operator*=(type o) { return *this = type(to_float(bits) * to_float(o.bits)); }      \
    type& operator/=(type o) { return *this = type(to_float(bits) / to_float(o.bits)); }      \
  };                                                                                          \
  struct __attribute__((may_alias, aligned(4))) pair {                                        \
    type x, y;                                                                                \
  };                                                                                          \
  static inline type operator+(type a, type b) { return type((float)a + (float)b); }          \
  static inline type operator-(type a, type b) { return type((float)a - (float)b); }          \
  static inline type operator*(type a, type b) { return type((float)a * (float)b); }          \
  static inline type operator/(type a, type b) { return type((float)a / (float)b); }          \
  static inline type operator-(type a) {                                                      \
    type r = a;                                                                               \
    r.bits ^= 0x8000u;                                                                        \
    return r;                                                                                 \
  }                                                                                           \
  static inline bool operator==(type a, type b) { return (float)a == (float)b; }              \
  static inline bool operator!=(type a, type b) { return (float)a != (float)b; }              \
  static inline bool operator<(type a, type b) { return (float)a < (float)b; }                \
  static inline bool operator<=(type a, type b) { return (float)a <= (float)b; }              \
  static inline bool operator>(type a, type b) { return (float)a > (float)b; }                \
  static inline bool operator>=(type a, type b) { return (float)a >= (float)b; }              \
  static inline type __hadd(type a, type b) { return a + b; }                                 \
  static inline type __hsub(type a, type b) { return a - b; }                                 \
  static inline type __hmul(type a, type b) { return a * b; }                                 \
  static inline type __hdiv(type a, type b) { return a / b; }                                 \
  static inline type __hneg(type a) { return -a; }                                            \
  static inline type __habs(type a) {                                                         \
    a.bits &= 0x7fffu;                                                                        \
    return a;                                                                                 \
  }                                                                                           \
  static inline type __hfma(type a, type b, type c) { return type(softcuda_fma16(a, b, c)); } \
  static inline bool __heq(type a, type b) { return a == b; }                                 \
  static inline bool __hne(type a, type b) { return a != b; }                                 \
  static inline bool __hlt(type a, type b) { return a < b; }                                  \
  static inline bool __hle(type a, type b) { return a <= b; }                                 \
  static inline bool __hgt(type a, type b) { return a > b; }                                  \
  static inline bool __hge(type a, type b) { return a >= b; }                                 \
  static inline bool __hisnan(type a) { return isnan((float)a); }                             \
  static inline type __hmax(type a, type b) { return type(fmaxf(a, b)); }                     \
  static inline type __hmin(type a, type b) { return type(fminf(a, b)); }                     \
  static inline type hsqrt(type a) { return type(sqrtf(a)); }                                 \
  static inline pair operator+(pair a, pair b) { return pair{a.x + b.x, a.y + b.y}; }         \
  static inline pair operator-(pair a, pair b) { return pair{a.x - b.x, a.y - b.y}; }         \
  static inline pair operator*(pair a, pair b) { return pair{a.x * b.x, a.y * b.y}; }         \
  static inline pair __hadd2(pair a, pair b) { return a + b; }                                \
  static inline pair __hsub2(pair a, pair b) { return a - b; }                                \
  static inline pair __hmul2(pair a, pair b) { return a * b; }                                \
  static inline pair __hfma2(pair a, pair b, pair c) {                                        \
    return pair{__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};                                \
  }
