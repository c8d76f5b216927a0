// Arithmetic of f16, bf16 and their pairs. Values are widened to float or double, computed there
// and rounded once.
#include "lanes.h"

namespace softcuda {
namespace ptx {
namespace {

constexpr uint32_t kFlush = 1;
constexpr uint32_t kSaturate = 2;
constexpr uint32_t kRelu = 4;

struct F16 {
  static inline float widen(uint16_t h) { return float_of_f16(h); }
  static inline uint16_t narrow(float f) { return f16_of_float(f); }
  static constexpr uint16_t kNan = 0x7fff;
  static constexpr uint16_t kInfinity = 0x7c00;
  static constexpr uint16_t kMinNormal = 0x0400;
};
struct Bf16 {
  static inline float widen(uint16_t h) { return float_of_bf16(h); }
  static inline uint16_t narrow(float f) { return bf16_of_float(f); }
  static constexpr uint16_t kNan = 0x7fff;
  static constexpr uint16_t kInfinity = 0x7f80;
  static constexpr uint16_t kMinNormal = 0x0080;
};

// Converts a double, which was rounded to odd, to a float that is rounded to odd. Rounding this
// float to 16 bits then gives the same result as rounding the exact value once.
inline float to_float_odd(double d) {
  const float f = static_cast<float>(d);
  const double back = f;
  const uint32_t bits = bit_cast<uint32_t>(f);
  if (back == d || (bits & 1) != 0 || !(f - f == 0)) return f;
  // Rounding d to a float gave f, which has an even mantissa. Return the other
  // neighbour of d among the floats, which has an odd mantissa.
  const bool up = d > back;
  return bit_cast<float>(up == (d > 0) ? bits + 1 : bits - 1);
}

template <class F>
inline uint16_t flush_half(uint16_t h, bool flush) {
  return flush && (h & 0x7fff) < F::kMinNormal ? h & 0x8000 : h;
}
template <class F>
inline bool is_nan(uint16_t h) {
  return (h & 0x7fff) > F::kInfinity;
}

struct Add {
  template <class F>
  static inline uint16_t apply(uint16_t a, uint16_t b, uint16_t) {
    return F::narrow(to_float_odd(fma_odd(F::widen(a), 1.0, F::widen(b))));
  }
};
struct Sub {
  template <class F>
  static inline uint16_t apply(uint16_t a, uint16_t b, uint16_t) {
    return F::narrow(to_float_odd(fma_odd(F::widen(b), -1.0, F::widen(a))));
  }
};
struct Mul {
  template <class F>
  static inline uint16_t apply(uint16_t a, uint16_t b, uint16_t) {
    return F::narrow(
        to_float_odd(static_cast<double>(F::widen(a)) * static_cast<double>(F::widen(b))));
  }
};
struct Fma {
  template <class F>
  static inline uint16_t apply(uint16_t a, uint16_t b, uint16_t c) {
    return F::narrow(to_float_odd(fma_odd(F::widen(a), F::widen(b), F::widen(c))));
  }
};
struct Neg {
  template <class F>
  static inline uint16_t apply(uint16_t a, uint16_t, uint16_t) {
    return a ^ 0x8000;
  }
};
struct Abs {
  template <class F>
  static inline uint16_t apply(uint16_t a, uint16_t, uint16_t) {
    return a & 0x7fff;
  }
};
// Returns an integer that orders float16 and bfloat16 values; -0 is less than +0.
inline int32_t order_of(uint16_t h) {
  const int32_t magnitude = h & 0x7fff;
  return (h & 0x8000) != 0 ? -1 - magnitude : magnitude;
}
template <bool Greatest, bool Nan>
struct Choose {
  template <class F>
  static inline uint16_t apply(uint16_t a, uint16_t b, uint16_t) {
    const bool na = is_nan<F>(a), nb = is_nan<F>(b);
    if (na && nb) return F::kNan;
    if (Nan && (na || nb)) return F::kNan;
    if (na) return b;
    if (nb) return a;
    return (order_of(a) < order_of(b)) != Greatest ? a : b;
  }
};
struct Ex2 {
  template <class F>
  static inline uint16_t apply(uint16_t a, uint16_t, uint16_t) {
    return F::narrow(static_cast<float>(std::exp2(static_cast<double>(F::widen(a)))));
  }
};
struct Tanh {
  template <class F>
  static inline uint16_t apply(uint16_t a, uint16_t, uint16_t) {
    return F::narrow(static_cast<float>(std::tanh(static_cast<double>(F::widen(a)))));
  }
};

template <class F, class Op>
inline uint16_t compute(uint16_t a, uint16_t b, uint16_t c, uint32_t aux) {
  const bool flush = (aux & kFlush) != 0;
  uint16_t r = Op::template apply<F>(flush_half<F>(a, flush), flush_half<F>(b, flush),
                                     flush_half<F>(c, flush));
  r = flush_half<F>(r, flush);
  if (is_nan<F>(r)) r = F::kNan;
  if ((aux & kSaturate) != 0) {
    const float f = F::widen(r);
    r = is_nan<F>(r) || f <= 0 ? uint16_t{0} : f >= 1 ? F::narrow(1.0f) : r;
  }
  if ((aux & kRelu) != 0 && !is_nan<F>(r) && (r & 0x8000) != 0) r = 0;
  return r;
}

template <class F, class Op, bool Pair>
const Instr* half_arithmetic(Warp& w, const Instr* in) {
  using T = std::conditional_t<Pair, uint32_t, uint16_t>;
  const T* a = src_lanes<T>(w, in->op[1]);
  const T* b = src_lanes<T>(w, in->op[2]);
  const T* c = src_lanes<T>(w, in->op[3]);
  const uint32_t aux = in->aux;
  alignas(64) T t[kLanes];
  {
    const FloatMode mode(false);
    SC_LANES {
      t[i] = compute<F, Op>(static_cast<uint16_t>(a[i]), static_cast<uint16_t>(b[i]),
                            static_cast<uint16_t>(c[i]), aux);
      if (Pair) {
        const auto high = compute<F, Op>(static_cast<uint16_t>(uint32_t{a[i]} >> 16),
                                         static_cast<uint16_t>(uint32_t{b[i]} >> 16),
                                         static_cast<uint16_t>(uint32_t{c[i]} >> 16), aux);
        t[i] = static_cast<T>(t[i] | uint32_t{high} << 16);
      }
    }
  }
  store_lanes<T>(w, in->op[0], [&](unsigned i) { return t[i]; });
  return in + 1;
}

// fma.rn.bf16x2 whose third operand is the constant -0: a product with one rounding. Kernels use it
// to widen 8-bit weights.
const Instr* product_bf16x2(Warp& w, const Instr* in) {
  const uint32_t* a = src_lanes<uint32_t>(w, in->op[1]);
  const uint32_t* b = src_lanes<uint32_t>(w, in->op[2]);
  alignas(64) uint32_t t[kLanes];
  {
    const FloatMode mode(false);
    SC_LANES {
      // The product of two 8-bit significands is exact in a float.
      const float low = bit_cast<float>(a[i] << 16) * bit_cast<float>(b[i] << 16);
      const float high = bit_cast<float>(a[i] & 0xffff0000u) * bit_cast<float>(b[i] & 0xffff0000u);
      t[i] = bf16_of_float(low) | uint32_t{bf16_of_float(high)} << 16;
    }
  }
  store_lanes<uint32_t>(w, in->op[0], [&](unsigned i) { return t[i]; });
  return in + 1;
}

struct Entry {
  const char* name;
  unsigned sources;
  Handler of[4];  // f16, f16x2, bf16, bf16x2
};
#define SC_HALF_ENTRY(name, sources, ...)                                                     \
  {                                                                                           \
    name, sources, {                                                                          \
      half_arithmetic<F16, __VA_ARGS__, false>, half_arithmetic<F16, __VA_ARGS__, true>,      \
          half_arithmetic<Bf16, __VA_ARGS__, false>, half_arithmetic<Bf16, __VA_ARGS__, true> \
    }                                                                                         \
  }

const Entry kEntries[] = {
    SC_HALF_ENTRY("add", 2, Add),
    SC_HALF_ENTRY("sub", 2, Sub),
    SC_HALF_ENTRY("mul", 2, Mul),
    SC_HALF_ENTRY("fma", 3, Fma),
    SC_HALF_ENTRY("neg", 1, Neg),
    SC_HALF_ENTRY("abs", 1, Abs),
    SC_HALF_ENTRY("min", 2, Choose<false, false>),
    SC_HALF_ENTRY("max", 2, Choose<true, false>),
    SC_HALF_ENTRY("min.NaN", 2, Choose<false, true>),
    SC_HALF_ENTRY("max.NaN", 2, Choose<true, true>),
    SC_HALF_ENTRY("ex2", 1, Ex2),
    SC_HALF_ENTRY("tanh", 1, Tanh),
};

}  // namespace

bool decode_half(Builder& b, Opcode& op, Instr& in) {
  Opcode attempt = op;
  const Type type = attempt.take_type();
  int column = -1;
  if (type == Type::f16) column = 0;
  if (type == Type::f16x2) column = 1;
  if (type == Type::bf16) column = 2;
  if (type == Type::bf16x2) column = 3;
  if (column < 0) return false;
  std::string name = op.base;
  if (attempt.take("NaN")) name += ".NaN";
  for (const Entry& entry : kEntries) {
    if (name != entry.name) continue;
    op = attempt;
    op.take("approx");
    op.take("rn");
    op.take("oob");
    in.aux = (op.take("ftz") ? kFlush : 0) | (op.take("sat") ? kSaturate : 0) |
             (op.take("relu") ? kRelu : 0);
    in.op[0] = b.dst(b.operand(0), size_of(type));
    in.op[2] = in.op[3] = b.constant(0, size_of(type));
    for (unsigned k = 1; k <= entry.sources; ++k) in.op[k] = b.src(b.operand(k), type);
    in.run = entry.of[column];
    const bool adds_minus_zero = entry.sources == 3 && b.operand(3).kind == Operand::integer &&
                                 (b.operand(3).bits & 0xffffffffu) == 0x80008000u;
    if (name == "fma" && column == 3 && in.aux == 0 && adds_minus_zero) in.run = product_bf16x2;
    return true;
  }
  return false;
}

}  // namespace ptx
}  // namespace softcuda
