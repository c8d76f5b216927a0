// Arithmetic of f32 and f64.
#include "lanes.h"

namespace softcuda {
namespace ptx {
namespace {

// Bits of Instr::aux in floating-point instructions.
constexpr uint32_t kFlush = 1;
constexpr uint32_t kSaturate = 2;
constexpr unsigned kRoundingShift = 4;

inline FloatMode mode_of(const Instr* in) {
  return FloatMode((in->aux & kFlush) != 0, static_cast<Rounding>(in->aux >> kRoundingShift & 3));
}

template <class T>
inline T saturate(T x) {
  return x > 0 ? (x < 1 ? x : T{1}) : T{0};  // NaN gives 0
}

// With `Default`, the handler uses the floating-point mode of the worker: denormals are flushed,
// and results are rounded to nearest. Otherwise, it sets the mode that the instruction requires.
template <class T, class Op, unsigned Sources, bool Default>
const Instr* arithmetic(Warp& w, const Instr* in) {
  const T* a = src_lanes<T>(w, in->op[1]);
  const T* b = Sources > 1 ? src_lanes<T>(w, in->op[2]) : a;
  const T* c = Sources > 2 ? src_lanes<T>(w, in->op[3]) : a;
  if (Default) {
    store_lanes<T>(w, in->op[0], [=](unsigned i) { return Op::apply(a[i], b[i], c[i]); });
    return in + 1;
  }
  alignas(64) T t[kLanes];
  {
    const FloatMode mode = mode_of(in);
    SC_LANES t[i] = Op::apply(a[i], b[i], c[i]);
    if ((in->aux & kSaturate) != 0) {
      SC_LANES t[i] = saturate(t[i]);
    }
  }
  store_lanes<T>(w, in->op[0], [&](unsigned i) { return t[i]; });
  return in + 1;
}

// Pairs of f32 in 64-bit registers. The 32 lanes of such a register contain 64 floats.
template <class Op, unsigned Sources>
const Instr* pair_arithmetic(Warp& w, const Instr* in) {
  const float* a = src_lanes<float>(w, in->op[1]);
  const float* b = src_lanes<float>(w, in->op[2]);
  const float* c = Sources > 2 ? src_lanes<float>(w, in->op[3]) : a;
  alignas(64) float t[2 * kLanes];
  {
    const FloatMode mode = mode_of(in);
    for (unsigned i = 0; i < 2 * kLanes; ++i) t[i] = Op::apply(a[i], b[i], c[i]);
  }
  alignas(64) uint64_t pairs[kLanes];
  std::memcpy(pairs, t, sizeof pairs);
  store_lanes<uint64_t>(w, in->op[0], [&](unsigned i) { return pairs[i]; });
  return in + 1;
}

// Flushes a denormal to zero if the current floating-point mode flushes denormals.
template <class T>
inline T flushed(T x) {
  return x == 0 ? std::copysign(T{0}, x) : x;
}

#define SC_FLOAT_OP(Name, expression)                                        \
  struct Name {                                                              \
    template <class T>                                                       \
    static inline T apply(T a, [[maybe_unused]] T b, [[maybe_unused]] T c) { \
      return expression;                                                     \
    }                                                                        \
  };
SC_FLOAT_OP(Add, canonical(a + b))
SC_FLOAT_OP(Sub, canonical(a - b))
SC_FLOAT_OP(Mul, canonical(a* b))
SC_FLOAT_OP(Div, canonical(a / b))
SC_FLOAT_OP(Fma, canonical(std::fma(a, b, c)))
SC_FLOAT_OP(Sqrt, canonical(std::sqrt(a)))
SC_FLOAT_OP(Rcp, canonical(T{1} / a))
SC_FLOAT_OP(Neg, flushed(-a))
SC_FLOAT_OP(Abs, flushed(std::fabs(a)))
SC_FLOAT_OP(Copysign, std::copysign(b, a))
SC_FLOAT_OP(Ex2, canonical(static_cast<T>(std::exp2(flushed(a)))))
SC_FLOAT_OP(Lg2, canonical(static_cast<T>(std::log2(flushed(a)))))
SC_FLOAT_OP(Sin, canonical(static_cast<T>(std::sin(static_cast<double>(flushed(a))))))
SC_FLOAT_OP(Cos, canonical(static_cast<T>(std::cos(static_cast<double>(flushed(a))))))
SC_FLOAT_OP(Tanh, canonical(static_cast<T>(std::tanh(static_cast<double>(flushed(a))))))
SC_FLOAT_OP(Rsqrt, canonical(static_cast<T>(1.0 / std::sqrt(static_cast<double>(flushed(a))))))
#undef SC_FLOAT_OP

// Comparison for min and max, in which -0 is less than +0. If an operand is NaN, min and max return
// the other one, and min.NaN and max.NaN return NaN.
template <class T>
inline bool less(T a, T b) {
  return a < b || (a == b && std::signbit(a) && !std::signbit(b));
}
struct Min {
  template <class T>
  static inline T apply(T a, T b, T) {
    return flushed(canonical(b != b || less(a, b) ? a : b));
  }
};
struct Max {
  template <class T>
  static inline T apply(T a, T b, T) {
    return flushed(canonical(b != b || less(b, a) ? a : b));
  }
};
struct MinNan {
  template <class T>
  static inline T apply(T a, T b, T) {
    return a != a || b != b ? canonical(a + b) : Min::apply(a, b, b);
  }
};
struct MaxNan {
  template <class T>
  static inline T apply(T a, T b, T) {
    return a != a || b != b ? canonical(a + b) : Max::apply(a, b, b);
  }
};
// min.xorsign.abs and max.xorsign.abs.
template <class Op>
struct XorSign {
  template <class T>
  static inline T apply(T a, T b, T c) {
    const T r = Op::apply(std::fabs(a), std::fabs(b), c);
    return r != r ? r : std::copysign(r, std::signbit(a) != std::signbit(b) ? T{-1} : T{1});
  }
};

// testp. `in->kind` is the property: 0 finite, 1 infinite, 2 number, 3 notanumber, 4 normal,
// 5 subnormal.
template <class U, unsigned ExponentBits, unsigned MantissaBits>
const Instr* testp(Warp& w, const Instr* in) {
  const U* a = src_lanes<U>(w, in->op[1]);
  const unsigned kind = in->kind;
  constexpr U top = (U{1} << ExponentBits) - 1;
  set_pred(w, in->op[0], lane_mask([=](unsigned i) {
             const U exponent = a[i] >> MantissaBits & top;
             const U mantissa = a[i] & ((U{1} << MantissaBits) - 1);
             switch (kind) {
               case 0:
                 return exponent != top;
               case 1:
                 return exponent == top && mantissa == 0;
               case 2:
                 return exponent != top || mantissa == 0;
               case 3:
                 return exponent == top && mantissa != 0;
               case 4:
                 return exponent != top && exponent != 0;
               default:
                 return exponent == 0 && mantissa != 0;
             }
           }));
  return in + 1;
}

Rounding take_rounding(Opcode& op) {
  if (op.take("rz")) return Rounding::zero;
  if (op.take("rm")) return Rounding::down;
  if (op.take("rp")) return Rounding::up;
  op.take("rn");
  return Rounding::nearest;
}

template <class T>
struct Entry {
  const char* name;
  unsigned sources;
  Handler plain, moded;
};
#define SC_FLOAT_ENTRY(name, Op, sources) \
  {name, sources, arithmetic<T, Op, sources, true>, arithmetic<T, Op, sources, false>}

template <class T>
const Entry<T>* find_entry(const std::string& name) {
  static const Entry<T> entries[] = {
      SC_FLOAT_ENTRY("add", Add, 2),
      SC_FLOAT_ENTRY("sub", Sub, 2),
      SC_FLOAT_ENTRY("mul", Mul, 2),
      SC_FLOAT_ENTRY("div", Div, 2),
      SC_FLOAT_ENTRY("fma", Fma, 3),
      SC_FLOAT_ENTRY("mad", Fma, 3),
      SC_FLOAT_ENTRY("sqrt", Sqrt, 1),
      SC_FLOAT_ENTRY("rcp", Rcp, 1),
      SC_FLOAT_ENTRY("rsqrt", Rsqrt, 1),
      SC_FLOAT_ENTRY("neg", Neg, 1),
      SC_FLOAT_ENTRY("abs", Abs, 1),
      SC_FLOAT_ENTRY("copysign", Copysign, 2),
      SC_FLOAT_ENTRY("ex2", Ex2, 1),
      SC_FLOAT_ENTRY("lg2", Lg2, 1),
      SC_FLOAT_ENTRY("sin", Sin, 1),
      SC_FLOAT_ENTRY("cos", Cos, 1),
      SC_FLOAT_ENTRY("tanh", Tanh, 1),
      SC_FLOAT_ENTRY("min", Min, 2),
      SC_FLOAT_ENTRY("max", Max, 2),
      SC_FLOAT_ENTRY("min.NaN", MinNan, 2),
      SC_FLOAT_ENTRY("max.NaN", MaxNan, 2),
      SC_FLOAT_ENTRY("min.xorsign", XorSign<Min>, 2),
      SC_FLOAT_ENTRY("max.xorsign", XorSign<Max>, 2),
      SC_FLOAT_ENTRY("min.NaN.xorsign", XorSign<MinNan>, 2),
      SC_FLOAT_ENTRY("max.NaN.xorsign", XorSign<MaxNan>, 2),
  };
  for (const Entry<T>& entry : entries) {
    if (name == entry.name) return &entry;
  }
  return nullptr;
}

template <class T>
bool decode_type(Builder& b, Opcode& op, Instr& in, Type type) {
  std::string name = op.base;
  if (name == "min" || name == "max") {
    if (op.take("NaN")) name += ".NaN";
    if (op.take("xorsign")) {
      if (!op.take("abs")) return false;
      name += ".xorsign";
    }
  }
  const Entry<T>* entry = find_entry<T>(name);
  if (entry == nullptr) return false;
  // .approx and .full have no effect, because all functions are computed accurately.
  op.take("approx");
  op.take("full");
  const bool flush = op.take("ftz");
  const bool saturates = op.take("sat");
  const Rounding rounding = take_rounding(op);
  in.aux = (flush ? kFlush : 0) | (saturates ? kSaturate : 0) |
           static_cast<uint32_t>(rounding) << kRoundingShift;
  in.op[0] = b.dst(b.operand(0), sizeof(T));
  for (unsigned k = 1; k <= entry->sources; ++k) in.op[k] = b.src(b.operand(k), type);
  const bool plain = flush && !saturates && rounding == Rounding::nearest;
  in.run = plain ? entry->plain : entry->moded;
  return true;
}

bool decode_pair(Builder& b, Opcode& op, Instr& in) {
  if (op.base == "add") in.run = pair_arithmetic<Add, 2>;
  if (op.base == "sub") in.run = pair_arithmetic<Sub, 2>;
  if (op.base == "mul") in.run = pair_arithmetic<Mul, 2>;
  if (op.base == "fma") in.run = pair_arithmetic<Fma, 3>;
  if (in.run == nullptr) return false;
  const bool flush = op.take("ftz");
  const Rounding rounding = take_rounding(op);
  in.aux = (flush ? kFlush : 0) | static_cast<uint32_t>(rounding) << kRoundingShift;
  in.op[0] = b.dst(b.operand(0), 8);
  for (unsigned k = 1; k <= (op.base == "fma" ? 3u : 2u); ++k) {
    in.op[k] = b.src(b.operand(k), Type::b64);
  }
  return true;
}

}  // namespace

bool decode_float(Builder& b, Opcode& op, Instr& in) {
  if (op.base == "testp") {
    constexpr const char* kTests[] = {"finite",     "infinite", "number",
                                      "notanumber", "normal",   "subnormal"};
    for (uint16_t kind = 0; kind < 6; ++kind) {
      if (op.take(kTests[kind])) in.kind = kind;
    }
    const Type type = op.take_type();
    in.op[0] = b.pred_dst(b.operand(0));
    in.op[1] = b.src(b.operand(1), type);
    in.run = type == Type::f64 ? testp<uint64_t, 11, 52> : testp<uint32_t, 8, 23>;
    return true;
  }
  Opcode attempt = op;
  const Type type = attempt.take_type();
  if (!attempt.finished() && attempt.take_type() != Type::none) return false;
  if (type == Type::f32x2) {
    op = attempt;
    return decode_pair(b, op, in);
  }
  const bool single = type == Type::f32;
  if (!single && type != Type::f64) return false;
  if (find_entry<float>(op.base) == nullptr) return false;
  op = attempt;
  return single ? decode_type<float>(b, op, in, type) : decode_type<double>(b, op, in, type);
}

}  // namespace ptx
}  // namespace softcuda
