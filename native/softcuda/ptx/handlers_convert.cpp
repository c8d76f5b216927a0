// Conversions (cvt) between integers and floats of all sizes.
#include <algorithm>

#include "lanes.h"

namespace softcuda {
namespace ptx {
namespace {

// ---- small formats --------------------------------------------------------------------------
// A floating-point format of at most 16 bits, or tf32.
struct Format {
  unsigned exponent_bits, mantissa_bits;
  bool infinity;  // whether the largest exponent is used for infinity and NaN only
};
constexpr Format kF16 = {5, 10, true};
constexpr Format kBf16 = {8, 7, true};
constexpr Format kTf32 = {8, 10, true};
constexpr Format kE4m3 = {4, 3, false};
constexpr Format kE5m2 = {5, 2, true};

enum class Round : uint8_t { even, zero, down, up, away };

// Rounds a value to a format and returns its bits; the sign is the highest bit. With `saturate`,
// values out of range, including infinity, are replaced with the largest finite value.
uint32_t encode(double value, const Format& format, Round round, bool saturate) {
  const uint64_t bits = bit_cast<uint64_t>(value);
  const bool negative = bits >> 63 != 0;
  const uint32_t sign = negative ? 1u << (format.exponent_bits + format.mantissa_bits) : 0u;
  const uint32_t top = (1u << format.exponent_bits) - 1;
  const uint32_t infinity = top << format.mantissa_bits;
  const uint32_t largest =
      format.infinity ? infinity - 1 : infinity | ((1u << format.mantissa_bits) - 2);
  const int bias = static_cast<int>(top >> 1);
  if (value != value) return infinity | ((1u << format.mantissa_bits) - 1);
  const int wide_exponent = static_cast<int>(bits >> 52 & 0x7ff);
  uint64_t significand = bits & ((uint64_t{1} << 52) - 1);
  if (wide_exponent == 0x7ff)
    return sign | (saturate || !format.infinity
                       ? (saturate ? largest : infinity | ((1u << format.mantissa_bits) - 1))
                       : infinity);
  if (wide_exponent == 0 && significand == 0) return sign;
  int exponent = wide_exponent - 1023;
  if (wide_exponent != 0) significand |= uint64_t{1} << 52;
  if (wide_exponent == 0) exponent = -1022;
  // Number of low bits of `significand` that the mantissa of the result has no room for.
  int drop = 52 - static_cast<int>(format.mantissa_bits);
  if (exponent < 1 - bias) drop += 1 - bias - exponent;
  uint64_t kept = drop < 64 ? significand >> drop : 0;
  const uint64_t rest = drop < 64 ? significand & ((uint64_t{1} << drop) - 1) : significand;
  const uint64_t half = drop < 64 ? uint64_t{1} << (drop - 1) : ~uint64_t{0};
  bool increment = false;
  switch (round) {
    case Round::even:
      increment = drop < 64 && (rest > half || (rest == half && (kept & 1) != 0));
      break;
    case Round::away:
      increment = drop < 64 && rest >= half;
      break;
    case Round::zero:
      break;
    case Round::down:
      increment = negative && rest != 0;
      break;
    case Round::up:
      increment = !negative && rest != 0;
      break;
  }
  if (increment) ++kept;
  // The exponent field is added to `kept`. The `kept` bits of a normal number include the leading
  // bit of the significand, which adds 1 to the field, so `field` is less by 1. A carry out of the
  // mantissa increments the field too, as it should.
  const int field = exponent < 1 - bias ? 0 : exponent + bias - 1;
  if (field >= static_cast<int>(top) + 1) kept = uint64_t{1} << 40;
  const uint64_t result =
      kept + (static_cast<uint64_t>(std::max(field, 0)) << format.mantissa_bits);
  if (result > largest) {
    const bool truncates = round == Round::zero || (round == Round::down && !negative) ||
                           (round == Round::up && negative);
    if (saturate || truncates) return sign | largest;
    return sign | (format.infinity ? infinity : infinity | ((1u << format.mantissa_bits) - 1));
  }
  return sign | static_cast<uint32_t>(result);
}

float decode(uint32_t bits, const Format& format) {
  const uint32_t top = (1u << format.exponent_bits) - 1;
  const uint32_t exponent = bits >> format.mantissa_bits & top;
  const uint32_t mantissa = bits & ((1u << format.mantissa_bits) - 1);
  const bool negative = (bits >> (format.exponent_bits + format.mantissa_bits) & 1) != 0;
  const int bias = static_cast<int>(top >> 1);
  double value = 0;
  if (exponent == top && (format.infinity || mantissa == (1u << format.mantissa_bits) - 1)) {
    if (mantissa != 0 || !format.infinity) return bit_cast<float>(0x7fffffffu);
    value = std::numeric_limits<double>::infinity();
  } else if (exponent == 0) {
    value = std::ldexp(static_cast<double>(mantissa),
                       1 - bias - static_cast<int>(format.mantissa_bits));
  } else {
    value = std::ldexp(static_cast<double>(mantissa | 1u << format.mantissa_bits),
                       static_cast<int>(exponent) - bias - static_cast<int>(format.mantissa_bits));
  }
  return static_cast<float>(negative ? -value : value);
}

const Format& format_of(Type type) {
  switch (type) {
    case Type::f16:
    case Type::f16x2:
      return kF16;
    case Type::bf16:
    case Type::bf16x2:
      return kBf16;
    case Type::tf32:
      return kTf32;
    case Type::e4m3x2:
    case Type::e4m3:
      return kE4m3;
    default:
      return kE5m2;
  }
}

// ---- fast conversions -------------------------------------------------------------------------
template <class From, class To>
const Instr* integer_to_integer(Warp& w, const Instr* in) {
  const From* a = src_lanes<From>(w, in->op[1]);
  store_lanes<To>(w, in->op[0], [=](unsigned i) { return static_cast<To>(a[i]); });
  return in + 1;
}
const Instr* f32_from_f16(Warp& w, const Instr* in) {
  const uint16_t* a = src_lanes<uint16_t>(w, in->op[1]);
  store_lanes<float>(w, in->op[0], [=](unsigned i) { return canonical(float_of_f16(a[i])); });
  return in + 1;
}
const Instr* f32_from_bf16(Warp& w, const Instr* in) {
  const uint16_t* a = src_lanes<uint16_t>(w, in->op[1]);
  store_lanes<uint32_t>(w, in->op[0], [=](unsigned i) { return uint32_t{a[i]} << 16; });
  return in + 1;
}
const Instr* f16_from_f32(Warp& w, const Instr* in) {
  const float* a = src_lanes<float>(w, in->op[1]);
  store_lanes<uint16_t>(w, in->op[0], [=](unsigned i) { return f16_of_float(a[i]); });
  return in + 1;
}
const Instr* bf16_from_f32(Warp& w, const Instr* in) {
  const float* a = src_lanes<float>(w, in->op[1]);
  store_lanes<uint16_t>(w, in->op[0], [=](unsigned i) { return bf16_of_float(a[i]); });
  return in + 1;
}
const Instr* f16x2_from_f32(Warp& w, const Instr* in) {
  const float* high = src_lanes<float>(w, in->op[1]);
  const float* low = src_lanes<float>(w, in->op[2]);
  store_lanes<uint32_t>(w, in->op[0], [=](unsigned i) {
    return uint32_t{f16_of_float(high[i])} << 16 | f16_of_float(low[i]);
  });
  return in + 1;
}
const Instr* bf16x2_from_f32(Warp& w, const Instr* in) {
  const float* high = src_lanes<float>(w, in->op[1]);
  const float* low = src_lanes<float>(w, in->op[2]);
  store_lanes<uint32_t>(w, in->op[0], [=](unsigned i) {
    return uint32_t{bf16_of_float(high[i])} << 16 | bf16_of_float(low[i]);
  });
  return in + 1;
}
template <class From>
const Instr* f32_from_integer(Warp& w, const Instr* in) {
  const From* a = src_lanes<From>(w, in->op[1]);
  store_lanes<float>(w, in->op[0], [=](unsigned i) { return static_cast<float>(a[i]); });
  return in + 1;
}
// cvt.rzi.s32.f32: out of range values are clamped, NaN gives 0.
const Instr* s32_from_f32(Warp& w, const Instr* in) {
  const float* a = src_lanes<float>(w, in->op[1]);
  store_lanes<int32_t>(w, in->op[0], [=](unsigned i) {
    const float x = a[i];
    const bool low = x < -2147483648.0f;
    const bool high = x >= 2147483648.0f;
    const auto converted = static_cast<int32_t>(low || high || x != x ? 0.0f : x);
    return low ? INT32_MIN : high ? INT32_MAX : converted;
  });
  return in + 1;
}

// ---- the general conversion ---------------------------------------------------------------------
// The parameters of a conversion, which are packed in Instr::aux. A value is first converted to a
// wide type, a 64-bit integer for integers and a double for floats, and then to the type `to`.
struct General {
  Type from, to;
  Round round;
  bool to_integral;  // whether the result is rounded to an integral value (.rni, ...)
  bool flush, saturate, finite, relu;
};
General unpack_general(const Instr* in) {
  General g;
  g.from = static_cast<Type>(in->aux & 0xff);
  g.to = static_cast<Type>(in->aux >> 8 & 0xff);
  g.round = static_cast<Round>(in->aux >> 16 & 7);
  g.to_integral = (in->aux >> 19 & 1) != 0;
  g.flush = (in->aux >> 20 & 1) != 0;
  g.saturate = (in->aux >> 21 & 1) != 0;
  g.finite = (in->aux >> 22 & 1) != 0;
  g.relu = (in->aux >> 23 & 1) != 0;
  return g;
}

bool is_float(Type type) {
  switch (type) {
    case Type::f16:
    case Type::bf16:
    case Type::tf32:
    case Type::f32:
    case Type::f64:
      return true;
    default:
      return false;
  }
}
bool is_signed(Type type) {
  return type == Type::s8 || type == Type::s16 || type == Type::s32 || type == Type::s64;
}

double round_integral(double x, Round round) {
  switch (round) {
    case Round::zero:
      return std::trunc(x);
    case Round::down:
      return std::floor(x);
    case Round::up:
      return std::ceil(x);
    default: {
      const double r = std::round(x);
      return std::fabs(x - std::trunc(x)) == 0.5 ? 2 * std::round(x / 2) : r;
    }
  }
}

// Converts to an integer type, clamping values out of range.
uint64_t integer_of(double x, Type to) {
  if (x != x) return 0;
  const unsigned bits = size_of(to) * 8;
  if (is_signed(to)) {
    const double limit = std::ldexp(1.0, static_cast<int>(bits) - 1);
    const uint64_t smallest = ~((uint64_t{1} << (bits - 1)) - 1);
    if (x < -limit) return smallest;
    if (x >= limit) return (uint64_t{1} << (bits - 1)) - 1;
    return static_cast<uint64_t>(static_cast<int64_t>(x));
  }
  const double limit = std::ldexp(1.0, static_cast<int>(bits));
  if (x <= 0) return 0;
  if (x >= limit) return bits == 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1;
  return static_cast<uint64_t>(x);
}

uint64_t saturate_integer(uint64_t value, const General& g) {
  const unsigned bits = size_of(g.to) * 8;
  const bool negative = is_signed(g.from) && static_cast<int64_t>(value) < 0;
  if (!is_signed(g.to)) {
    if (negative) return 0;
    const uint64_t largest = bits == 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1;
    return std::min(value, largest);
  }
  const uint64_t largest = (uint64_t{1} << (bits - 1)) - 1;
  if (negative) {
    const int64_t smallest = -static_cast<int64_t>(largest) - 1;
    return static_cast<uint64_t>(std::max(static_cast<int64_t>(value), smallest));
  }
  return std::min(value, largest);
}

Rounding hardware_rounding(Round round) {
  switch (round) {
    case Round::zero:
      return Rounding::zero;
    case Round::down:
      return Rounding::down;
    case Round::up:
      return Rounding::up;
    default:
      return Rounding::nearest;
  }
}

uint32_t flush_bits(uint32_t u) { return (u & 0x7f800000u) == 0 ? u & 0x80000000u : u; }

uint64_t convert(uint64_t raw, const General& g) {
  if (!is_float(g.from)) {
    uint64_t value = raw;
    if (is_signed(g.from)) {
      const unsigned shift = 64 - size_of(g.from) * 8;
      value = static_cast<uint64_t>(static_cast<int64_t>(raw << shift) >> shift);
    }
    if (!is_float(g.to)) return g.saturate ? saturate_integer(value, g) : value;
    const FloatMode mode(false, hardware_rounding(g.round));
    if (g.to == Type::f64) {
      const double d = is_signed(g.from) ? static_cast<double>(static_cast<int64_t>(value))
                                         : static_cast<double>(value);
      return bit_cast<uint64_t>(d);
    }
    if (g.to == Type::f32) {
      const float f = is_signed(g.from) ? static_cast<float>(static_cast<int64_t>(value))
                                        : static_cast<float>(value);
      return bit_cast<uint32_t>(f);
    }
    const FloatMode nearest(false);
    const bool negative = is_signed(g.from) && static_cast<int64_t>(value) < 0;
    uint64_t magnitude = negative ? 0 - value : value;
    // A magnitude of more than 53 bits is not exact in a double. It overflows f16 in any case. For
    // bf16, the low bits only matter as a sticky bit.
    const uint64_t low = magnitude & 2047;
    magnitude =
        (magnitude & ~uint64_t{2047}) | (magnitude >> 53 != 0 ? (low != 0 ? 2048u : 0u) : low);
    const double d = static_cast<double>(magnitude);
    return encode(negative ? -d : d, format_of(g.to), g.round, false);
  }
  double d = 0;
  {
    const FloatMode mode(false);
    switch (g.from) {
      case Type::f64:
        d = bit_cast<double>(raw);
        break;
      case Type::f32: {
        const uint32_t u =
            g.flush ? flush_bits(static_cast<uint32_t>(raw)) : static_cast<uint32_t>(raw);
        d = static_cast<double>(bit_cast<float>(u));
        break;
      }
      default:
        d = static_cast<double>(decode(static_cast<uint32_t>(raw), format_of(g.from)));
        break;
    }
    if (!is_float(g.to)) return integer_of(round_integral(d, g.round), g.to);
    if (g.to_integral) d = round_integral(d, g.round);
    if (g.saturate) d = d > 0 ? (d < 1 ? d : 1.0) : 0.0;
    if (g.relu && d < 0) d = 0.0;
    if (g.relu && d == 0) d = 0.0;
  }
  if (g.to == Type::f64) {
    return d != d ? uint64_t{0x7fffffffffffffff} : bit_cast<uint64_t>(d);
  }
  if (g.to == Type::f32) {
    if (d != d) return 0x7fffffffu;
    const FloatMode mode(false, hardware_rounding(g.round));
    const uint32_t u = bit_cast<uint32_t>(static_cast<float>(d));
    return g.flush ? flush_bits(u) : u;
  }
  if (g.to == Type::tf32) {
    const uint32_t t = encode(d, kTf32, g.round, g.finite);
    return uint64_t{t} << 13;
  }
  const FloatMode mode(false);
  return encode(d, format_of(g.to), g.round, g.finite);
}

uint64_t read_lane(const Warp& w, int32_t o, unsigned bytes, unsigned lane) {
  const char* base = ((o & kConstant) != 0 ? w.constants : w.regs) + (o & ~3);
  uint64_t value = 0;
  std::memcpy(&value, base + size_t{lane} * bytes, bytes);
  return value;
}
void write_lane(Warp& w, int32_t o, unsigned bytes, unsigned lane, uint64_t value) {
  if (o >= 0) std::memcpy(w.regs + o + size_t{lane} * bytes, &value, bytes);
}

// `kind` is the size of the source register in bytes, `count` that of the destination register.
const Instr* convert_lanes(Warp& w, const Instr* in) {
  const General g = unpack_general(in);
  for (uint32_t left = w.mask; left != 0; left &= left - 1) {
    const auto lane = static_cast<unsigned>(__builtin_ctz(left));
    uint64_t raw = read_lane(w, in->op[1], in->kind, lane);
    const unsigned bytes = size_of(g.from);
    if (bytes < 8) raw &= (uint64_t{1} << (8 * bytes)) - 1;
    uint64_t value = convert(raw, g);
    // If the destination register is wider than the type, the value is sign- or zero-extended.
    const unsigned have = std::max(1u, size_of(g.to));
    if (have < 8 && have < in->count) {
      const unsigned shift = 64 - 8 * have;
      value = is_signed(g.to) ? static_cast<uint64_t>(static_cast<int64_t>(value << shift) >> shift)
                              : value << shift >> shift;
    }
    write_lane(w, in->op[0], in->count, lane, value);
  }
  return in + 1;
}

// Conversions to pairs. If the sources are two floats, op[1] is the high half and op[2] the low
// one.
const Instr* convert_to_pair(Warp& w, const Instr* in) {
  General g = unpack_general(in);
  const Type pair = g.to;
  if (pair == Type::f16x2) g.to = Type::f16;
  if (pair == Type::bf16x2) g.to = Type::bf16;
  if (pair == Type::e4m3x2) g.to = Type::e4m3;
  if (pair == Type::e5m2x2) g.to = Type::e5m2;
  const bool from_pair = g.from == Type::f16x2;
  const unsigned bits = pair == Type::e4m3x2 || pair == Type::e5m2x2 ? 8 : 16;
  for (uint32_t left = w.mask; left != 0; left &= left - 1) {
    const auto lane = static_cast<unsigned>(__builtin_ctz(left));
    uint64_t half[2];
    General one = g;
    if (from_pair) {
      one.from = Type::f16;
      const uint64_t raw = read_lane(w, in->op[1], 4, lane);
      half[0] = raw & 0xffff;
      half[1] = raw >> 16;
    } else {
      half[0] = read_lane(w, in->op[2], 4, lane);
      half[1] = read_lane(w, in->op[1], 4, lane);
    }
    const uint64_t low = bits == 8 ? 0 : convert(half[0], one);
    uint64_t value = 0;
    if (bits == 8) {
      const FloatMode mode(false);
      for (unsigned k = 0; k < 2; ++k) {
        double d = from_pair ? static_cast<double>(float_of_f16(static_cast<uint16_t>(half[k])))
                             : static_cast<double>(bit_cast<float>(static_cast<uint32_t>(half[k])));
        if (g.relu && !(d > 0)) d = d != d ? d : 0.0;
        value |= uint64_t{encode(d, format_of(pair), g.round, true)} << (8 * k);
      }
    } else {
      value = low | convert(half[1], one) << 16;
    }
    write_lane(w, in->op[0], bits / 4, lane, value);
  }
  return in + 1;
}
// Conversions of e4m3x2 and e5m2x2 to f16x2.
const Instr* convert_from_pair(Warp& w, const Instr* in) {
  const General g = unpack_general(in);
  const Format& format = format_of(g.from);
  for (uint32_t left = w.mask; left != 0; left &= left - 1) {
    const auto lane = static_cast<unsigned>(__builtin_ctz(left));
    const uint64_t raw = read_lane(w, in->op[1], 2, lane);
    uint32_t value = 0;
    const FloatMode mode(false);
    for (unsigned k = 0; k < 2; ++k) {
      float f = decode(static_cast<uint32_t>(raw >> (8 * k) & 255), format);
      if (g.relu && f < 0) f = 0;
      value |= uint32_t{f16_of_float(f)} << (16 * k);
    }
    write_lane(w, in->op[0], 4, lane, value);
  }
  return in + 1;
}

template <class From>
Handler to_integer_of(unsigned bytes, bool extends_sign) {
  if (extends_sign) {
    switch (bytes) {
      case 2:
        return integer_to_integer<From, int16_t>;
      case 4:
        return integer_to_integer<From, int32_t>;
      case 8:
        return integer_to_integer<From, int64_t>;
      default:
        return nullptr;
    }
  }
  switch (bytes) {
    case 2:
      return integer_to_integer<From, uint16_t>;
    case 4:
      return integer_to_integer<From, uint32_t>;
    case 8:
      return integer_to_integer<From, uint64_t>;
    default:
      return nullptr;
  }
}

// Returns the specialized handler that converts the integer type `from`, in a register of its size,
// to an integer of `to_bytes` bytes; null if there is none, as for 8-bit types.
Handler fast_integer(Type from, unsigned to_bytes) {
  switch (from) {
    case Type::u16:
      return to_integer_of<uint16_t>(to_bytes, false);
    case Type::s16:
      return to_integer_of<int16_t>(to_bytes, true);
    case Type::u32:
      return to_integer_of<uint32_t>(to_bytes, false);
    case Type::s32:
      return to_integer_of<int32_t>(to_bytes, true);
    case Type::u64:
      return to_integer_of<uint64_t>(to_bytes, false);
    case Type::s64:
      return to_integer_of<int64_t>(to_bytes, true);
    default:
      return nullptr;
  }
}

bool is_pair(Type type) {
  return type == Type::f16x2 || type == Type::bf16x2 || type == Type::e4m3x2 ||
         type == Type::e5m2x2;
}

Round take_round(Opcode& op, bool* integral) {
  struct Name {
    const char* name;
    Round round;
    bool integral;
  };
  constexpr Name kNames[] = {
      {"rn", Round::even, false}, {"rz", Round::zero, false},  {"rm", Round::down, false},
      {"rp", Round::up, false},   {"rna", Round::away, false}, {"rni", Round::even, true},
      {"rzi", Round::zero, true}, {"rmi", Round::down, true},  {"rpi", Round::up, true},
  };
  for (const Name& n : kNames) {
    if (!op.take(n.name)) continue;
    *integral = n.integral;
    return n.round;
  }
  return Round::even;
}

}  // namespace

bool decode_convert(Builder& b, Opcode& op, Instr& in) {
  if (op.base != "cvt") return false;
  bool integral = false;
  const Round round = take_round(op, &integral);
  const bool flush = op.take("ftz");
  const bool saturate = op.take("sat");
  const bool finite = op.take("satfinite");
  const bool relu = op.take("relu");
  const Type to = op.take_type();
  const Type from = op.take_type();
  if (to == Type::none || from == Type::none) return false;
  in.aux = static_cast<uint32_t>(from) | static_cast<uint32_t>(to) << 8 |
           static_cast<uint32_t>(round) << 16 | (integral ? 1u << 19 : 0) | (flush ? 1u << 20 : 0) |
           (saturate ? 1u << 21 : 0) | (finite ? 1u << 22 : 0) | (relu ? 1u << 23 : 0);
  const bool plain = !saturate && !finite && !relu && round == Round::even && !integral;
  if (is_pair(to) && from == Type::f32) {
    in.op[0] = b.dst(b.operand(0), size_of(to));
    in.op[1] = b.src(b.operand(1), Type::f32);
    in.op[2] = b.src(b.operand(2), Type::f32);
    in.run = convert_to_pair;
    if (plain && to == Type::f16x2) in.run = f16x2_from_f32;
    if (plain && to == Type::bf16x2) in.run = bf16x2_from_f32;
    return true;
  }
  if ((to == Type::e4m3x2 || to == Type::e5m2x2) && from == Type::f16x2) {
    in.op[0] = b.dst(b.operand(0), 2);
    in.op[1] = b.src(b.operand(1), Type::b32);
    in.run = convert_to_pair;
    return true;
  }
  if (to == Type::f16x2 && (from == Type::e4m3x2 || from == Type::e5m2x2)) {
    in.op[0] = b.dst(b.operand(0), 4);
    in.op[1] = b.src(b.operand(1), Type::b16);
    in.run = convert_from_pair;
    return true;
  }
  const auto scalar = [](Type t) {
    return is_float(t) || is_signed(t) || t == Type::u8 || t == Type::u16 || t == Type::u32 ||
           t == Type::u64;
  };
  if (!scalar(to) || !scalar(from)) return false;
  const unsigned to_bytes = std::max(size_of(to), b.register_bytes(b.operand(0)));
  const unsigned from_bytes = std::max({2u, size_of(from), b.register_bytes(b.operand(1))});
  in.op[0] = b.dst(b.operand(0), size_of(to), true);
  in.op[1] = b.src(b.operand(1), from, true);
  in.kind = static_cast<uint16_t>(from_bytes);
  in.count = static_cast<uint16_t>(std::max(2u, to_bytes));
  in.run = convert_lanes;
  const bool same_from = from_bytes == size_of(from);
  if (!is_float(to) && !is_float(from)) {
    // The value is truncated, or extended as the type of the source requires.
    const bool narrow_register = to_bytes == size_of(to) || size_of(to) >= size_of(from);
    if (!saturate && same_from && narrow_register && size_of(to) >= 2 &&
        (size_of(to) > size_of(from) || to_bytes == size_of(to))) {
      const Handler fast = fast_integer(from, to_bytes);
      if (fast != nullptr && size_of(from) >= 2 &&
          !(is_signed(from) && !is_signed(to) && to_bytes > size_of(to))) {
        in.run = fast;
      }
    }
    return true;
  }
  const bool exact = in.count == size_of(to) && same_from;
  if (!exact) return true;
  if (plain && to == Type::f32 && from == Type::f16) in.run = f32_from_f16;
  if (plain && to == Type::f32 && from == Type::bf16) in.run = f32_from_bf16;
  if (plain && to == Type::f16 && from == Type::f32) in.run = f16_from_f32;
  if (plain && to == Type::bf16 && from == Type::f32) in.run = bf16_from_f32;
  if (plain && to == Type::f32) {
    if (from == Type::s32) in.run = f32_from_integer<int32_t>;
    if (from == Type::u32) in.run = f32_from_integer<uint32_t>;
    if (from == Type::u16) in.run = f32_from_integer<uint16_t>;
    if (from == Type::u64) in.run = f32_from_integer<uint64_t>;
    if (from == Type::s64) in.run = f32_from_integer<int64_t>;
  }
  if (to == Type::s32 && from == Type::f32 && round == Round::zero) in.run = s32_from_f32;
  return true;
}

}  // namespace ptx
}  // namespace softcuda
