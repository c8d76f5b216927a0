// Integer arithmetic and logic.
#include "lanes.h"

namespace softcuda {
namespace ptx {
namespace {

template <class T>
using Unsigned = std::make_unsigned_t<T>;
template <class T>
constexpr unsigned kBits = sizeof(T) * 8;

// ---- handlers with one, two and three operands of one type ------------------------------------
template <class T, class Op>
const Instr* unary(Warp& w, const Instr* in) {
  const T* a = src_lanes<T>(w, in->op[1]);
  store_lanes<T>(w, in->op[0], [=](unsigned i) { return Op::apply(a[i]); });
  return in + 1;
}
template <class T, class Op>
const Instr* binary(Warp& w, const Instr* in) {
  const T* a = src_lanes<T>(w, in->op[1]);
  const T* b = src_lanes<T>(w, in->op[2]);
  store_lanes<T>(w, in->op[0], [=](unsigned i) { return Op::apply(a[i], b[i]); });
  return in + 1;
}
template <class T, class Op>
const Instr* ternary(Warp& w, const Instr* in) {
  const T* a = src_lanes<T>(w, in->op[1]);
  const T* b = src_lanes<T>(w, in->op[2]);
  const T* c = src_lanes<T>(w, in->op[3]);
  store_lanes<T>(w, in->op[0], [=](unsigned i) { return Op::apply(a[i], b[i], c[i]); });
  return in + 1;
}

// Defines an operation of two operands. It computes with unsigned types, whose results wrap around;
// overflow of signed types is undefined in C++.
#define SC_BINARY(Name, expression)           \
  struct Name {                               \
    template <class T>                        \
    static inline T apply(T a, T b) {         \
      using U [[maybe_unused]] = Unsigned<T>; \
      return static_cast<T>(expression);      \
    }                                         \
  };
SC_BINARY(Add, static_cast<U>(a) + static_cast<U>(b))
SC_BINARY(Sub, static_cast<U>(a) - static_cast<U>(b))
SC_BINARY(And, a& b)
SC_BINARY(Or, a | b)
SC_BINARY(Xor, a ^ b)
SC_BINARY(Min, a < b ? a : b)
SC_BINARY(Max, a < b ? b : a)
#undef SC_BINARY

// C++ promotes uint16_t to int, whose product may overflow, so the product is computed in uint32_t.
template <class T>
inline T multiply(T a, T b) {
  using Wide = std::conditional_t<(sizeof(T) < 4), uint32_t, Unsigned<T>>;
  return static_cast<T>(static_cast<Wide>(a) * static_cast<Wide>(b));
}
struct Mul {
  template <class T>
  static inline T apply(T a, T b) {
    return multiply(a, b);
  }
};
struct MadLo {
  template <class T>
  static inline T apply(T a, T b, T c) {
    return static_cast<T>(static_cast<Unsigned<T>>(multiply(a, b)) + static_cast<Unsigned<T>>(c));
  }
};

// Division. As on a GPU, the quotient of a division by zero has all bits set. INT_MIN / -1, which
// is undefined in C++, is INT_MIN.
struct Div {
  template <class T>
  static inline T apply(T a, T b) {
    if (b == 0) return static_cast<T>(-1);
    if (std::is_signed<T>::value && b == static_cast<T>(-1)) {
      return static_cast<T>(Unsigned<T>{0} - static_cast<Unsigned<T>>(a));
    }
    return static_cast<T>(a / b);
  }
};
struct Rem {
  template <class T>
  static inline T apply(T a, T b) {
    if (b == 0) return a;
    if (std::is_signed<T>::value && b == static_cast<T>(-1)) return 0;
    return static_cast<T>(a % b);
  }
};

struct AddSat {
  static inline int32_t apply(int32_t a, int32_t b) {
    const int64_t r = int64_t{a} + b;
    return static_cast<int32_t>(r < INT32_MIN ? INT32_MIN : r > INT32_MAX ? INT32_MAX : r);
  }
};
struct SubSat {
  static inline int32_t apply(int32_t a, int32_t b) {
    const int64_t r = int64_t{a} - b;
    return static_cast<int32_t>(r < INT32_MIN ? INT32_MIN : r > INT32_MAX ? INT32_MAX : r);
  }
};

// An integer type with twice as many bits, for the high halves of products.
template <class T>
struct Wider;
template <>
struct Wider<uint16_t> {
  using type = uint32_t;
};
template <>
struct Wider<int16_t> {
  using type = int32_t;
};
template <>
struct Wider<uint32_t> {
  using type = uint64_t;
};
template <>
struct Wider<int32_t> {
  using type = int64_t;
};
__extension__ typedef __int128 Int128;
__extension__ typedef unsigned __int128 UInt128;
template <>
struct Wider<uint64_t> {
  using type = UInt128;
};
template <>
struct Wider<int64_t> {
  using type = Int128;
};
template <class T>
inline T multiply_high(T a, T b) {
  using W = typename Wider<T>::type;
  return static_cast<T>(static_cast<W>(a) * static_cast<W>(b) >> kBits<T>);
}
struct MulHi {
  template <class T>
  static inline T apply(T a, T b) {
    return multiply_high(a, b);
  }
};
struct MadHi {
  template <class T>
  static inline T apply(T a, T b, T c) {
    return static_cast<T>(static_cast<Unsigned<T>>(multiply_high(a, b)) +
                          static_cast<Unsigned<T>>(c));
  }
};
struct MadHiSat {
  static inline int32_t apply(int32_t a, int32_t b, int32_t c) {
    return AddSat::apply(multiply_high(a, b), c);
  }
};
template <class T>
inline T low24(T a) {
  return static_cast<T>(static_cast<T>(static_cast<Unsigned<T>>(a) << 8) >> 8);
}
struct Mul24Lo {
  template <class T>
  static inline T apply(T a, T b) {
    return multiply(low24(a), low24(b));
  }
};
struct Mul24Hi {
  template <class T>
  static inline T apply(T a, T b) {
    using W = typename Wider<T>::type;
    return static_cast<T>(static_cast<W>(low24(a)) * low24(b) >> 16);
  }
};
struct Mad24Lo {
  template <class T>
  static inline T apply(T a, T b, T c) {
    return static_cast<T>(static_cast<Unsigned<T>>(Mul24Lo::apply(a, b)) +
                          static_cast<Unsigned<T>>(c));
  }
};
struct Mad24Hi {
  template <class T>
  static inline T apply(T a, T b, T c) {
    return static_cast<T>(static_cast<Unsigned<T>>(Mul24Hi::apply(a, b)) +
                          static_cast<Unsigned<T>>(c));
  }
};

// mul.wide: the product has twice the width of the operands.
template <class T>
const Instr* mul_wide(Warp& w, const Instr* in) {
  using W = typename Wider<T>::type;
  const T* a = src_lanes<T>(w, in->op[1]);
  const T* b = src_lanes<T>(w, in->op[2]);
  store_lanes<W>(w, in->op[0],
                 [=](unsigned i) { return static_cast<W>(a[i]) * static_cast<W>(b[i]); });
  return in + 1;
}
template <class T>
const Instr* mad_wide(Warp& w, const Instr* in) {
  using W = typename Wider<T>::type;
  using U = std::make_unsigned_t<W>;
  const T* a = src_lanes<T>(w, in->op[1]);
  const T* b = src_lanes<T>(w, in->op[2]);
  const W* c = src_lanes<W>(w, in->op[3]);
  store_lanes<W>(w, in->op[0], [=](unsigned i) {
    const W product = static_cast<W>(a[i]) * static_cast<W>(b[i]);
    return static_cast<W>(static_cast<U>(product) + static_cast<U>(c[i]));
  });
  return in + 1;
}

// Shifts. If the shift amount is at least the width of the type, the result is 0 or, for arithmetic
// right shifts, the sign.
template <class T>
const Instr* shift_left(Warp& w, const Instr* in) {
  const T* a = src_lanes<T>(w, in->op[1]);
  const uint32_t* b = src_lanes<uint32_t>(w, in->op[2]);
  store_lanes<T>(w, in->op[0], [=](unsigned i) {
    const T shifted = static_cast<T>(a[i] << (b[i] & (kBits<T> - 1)));
    return b[i] < kBits<T> ? shifted : T{0};
  });
  return in + 1;
}
template <class T>
const Instr* shift_right(Warp& w, const Instr* in) {
  const T* a = src_lanes<T>(w, in->op[1]);
  const uint32_t* b = src_lanes<uint32_t>(w, in->op[2]);
  store_lanes<T>(w, in->op[0], [=](unsigned i) {
    if (std::is_signed<T>::value) {
      const uint32_t n = b[i] < kBits<T> ? b[i] : kBits<T> - 1;
      return static_cast<T>(a[i] >> n);
    }
    const T shifted = static_cast<T>(a[i] >> (b[i] & (kBits<T> - 1)));
    return b[i] < kBits<T> ? shifted : T{0};
  });
  return in + 1;
}
// shf. `in->kind` is 1 for a right shift. `in->aux` is 1 if the shift amount wraps around,
// otherwise it is clamped.
const Instr* funnel_shift(Warp& w, const Instr* in) {
  const uint32_t* a = src_lanes<uint32_t>(w, in->op[1]);
  const uint32_t* b = src_lanes<uint32_t>(w, in->op[2]);
  const uint32_t* c = src_lanes<uint32_t>(w, in->op[3]);
  const bool right = in->kind != 0;
  const bool wrap = in->aux != 0;
  store_lanes<uint32_t>(w, in->op[0], [=](unsigned i) {
    const uint64_t both = uint64_t{b[i]} << 32 | a[i];
    const uint32_t n = wrap ? c[i] & 31 : c[i] < 32 ? c[i] : 32;
    return static_cast<uint32_t>(right ? both >> n : both << n >> 32);
  });
  return in + 1;
}

struct Not {
  template <class T>
  static inline T apply(T a) {
    return static_cast<T>(~a);
  }
};
struct Cnot {
  template <class T>
  static inline T apply(T a) {
    return a == 0 ? T{1} : T{0};
  }
};
struct Neg {
  template <class T>
  static inline T apply(T a) {
    return static_cast<T>(Unsigned<T>{0} - static_cast<Unsigned<T>>(a));
  }
};
struct Abs {
  template <class T>
  static inline T apply(T a) {
    return a < 0 ? Neg::apply(a) : a;
  }
};
struct Brev {
  template <class T>
  static inline T apply(T a) {
    T r = 0;
    for (unsigned k = 0; k < kBits<T>; ++k) r = static_cast<T>(r << 1 | (a >> k & 1));
    return r;
  }
};
struct MulAddSad {
  template <class T>
  static inline T apply(T a, T b, T c) {
    using U = Unsigned<T>;
    const U difference = a < b ? static_cast<U>(static_cast<U>(b) - static_cast<U>(a))
                               : static_cast<U>(static_cast<U>(a) - static_cast<U>(b));
    return static_cast<T>(static_cast<U>(c) + difference);
  }
};

template <class T>
const Instr* popc(Warp& w, const Instr* in) {
  const T* a = src_lanes<T>(w, in->op[1]);
  store_lanes<uint32_t>(
      w, in->op[0], [=](unsigned i) { return static_cast<uint32_t>(__builtin_popcountll(a[i])); });
  return in + 1;
}
template <class T>
const Instr* clz(Warp& w, const Instr* in) {
  const T* a = src_lanes<T>(w, in->op[1]);
  store_lanes<uint32_t>(w, in->op[0], [=](unsigned i) {
    if (a[i] == 0) return static_cast<uint32_t>(kBits<T>);
    return static_cast<uint32_t>(__builtin_clzll(a[i])) - (64 - kBits<T>);
  });
  return in + 1;
}
// bfind: position of the highest bit that differs from the sign. If `in->aux` is not 0, the result
// is the left shift that moves this bit to the highest position (.shiftamt).
template <class T>
const Instr* bfind(Warp& w, const Instr* in) {
  const T* a = src_lanes<T>(w, in->op[1]);
  const bool shift_amount = in->aux != 0;
  store_lanes<uint32_t>(w, in->op[0], [=](unsigned i) {
    Unsigned<T> u = static_cast<Unsigned<T>>(a[i]);
    if (std::is_signed<T>::value && a[i] < 0) u = static_cast<Unsigned<T>>(~u);
    if (u == 0) return 0xffffffffu;
    const uint32_t at = 63u - static_cast<uint32_t>(__builtin_clzll(u));
    return shift_amount ? kBits<T> - 1 - at : at;
  });
  return in + 1;
}
// fns: position of the n-th set bit from a base.
const Instr* fns(Warp& w, const Instr* in) {
  const uint32_t* mask = src_lanes<uint32_t>(w, in->op[1]);
  const uint32_t* base = src_lanes<uint32_t>(w, in->op[2]);
  const int32_t* offset = src_lanes<int32_t>(w, in->op[3]);
  store_lanes<uint32_t>(w, in->op[0], [=](unsigned i) {
    if (base[i] > 31) return 0xffffffffu;
    int32_t left = offset[i];
    if (left == 0) return (mask[i] >> base[i] & 1) != 0 ? base[i] : 0xffffffffu;
    const int32_t step = left > 0 ? 1 : -1;
    for (int32_t at = static_cast<int32_t>(base[i]); at >= 0 && at < 32; at += step) {
      if ((mask[i] >> at & 1) != 0 && (left -= step) == 0) return static_cast<uint32_t>(at);
    }
    return 0xffffffffu;
  });
  return in + 1;
}

template <class T>
const Instr* bfe(Warp& w, const Instr* in) {
  using U = Unsigned<T>;
  const T* a = src_lanes<T>(w, in->op[1]);
  const uint32_t* b = src_lanes<uint32_t>(w, in->op[2]);
  const uint32_t* c = src_lanes<uint32_t>(w, in->op[3]);
  store_lanes<T>(w, in->op[0], [=](unsigned i) {
    const unsigned at = b[i] & 255;
    const unsigned length = c[i] & 255;
    constexpr unsigned top = kBits<T> - 1;
    if (length == 0) return T{0};
    const unsigned sign_at = at + length - 1 < top ? at + length - 1 : top;
    const U u = static_cast<U>(a[i]);
    const bool sign = std::is_signed<T>::value && (u >> sign_at & 1) != 0;
    U r = at <= top ? static_cast<U>(u >> at) : U{0};
    const unsigned kept = at > top ? 0 : top + 1 - at < length ? top + 1 - at : length;
    const U field = kept >= kBits<T> ? static_cast<U>(~U{0}) : static_cast<U>((U{1} << kept) - 1);
    r &= field;
    if (sign) r |= static_cast<U>(~field);
    return static_cast<T>(r);
  });
  return in + 1;
}
template <class T>
const Instr* bfi(Warp& w, const Instr* in) {
  const T* a = src_lanes<T>(w, in->op[1]);
  const T* b = src_lanes<T>(w, in->op[2]);
  const uint32_t* c = src_lanes<uint32_t>(w, in->op[3]);
  const uint32_t* d = src_lanes<uint32_t>(w, in->op[4]);
  store_lanes<T>(w, in->op[0], [=](unsigned i) {
    const unsigned at = c[i] & 255;
    const unsigned length = d[i] & 255;
    const T ones = length >= kBits<T> ? static_cast<T>(~T{0})
                                      : static_cast<T>((T{1} << (length & (kBits<T> - 1))) - 1);
    const T field = at < kBits<T> ? static_cast<T>(ones << (at & (kBits<T> - 1))) : T{0};
    const T value = static_cast<T>(a[i] << (at & (kBits<T> - 1)));
    return static_cast<T>((b[i] & ~field) | (value & field));
  });
  return in + 1;
}
const Instr* bmsk(Warp& w, const Instr* in) {
  const uint32_t* a = src_lanes<uint32_t>(w, in->op[1]);
  const uint32_t* b = src_lanes<uint32_t>(w, in->op[2]);
  const bool wrap = in->aux != 0;
  store_lanes<uint32_t>(w, in->op[0], [=](unsigned i) {
    const uint32_t at = wrap ? a[i] & 31 : a[i];
    const uint32_t length = wrap ? b[i] & 31 : b[i];
    const uint64_t ones = length >= 32 ? 0xffffffffull : (uint64_t{1} << length) - 1;
    return at >= 32 ? 0u : static_cast<uint32_t>(ones << at);
  });
  return in + 1;
}
template <bool Signed>
const Instr* szext(Warp& w, const Instr* in) {
  const uint32_t* a = src_lanes<uint32_t>(w, in->op[1]);
  const uint32_t* b = src_lanes<uint32_t>(w, in->op[2]);
  const bool wrap = in->aux != 0;
  store_lanes<uint32_t>(w, in->op[0], [=](unsigned i) {
    const uint32_t n = wrap ? b[i] & 31 : b[i];
    if (n == 0) return 0u;
    if (n >= 32) return a[i];
    const uint32_t shifted = a[i] << (32 - n);
    return Signed ? static_cast<uint32_t>(static_cast<int32_t>(shifted) >> (32 - n))
                  : shifted >> (32 - n);
  });
  return in + 1;
}

const Instr* lop3(Warp& w, const Instr* in) {
  const uint32_t* a = src_lanes<uint32_t>(w, in->op[1]);
  const uint32_t* b = src_lanes<uint32_t>(w, in->op[2]);
  const uint32_t* c = src_lanes<uint32_t>(w, in->op[3]);
  // Bit k of the table is the result for the input bits a, b, c with 4 a + 2 b + c = k.
  uint32_t t[8];
  for (unsigned k = 0; k < 8; ++k) t[k] = (in->imm >> k & 1) != 0 ? kAllLanes : 0u;
  store_lanes<uint32_t>(w, in->op[0], [=](unsigned i) {
    const uint32_t x = a[i], y = b[i], z = c[i];
    return (~x & ~y & ~z & t[0]) | (~x & ~y & z & t[1]) | (~x & y & ~z & t[2]) |
           (~x & y & z & t[3]) | (x & ~y & ~z & t[4]) | (x & ~y & z & t[5]) | (x & y & ~z & t[6]) |
           (x & y & z & t[7]);
  });
  return in + 1;
}

// Computes prmt in one lane. `mode` is an index into the table below; 0 is the mode without a
// suffix.
inline uint32_t permute(uint32_t a, uint32_t b, uint32_t selector, unsigned mode) {
  constexpr uint32_t kSelectors[7][4] = {
      {0, 0, 0, 0},                      // general
      {0x3210, 0x4321, 0x5432, 0x6543},  // f4e
      {0x5670, 0x6701, 0x7012, 0x0123},  // b4e
      {0x0000, 0x1111, 0x2222, 0x3333},  // rc8
      {0x3210, 0x3211, 0x3222, 0x3333},  // ecl
      {0x0000, 0x1110, 0x2210, 0x3210},  // ecr
      {0x1010, 0x3232, 0x1010, 0x3232},  // rc16
  };
  if (mode != 0) selector = kSelectors[mode][selector & 3];
  const uint64_t both = uint64_t{b} << 32 | a;
  uint32_t r = 0;
  for (unsigned k = 0; k < 4; ++k) {
    const uint32_t s = selector >> (4 * k);
    uint32_t byte = static_cast<uint32_t>(both >> (8 * (s & 7))) & 255;
    if (mode == 0 && (s & 8) != 0) byte = (byte & 0x80) != 0 ? 255 : 0;
    r |= byte << (8 * k);
  }
  return r;
}
const Instr* prmt(Warp& w, const Instr* in) {
  const uint32_t* a = src_lanes<uint32_t>(w, in->op[1]);
  const uint32_t* b = src_lanes<uint32_t>(w, in->op[2]);
  const uint32_t* c = src_lanes<uint32_t>(w, in->op[3]);
  const unsigned mode = in->kind;
  store_lanes<uint32_t>(w, in->op[0], [=](unsigned i) { return permute(a[i], b[i], c[i], mode); });
  return in + 1;
}
// prmt with a constant selector that replicates no sign bits. `in->imm` is the selector.
const Instr* prmt_constant(Warp& w, const Instr* in) {
  const uint32_t* a = src_lanes<uint32_t>(w, in->op[1]);
  const uint32_t* b = src_lanes<uint32_t>(w, in->op[2]);
  const auto s = static_cast<uint32_t>(in->imm);
  const unsigned s0 = 8 * (s & 7), s1 = 8 * (s >> 4 & 7), s2 = 8 * (s >> 8 & 7),
                 s3 = 8 * (s >> 12 & 7);
  store_lanes<uint32_t>(w, in->op[0], [=](unsigned i) {
    const uint64_t both = uint64_t{b[i]} << 32 | a[i];
    return static_cast<uint32_t>((both >> s0 & 255) | (both >> s1 & 255) << 8 |
                                 (both >> s2 & 255) << 16 | (both >> s3 & 255) << 24);
  });
  return in + 1;
}

// dp4a and dp2a. Bits of `kind`: bit 0 is set if a is signed, bit 1 if b is signed, and bit 2 if
// the upper half of b is used (dp2a.hi).
inline uint32_t byte_product(uint32_t a, uint32_t b, unsigned kind) {
  const auto x = (kind & 1) != 0 ? static_cast<int32_t>(static_cast<int8_t>(a))
                                 : static_cast<int32_t>(a & 255);
  const auto y = (kind & 2) != 0 ? static_cast<int32_t>(static_cast<int8_t>(b))
                                 : static_cast<int32_t>(b & 255);
  return static_cast<uint32_t>(x * y);
}
const Instr* dp4a(Warp& w, const Instr* in) {
  const uint32_t* a = src_lanes<uint32_t>(w, in->op[1]);
  const uint32_t* b = src_lanes<uint32_t>(w, in->op[2]);
  const uint32_t* c = src_lanes<uint32_t>(w, in->op[3]);
  const unsigned kind = in->kind;
  store_lanes<uint32_t>(w, in->op[0], [=](unsigned i) {
    uint32_t sum = c[i];
    for (unsigned k = 0; k < 4; ++k) sum += byte_product(a[i] >> (8 * k), b[i] >> (8 * k), kind);
    return sum;
  });
  return in + 1;
}
const Instr* dp2a(Warp& w, const Instr* in) {
  const uint32_t* a = src_lanes<uint32_t>(w, in->op[1]);
  const uint32_t* b = src_lanes<uint32_t>(w, in->op[2]);
  const uint32_t* c = src_lanes<uint32_t>(w, in->op[3]);
  const unsigned kind = in->kind;
  store_lanes<uint32_t>(w, in->op[0], [=](unsigned i) {
    uint32_t sum = c[i];
    for (unsigned k = 0; k < 2; ++k) {
      const uint32_t half = a[i] >> (16 * k) & 0xffff;
      const uint32_t byte = b[i] >> (8 * k + ((kind & 4) != 0 ? 16 : 0));
      const int32_t x = (kind & 1) != 0 ? static_cast<int16_t>(half) : static_cast<int32_t>(half);
      const int32_t y =
          (kind & 2) != 0 ? static_cast<int8_t>(byte) : static_cast<int32_t>(byte & 255);
      sum += static_cast<uint32_t>(x * y);
    }
    return sum;
  });
  return in + 1;
}

// Additions with carry. The carry flag of each lane is a bit of the predicate at in->op[4].
template <class T, bool Subtract>
const Instr* add_carry(Warp& w, const Instr* in) {
  const T* a = src_lanes<T>(w, in->op[1]);
  const T* b = src_lanes<T>(w, in->op[2]);
  const uint32_t carry_in = (in->aux & 1) != 0 ? pred_of(w, in->op[4]) : 0u;
  alignas(64) T r[kLanes];
  uint32_t carry = 0;
  for (unsigned i = 0; i < kLanes; ++i) {
    const T c = carry_in >> i & 1;
    T partial = 0;
    bool over = false;
    if (Subtract) {
      over = __builtin_sub_overflow(a[i], b[i], &partial);
      over = __builtin_sub_overflow(partial, c, &r[i]) || over;
    } else {
      over = __builtin_add_overflow(a[i], b[i], &partial);
      over = __builtin_add_overflow(partial, c, &r[i]) || over;
    }
    carry |= over ? uint32_t{1} << i : 0u;
  }
  store_lanes<T>(w, in->op[0], [&](unsigned i) { return r[i]; });
  if ((in->aux & 2) != 0) set_pred(w, in->op[4], carry);
  return in + 1;
}
// mad with carry. `in->kind` is 1 for the high half of the product. The addition sets the carry
// flag, not the multiplication.
template <class T>
const Instr* mad_carry(Warp& w, const Instr* in) {
  const T* a = src_lanes<T>(w, in->op[1]);
  const T* b = src_lanes<T>(w, in->op[2]);
  const T* c = src_lanes<T>(w, in->op[3]);
  const uint32_t carry_in = (in->aux & 1) != 0 ? pred_of(w, in->op[4]) : 0u;
  alignas(64) T r[kLanes];
  uint32_t carry = 0;
  for (unsigned i = 0; i < kLanes; ++i) {
    const T product = in->kind != 0 ? multiply_high(a[i], b[i]) : multiply(a[i], b[i]);
    T partial = 0;
    bool over = __builtin_add_overflow(product, c[i], &partial);
    over = __builtin_add_overflow(partial, static_cast<T>(carry_in >> i & 1), &r[i]) || over;
    carry |= over ? uint32_t{1} << i : 0u;
  }
  store_lanes<T>(w, in->op[0], [&](unsigned i) { return r[i]; });
  if ((in->aux & 2) != 0) set_pred(w, in->op[4], carry);
  return in + 1;
}

// ---- predicates ---------------------------------------------------------------------------------
// Logic of predicates. `in->kind` is the operation: 0 and, 1 or, 2 xor, 3 not, 4 mov.
const Instr* logic_pred(Warp& w, const Instr* in) {
  const uint32_t a = pred_of(w, in->op[1]);
  switch (in->kind) {
    case 0:
      set_pred(w, in->op[0], a & pred_of(w, in->op[2]));
      break;
    case 1:
      set_pred(w, in->op[0], a | pred_of(w, in->op[2]));
      break;
    case 2:
      set_pred(w, in->op[0], a ^ pred_of(w, in->op[2]));
      break;
    case 3:
      set_pred(w, in->op[0], ~a);
      break;
    default:
      set_pred(w, in->op[0], a);
      break;
  }
  return in + 1;
}

// ---- tables -------------------------------------------------------------------------------------
// Selects the instantiation of a handler for an integer type. The types .b16, .b32 and .b64 count
// as unsigned.
#define SC_BY_INTEGER(type, template_of) \
  switch (type) {                        \
    case Type::b16:                      \
    case Type::u16:                      \
      in.run = template_of(uint16_t);    \
      break;                             \
    case Type::s16:                      \
      in.run = template_of(int16_t);     \
      break;                             \
    case Type::b32:                      \
    case Type::u32:                      \
      in.run = template_of(uint32_t);    \
      break;                             \
    case Type::s32:                      \
      in.run = template_of(int32_t);     \
      break;                             \
    case Type::b64:                      \
    case Type::u64:                      \
      in.run = template_of(uint64_t);    \
      break;                             \
    case Type::s64:                      \
      in.run = template_of(int64_t);     \
      break;                             \
    default:                             \
      return false;                      \
  }

bool is_integer(Type type) {
  switch (type) {
    case Type::b16:
    case Type::u16:
    case Type::s16:
    case Type::b32:
    case Type::u32:
    case Type::s32:
    case Type::b64:
    case Type::u64:
    case Type::s64:
      return true;
    default:
      return false;
  }
}

// Decodes the operands of an instruction whose destination and `count` sources have the same type.
void same_type(Builder& b, Instr& in, Type type, unsigned count) {
  in.op[0] = b.dst(b.operand(0), size_of(type));
  for (unsigned k = 1; k <= count; ++k) in.op[k] = b.src(b.operand(k), type);
}

bool decode_carry(Builder& b, Opcode& op, Instr& in, Type type) {
  const bool out = op.take("cc");
  const bool in_carry = op.base == "addc" || op.base == "subc" || op.base == "madc";
  if (!out && !in_carry) return false;
  // The carry flag is a predicate register of the kernel.
  in.op[4] = b.carry_flag();
  in.aux = (in_carry ? 1u : 0u) | (out ? 2u : 0u);
  const bool wide = size_of(type) == 8;
  if (op.base == "mad" || op.base == "madc") {
    if (op.take("hi")) {
      in.kind = 1;
    } else if (!op.take("lo")) {
      return false;
    }
    same_type(b, in, type, 3);
    const bool is_signed = type == Type::s32 || type == Type::s64;
    if (is_signed && in.kind == 1) unsupported(op.line, op.text());
    in.run = wide ? mad_carry<uint64_t> : mad_carry<uint32_t>;
    return true;
  }
  same_type(b, in, type, 2);
  const bool subtract = op.base == "sub" || op.base == "subc";
  if (subtract) {
    in.run = wide ? add_carry<uint64_t, true> : add_carry<uint32_t, true>;
  } else {
    in.run = wide ? add_carry<uint64_t, false> : add_carry<uint32_t, false>;
  }
  return true;
}

bool decode_products(Builder& b, Opcode& op, Instr& in, Type type) {
  const bool mad = op.base == "mad";
  const unsigned sources = mad ? 3 : 2;
  if (op.take("wide")) {
    const unsigned wide_bytes = 2 * size_of(type);
    in.op[0] = b.dst(b.operand(0), wide_bytes);
    in.op[1] = b.src(b.operand(1), type);
    in.op[2] = b.src(b.operand(2), type);
    if (mad) in.op[3] = b.src(b.operand(3), wide_bytes == 4 ? Type::u32 : Type::u64);
    switch (type) {
      case Type::u16:
        in.run = mad ? mad_wide<uint16_t> : mul_wide<uint16_t>;
        break;
      case Type::s16:
        in.run = mad ? mad_wide<int16_t> : mul_wide<int16_t>;
        break;
      case Type::u32:
        in.run = mad ? mad_wide<uint32_t> : mul_wide<uint32_t>;
        break;
      case Type::s32:
        in.run = mad ? mad_wide<int32_t> : mul_wide<int32_t>;
        break;
      default:
        return false;
    }
    return true;
  }
  const bool high = op.take("hi");
  if (!high) op.take("lo");
  same_type(b, in, type, sources);
  if (mad && high && op.take("sat")) {
    in.run = ternary<int32_t, MadHiSat>;
    return type == Type::s32;
  }
#define SC_MUL(T) (high ? static_cast<Handler>(binary<T, MulHi>) : binary<T, Mul>)
#define SC_MAD(T) (high ? static_cast<Handler>(ternary<T, MadHi>) : ternary<T, MadLo>)
  if (mad) {
    SC_BY_INTEGER(type, SC_MAD)
  } else {
    SC_BY_INTEGER(type, SC_MUL)
  }
  return true;
}

bool decode_24(Builder& b, Opcode& op, Instr& in, Type type) {
  const bool mad = op.base == "mad24";
  const bool high = op.take("hi");
  if (!high) op.take("lo");
  if (type != Type::u32 && type != Type::s32) return false;
  same_type(b, in, type, mad ? 3 : 2);
  const bool is_signed = type == Type::s32;
  if (mad) {
    in.run = high ? (is_signed ? ternary<int32_t, Mad24Hi> : ternary<uint32_t, Mad24Hi>)
                  : (is_signed ? ternary<int32_t, Mad24Lo> : ternary<uint32_t, Mad24Lo>);
  } else {
    in.run = high ? (is_signed ? binary<int32_t, Mul24Hi> : binary<uint32_t, Mul24Hi>)
                  : (is_signed ? binary<int32_t, Mul24Lo> : binary<uint32_t, Mul24Lo>);
  }
  return true;
}

bool decode_shift(Builder& b, Opcode& op, Instr& in, Type type) {
  in.op[0] = b.dst(b.operand(0), size_of(type));
  in.op[1] = b.src(b.operand(1), type);
  in.op[2] = b.src(b.operand(2), Type::u32);
#define SC_SHIFT_LEFT(T) shift_left<Unsigned<T>>
#define SC_SHIFT_RIGHT(T) shift_right<T>
  if (op.base == "shl") {
    SC_BY_INTEGER(type, SC_SHIFT_LEFT)
  } else {
    SC_BY_INTEGER(type, SC_SHIFT_RIGHT)
  }
  return true;
}

bool decode_bits(Builder& b, Opcode& op, Instr& in, Type type) {
  const bool wide = size_of(type) == 8;
  if (op.base == "popc" || op.base == "clz") {
    in.op[0] = b.dst(b.operand(0), 4);
    in.op[1] = b.src(b.operand(1), type);
    if (op.base == "popc") {
      in.run = wide ? popc<uint64_t> : popc<uint32_t>;
    } else {
      in.run = wide ? clz<uint64_t> : clz<uint32_t>;
    }
    return true;
  }
  if (op.base == "bfind") {
    in.aux = op.take("shiftamt");
    in.op[0] = b.dst(b.operand(0), 4);
    in.op[1] = b.src(b.operand(1), type);
    const bool is_signed = type == Type::s32 || type == Type::s64;
    in.run = is_signed ? (wide ? bfind<int64_t> : bfind<int32_t>)
                       : (wide ? bfind<uint64_t> : bfind<uint32_t>);
    return true;
  }
  if (op.base == "bfe") {
    in.op[0] = b.dst(b.operand(0), size_of(type));
    in.op[1] = b.src(b.operand(1), type);
    in.op[2] = b.src(b.operand(2), Type::u32);
    in.op[3] = b.src(b.operand(3), Type::u32);
    const bool is_signed = type == Type::s32 || type == Type::s64;
    in.run =
        is_signed ? (wide ? bfe<int64_t> : bfe<int32_t>) : (wide ? bfe<uint64_t> : bfe<uint32_t>);
    return true;
  }
  // The instruction is bfi.
  same_type(b, in, type, 2);
  in.op[3] = b.src(b.operand(3), Type::u32);
  in.op[4] = b.src(b.operand(4), Type::u32);
  in.run = wide ? bfi<uint64_t> : bfi<uint32_t>;
  return true;
}

bool decode_prmt(Builder& b, Opcode& op, Instr& in) {
  if (op.take_type() != Type::b32) return false;
  constexpr const char* kModes[] = {"", "f4e", "b4e", "rc8", "ecl", "ecr", "rc16"};
  for (uint16_t mode = 1; mode < 7; ++mode) {
    if (op.take(kModes[mode])) in.kind = mode;
  }
  same_type(b, in, Type::b32, 3);
  in.run = prmt;
  const Operand& selector = b.operand(3);
  if (selector.kind == Operand::integer && in.kind == 0 && (selector.bits & 0x8888) == 0) {
    in.imm = static_cast<int64_t>(selector.bits);
    in.run = prmt_constant;
  }
  return true;
}

bool decode_dot(Builder& b, Opcode& op, Instr& in) {
  const Type a = op.take_type();
  const Type second = op.take_type();
  if (a == Type::none || second == Type::none) return false;
  in.kind = static_cast<uint16_t>((a == Type::s32 ? 1 : 0) | (second == Type::s32 ? 2 : 0));
  in.run = dp4a;
  if (op.base == "dp2a") {
    in.run = dp2a;
    if (op.take("hi")) in.kind |= 4;
    op.take("lo");
  }
  same_type(b, in, Type::b32, 3);
  return true;
}

bool decode_predicates(Builder& b, Opcode& op, Instr& in) {
  constexpr const char* kNames[] = {"and", "or", "xor", "not", "mov"};
  for (uint16_t kind = 0; kind < 5; ++kind) {
    if (op.base != kNames[kind]) continue;
    op.take("pred");
    in.kind = kind;
    in.op[0] = b.pred_dst(b.operand(0));
    in.op[1] = b.pred_src(b.operand(1));
    if (kind < 3) in.op[2] = b.pred_src(b.operand(2));
    in.run = logic_pred;
    return true;
  }
  return false;
}

bool decode_simple(Builder& b, Opcode& op, Instr& in, Type type) {
#define SC_BINARY_CASE(mnemonic, Op)    \
  if (op.base == mnemonic) {            \
    same_type(b, in, type, 2);          \
    SC_BY_INTEGER(type, SC_BINARY_##Op) \
    return true;                        \
  }
#define SC_BINARY_Add(T) binary<T, Add>
#define SC_BINARY_Sub(T) binary<T, Sub>
#define SC_BINARY_Div(T) binary<T, Div>
#define SC_BINARY_Rem(T) binary<T, Rem>
#define SC_BINARY_Min(T) binary<T, Min>
#define SC_BINARY_Max(T) binary<T, Max>
#define SC_BINARY_And(T) binary<T, And>
#define SC_BINARY_Or(T) binary<T, Or>
#define SC_BINARY_Xor(T) binary<T, Xor>
  SC_BINARY_CASE("add", Add)
  SC_BINARY_CASE("sub", Sub)
  SC_BINARY_CASE("div", Div)
  SC_BINARY_CASE("rem", Rem)
  SC_BINARY_CASE("min", Min)
  SC_BINARY_CASE("max", Max)
  SC_BINARY_CASE("and", And)
  SC_BINARY_CASE("or", Or)
  SC_BINARY_CASE("xor", Xor)
  if (op.base == "sad") {
    same_type(b, in, type, 3);
#define SC_SAD(T) ternary<T, MulAddSad>
    SC_BY_INTEGER(type, SC_SAD)
    return true;
  }
#define SC_UNARY_CASE(mnemonic, Op)    \
  if (op.base == mnemonic) {           \
    same_type(b, in, type, 1);         \
    SC_BY_INTEGER(type, SC_UNARY_##Op) \
    return true;                       \
  }
#define SC_UNARY_Not(T) unary<Unsigned<T>, Not>
#define SC_UNARY_Cnot(T) unary<Unsigned<T>, Cnot>
#define SC_UNARY_Neg(T) unary<T, Neg>
#define SC_UNARY_Abs(T) unary<std::make_signed_t<T>, Abs>
#define SC_UNARY_Brev(T) unary<Unsigned<T>, Brev>
  SC_UNARY_CASE("not", Not)
  SC_UNARY_CASE("cnot", Cnot)
  SC_UNARY_CASE("neg", Neg)
  SC_UNARY_CASE("abs", Abs)
  SC_UNARY_CASE("brev", Brev)
  return false;
}

bool known(const std::string& base, std::initializer_list<const char*> names) {
  for (const char* name : names) {
    if (base == name) return true;
  }
  return false;
}

}  // namespace

bool decode_integer(Builder& b, Opcode& op, Instr& in) {
  if (op.base == "prmt") return decode_prmt(b, op, in);
  if (op.base == "dp4a" || op.base == "dp2a") return decode_dot(b, op, in);
  if (op.base == "lop3") {
    if (op.has("BoolOp") || op.take_type() != Type::b32) return false;
    same_type(b, in, Type::b32, 3);
    in.imm = static_cast<int64_t>(b.integer(b.operand(4)));
    in.run = lop3;
    return true;
  }
  if (op.base == "shf") {
    in.kind = op.take("r");
    if (in.kind == 0 && !op.take("l")) return false;
    in.aux = op.take("wrap");
    if (in.aux == 0) op.take("clamp");
    op.take_type();
    same_type(b, in, Type::b32, 3);
    in.run = funnel_shift;
    return true;
  }
  if (op.base == "fns") {
    op.take_type();
    same_type(b, in, Type::b32, 3);
    in.run = fns;
    return true;
  }
  if (op.base == "bmsk" || op.base == "szext") {
    in.aux = op.take("wrap");
    if (in.aux == 0) op.take("clamp");
    const Type type = op.take_type();
    same_type(b, in, Type::b32, 2);
    in.run = op.base == "bmsk" ? bmsk : type == Type::s32 ? szext<true> : szext<false>;
    return true;
  }
  if (known(op.base, {"and", "or", "xor", "not", "mov"}) && op.has("pred")) {
    return decode_predicates(b, op, in);
  }
  if (!known(op.base,
             {"add",  "sub", "addc", "subc", "mul", "mad",   "madc", "mul24", "mad24", "div",
              "rem",  "min", "max",  "and",  "or",  "xor",   "not",  "cnot",  "neg",   "abs",
              "brev", "shl", "shr",  "popc", "clz", "bfind", "bfe",  "bfi",   "sad"})) {
    return false;
  }
  Opcode attempt = op;
  const Type type = attempt.take_type();
  if (!is_integer(type)) return false;
  op = attempt;
  if (known(op.base, {"add", "sub", "addc", "subc", "mad", "madc"}) &&
      (op.has("cc") || op.base.back() == 'c')) {
    return decode_carry(b, op, in, type);
  }
  if ((op.base == "add" || op.base == "sub") && type == Type::s32 && op.take("sat")) {
    same_type(b, in, type, 2);
    in.run = op.base == "add" ? binary<int32_t, AddSat> : binary<int32_t, SubSat>;
    return true;
  }
  if (op.base == "mul" || op.base == "mad") return decode_products(b, op, in, type);
  if (op.base == "mul24" || op.base == "mad24") return decode_24(b, op, in, type);
  if (op.base == "shl" || op.base == "shr") return decode_shift(b, op, in, type);
  if (known(op.base, {"popc", "clz", "bfind", "bfe", "bfi"})) return decode_bits(b, op, in, type);
  return decode_simple(b, op, in, type);
}

}  // namespace ptx
}  // namespace softcuda
