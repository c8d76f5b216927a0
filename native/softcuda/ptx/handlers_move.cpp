// Moves, packing, address conversions, selections and comparisons.
#include <time.h>

#include "lanes.h"

namespace softcuda {
namespace ptx {
namespace {

template <class T>
const Instr* move(Warp& w, const Instr* in) {
  const T* a = src_lanes<T>(w, in->op[1]);
  store_lanes<T>(w, in->op[0], [=](unsigned i) { return a[i]; });
  return in + 1;
}

// mov.b32 {a, b}, c and the like. Small is the type of the elements.
template <class Small, class Large, unsigned Count>
const Instr* unpack(Warp& w, const Instr* in) {
  const Large* a = src_lanes<Large>(w, in->op[4]);
  // A destination may be the source register, so the elements are computed first.
  alignas(64) Large copy[kLanes];
  SC_LANES copy[i] = a[i];
  for (unsigned k = 0; k < Count; ++k) {
    const unsigned shift = k * sizeof(Small) * 8;
    store_lanes<Small>(w, in->op[k],
                       [&](unsigned i) { return static_cast<Small>(copy[i] >> shift); });
  }
  return in + 1;
}
template <class Small, class Large, unsigned Count>
const Instr* pack(Warp& w, const Instr* in) {
  const Small* parts[Count];
  for (unsigned k = 0; k < Count; ++k) parts[k] = src_lanes<Small>(w, in->op[k + 1]);
  store_lanes<Large>(w, in->op[0], [&](unsigned i) {
    Large r = 0;
    for (unsigned k = 0; k < Count; ++k) {
      r = static_cast<Large>(r | static_cast<Large>(parts[k][i]) << (k * sizeof(Small) * 8));
    }
    return r;
  });
  return in + 1;
}

uint64_t now() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
}
// Reads a special register that contains the time. `in->kind` is 0 for %globaltimer and 64-bit
// clocks, 1 for their low half, and 2 for their high half.
const Instr* read_time(Warp& w, const Instr* in) {
  const uint64_t t = now();
  if (in->kind == 0) {
    store_lanes<uint64_t>(w, in->op[0], [=](unsigned) { return t; });
  } else {
    const auto part = static_cast<uint32_t>(in->kind == 1 ? t : t >> 32);
    store_lanes<uint32_t>(w, in->op[0], [=](unsigned) { return part; });
  }
  return in + 1;
}

// cvta: converts an address of a state space to a generic address or, if `in->kind` is 1, back.
// `in->imm` is the base address of the state space's window.
const Instr* convert_address(Warp& w, const Instr* in) {
  const uint64_t window = static_cast<uint64_t>(in->imm);
  const uint64_t* a = src_lanes<uint64_t>(w, in->op[1]);
  if (in->kind == 0) {
    store_lanes<uint64_t>(w, in->op[0],
                          [=](unsigned i) { return a[i] < kSharedWindow ? a[i] + window : a[i]; });
  } else {
    store_lanes<uint64_t>(w, in->op[0], [=](unsigned i) { return a[i] - window; });
  }
  return in + 1;
}
const Instr* isspacep(Warp& w, const Instr* in) {
  const uint64_t* a = src_lanes<uint64_t>(w, in->op[1]);
  const uint64_t window = static_cast<uint64_t>(in->imm);
  set_pred(w, in->op[0], lane_mask([=](unsigned i) {
             if (window == 0) return a[i] < kSharedWindow;
             return a[i] >= window && a[i] < window + kWindowSize;
           }));
  return in + 1;
}

template <class T>
const Instr* select(Warp& w, const Instr* in) {
  const T* a = src_lanes<T>(w, in->op[1]);
  const T* b = src_lanes<T>(w, in->op[2]);
  const uint32_t p = pred_of(w, in->op[3]);
  store_lanes<T>(w, in->op[0], [=](unsigned i) { return (p >> i & 1) != 0 ? a[i] : b[i]; });
  return in + 1;
}
// slct: a if c >= 0, otherwise b.
template <class T, bool Float>
const Instr* select_by_sign(Warp& w, const Instr* in) {
  const T* a = src_lanes<T>(w, in->op[1]);
  const T* b = src_lanes<T>(w, in->op[2]);
  const int32_t* c = src_lanes<int32_t>(w, in->op[3]);
  store_lanes<T>(w, in->op[0], [=](unsigned i) {
    if (Float) {
      const float f = bit_cast<float>(c[i]);
      return f >= 0 ? a[i] : b[i];
    }
    return c[i] >= 0 ? a[i] : b[i];
  });
  return in + 1;
}

Type unsigned_of(unsigned bytes) {
  return bytes == 2 ? Type::b16 : bytes == 4 ? Type::b32 : Type::b64;
}

bool decode_vector_move(Builder& b, Instr& in, Type type) {
  const bool to_vector = b.operand(0).kind == Operand::vector;
  const Operand& vector = b.operand(to_vector ? 0 : 1);
  const size_t count = vector.parts.size();
  const unsigned large = size_of(type);
  if (count < 2 || count > 4 || large % count != 0) return false;
  const unsigned small = large / static_cast<unsigned>(count);
  if (small < 2) return false;
  if (to_vector) {
    for (size_t k = 0; k < count; ++k) in.op[k] = b.dst(vector.parts[k], small);
    in.op[4] = b.src(b.operand(1), unsigned_of(large));
    if (large == 4) in.run = unpack<uint16_t, uint32_t, 2>;
    if (large == 8)
      in.run = count == 2 ? unpack<uint32_t, uint64_t, 2> : unpack<uint16_t, uint64_t, 4>;
  } else {
    in.op[0] = b.dst(b.operand(0), large);
    for (size_t k = 0; k < count; ++k) in.op[k + 1] = b.src(vector.parts[k], unsigned_of(small));
    if (large == 4) in.run = pack<uint16_t, uint32_t, 2>;
    if (large == 8) in.run = count == 2 ? pack<uint32_t, uint64_t, 2> : pack<uint16_t, uint64_t, 4>;
  }
  return in.run != nullptr;
}

bool decode_mov(Builder& b, Opcode& op, Instr& in) {
  if (op.has("pred")) return false;
  const Type type = op.take_type();
  const unsigned bytes = size_of(type);
  if (bytes < 2) return false;
  const Operand& from = b.operand(1);
  if (b.operand(0).kind == Operand::vector || from.kind == Operand::vector) {
    return decode_vector_move(b, in, type);
  }
  if (from.kind == Operand::reg && from.index < 0) {
    const std::string& name = from.name;
    if (name == "%globaltimer" || name == "%clock64") {
      in.run = read_time;
    } else if (name == "%clock" || name == "%globaltimer_lo") {
      in.run = read_time;
      in.kind = 1;
    } else if (name == "%clock_hi" || name == "%globaltimer_hi") {
      in.run = read_time;
      in.kind = 2;
    }
    if (in.run != nullptr) {
      in.op[0] = b.dst(b.operand(0), in.kind == 0 ? 8 : 4);
      return true;
    }
  }
  in.op[0] = b.dst(b.operand(0), bytes);
  if (from.kind == Operand::symbol) {
    in.op[1] = b.symbol_constant(from, bytes);
  } else {
    in.op[1] = b.src(from, type);
  }
  if (bytes == 2) in.run = move<uint16_t>;
  if (bytes == 4) in.run = move<uint32_t>;
  if (bytes == 8) in.run = move<uint64_t>;
  return in.run != nullptr;
}

bool decode_cvta(Builder& b, Opcode& op, Instr& in) {
  const bool from_generic = op.take("to");
  in.kind = from_generic;
  if (op.take("shared")) {
    in.imm = static_cast<int64_t>(kSharedWindow);
  } else if (op.take("local")) {
    in.imm = static_cast<int64_t>(kLocalWindow);
  } else if (op.take("param")) {
    in.imm = static_cast<int64_t>(kParamWindow);
  } else if (op.take("global") || op.take("const")) {
    in.imm = 0;
  } else {
    return false;
  }
  if (op.take_type() != Type::u64) unsupported(op.line, op.text());
  in.op[0] = b.dst(b.operand(0), 8);
  in.op[1] = b.src(b.operand(1), Type::u64);
  in.run = in.imm == 0 ? move<uint64_t> : convert_address;
  return true;
}

bool decode_select(Builder& b, Opcode& op, Instr& in) {
  const Type type = op.take_type();
  const unsigned bytes = size_of(type);
  in.op[0] = b.dst(b.operand(0), bytes);
  in.op[1] = b.src(b.operand(1), type);
  in.op[2] = b.src(b.operand(2), type);
  if (op.base == "selp") {
    in.op[3] = b.pred_src(b.operand(3));
    if (bytes == 2) in.run = select<uint16_t>;
    if (bytes == 4) in.run = select<uint32_t>;
    if (bytes == 8) in.run = select<uint64_t>;
    return in.run != nullptr;
  }
  op.take("ftz");
  const Type by = op.take_type();
  in.op[3] = b.src(b.operand(3), by);
  const bool real = by == Type::f32;
  if (!real && by != Type::s32) return false;
  if (bytes == 2) in.run = real ? select_by_sign<uint16_t, true> : select_by_sign<uint16_t, false>;
  if (bytes == 4) in.run = real ? select_by_sign<uint32_t, true> : select_by_sign<uint32_t, false>;
  if (bytes == 8) in.run = real ? select_by_sign<uint64_t, true> : select_by_sign<uint64_t, false>;
  return in.run != nullptr;
}

}  // namespace

bool decode_move(Builder& b, Opcode& op, Instr& in) {
  if (op.base == "mov") return decode_mov(b, op, in);
  if (op.base == "cvta") return decode_cvta(b, op, in);
  if (op.base == "selp" || op.base == "slct") return decode_select(b, op, in);
  if (op.base == "isspacep") {
    if (op.take("shared")) {
      op.take("cta");
      in.imm = static_cast<int64_t>(kSharedWindow);
    } else if (op.take("local")) {
      in.imm = static_cast<int64_t>(kLocalWindow);
    } else if (op.take("param")) {
      in.imm = static_cast<int64_t>(kParamWindow);
    } else if (!op.take("global")) {
      return false;
    }
    in.op[0] = b.pred_dst(b.operand(0));
    in.op[1] = b.src(b.operand(1), Type::u64);
    in.run = isspacep;
    return true;
  }
  return false;
}

const Instr* move_b16(Warp& w, const Instr* in) { return move<uint16_t>(w, in); }
const Instr* move_b32(Warp& w, const Instr* in) { return move<uint32_t>(w, in); }
const Instr* move_b64(Warp& w, const Instr* in) { return move<uint64_t>(w, in); }

// ---- comparisons ------------------------------------------------------------------------------
namespace {

struct Eq {
  template <class T>
  static inline bool apply(T a, T b) {
    return a == b;
  }
};
struct Ne {
  template <class T>
  static inline bool apply(T a, T b) {
    return a < b || a > b;
  }
};
struct NeInteger {
  template <class T>
  static inline bool apply(T a, T b) {
    return a != b;
  }
};
struct Lt {
  template <class T>
  static inline bool apply(T a, T b) {
    return a < b;
  }
};
struct Le {
  template <class T>
  static inline bool apply(T a, T b) {
    return a <= b;
  }
};
struct Gt {
  template <class T>
  static inline bool apply(T a, T b) {
    return a > b;
  }
};
struct Ge {
  template <class T>
  static inline bool apply(T a, T b) {
    return a >= b;
  }
};
struct Equ {
  template <class T>
  static inline bool apply(T a, T b) {
    return !(a < b || a > b);
  }
};
struct Neu {
  template <class T>
  static inline bool apply(T a, T b) {
    return !(a == b);
  }
};
struct Ltu {
  template <class T>
  static inline bool apply(T a, T b) {
    return !(a >= b);
  }
};
struct Leu {
  template <class T>
  static inline bool apply(T a, T b) {
    return !(a > b);
  }
};
struct Gtu {
  template <class T>
  static inline bool apply(T a, T b) {
    return !(a <= b);
  }
};
struct Geu {
  template <class T>
  static inline bool apply(T a, T b) {
    return !(a < b);
  }
};
struct Num {
  template <class T>
  static inline bool apply(T a, T b) {
    return a == a && b == b;
  }
};
struct Nan {
  template <class T>
  static inline bool apply(T a, T b) {
    return a != a || b != b;
  }
};

// Stores the results of setp. `m` is the result of the comparison, p = m OP c, and q = !m OP c.
// `in->kind` is OP: 0 none (p = m, q = !m), 1 and, 2 or, 3 xor.
inline void set_results(Warp& w, const Instr* in, uint32_t m) {
  if (in->kind == 0) {
    set_pred(w, in->op[0], m);
    set_pred(w, in->op[3], ~m);
    return;
  }
  const uint32_t c = pred_of(w, in->op[4]);
  const uint32_t p = in->kind == 1 ? m & c : in->kind == 2 ? m | c : m ^ c;
  const uint32_t q = in->kind == 1 ? ~m & c : in->kind == 2 ? ~m | c : ~m ^ c;
  set_pred(w, in->op[0], p);
  set_pred(w, in->op[3], q);
}

template <class T, class Op>
const Instr* compare(Warp& w, const Instr* in) {
  const T* a = src_lanes<T>(w, in->op[1]);
  const T* b = src_lanes<T>(w, in->op[2]);
  set_results(w, in, lane_mask([=](unsigned i) { return Op::template apply<T>(a[i], b[i]); }));
  return in + 1;
}
// Comparison of floats without .ftz, or of 16-bit floats: `Half` is 1 for f16 and 2 for bf16.
template <class T, class Op, int Half>
const Instr* compare_exact(Warp& w, const Instr* in) {
  uint32_t m = 0;
  {
    const FloatMode mode(false);
    if (Half != 0) {
      const uint16_t* a = src_lanes<uint16_t>(w, in->op[1]);
      const uint16_t* b = src_lanes<uint16_t>(w, in->op[2]);
      m = lane_mask([=](unsigned i) {
        const float x = Half == 1 ? float_of_f16(a[i]) : float_of_bf16(a[i]);
        const float y = Half == 1 ? float_of_f16(b[i]) : float_of_bf16(b[i]);
        return Op::template apply<float>(x, y);
      });
    } else {
      const T* a = src_lanes<T>(w, in->op[1]);
      const T* b = src_lanes<T>(w, in->op[2]);
      m = lane_mask([=](unsigned i) { return Op::template apply<T>(a[i], b[i]); });
    }
  }
  set_results(w, in, m);
  return in + 1;
}
// setp of pairs: p compares the low halves, q the high ones.
template <class Op, bool Bf16>
const Instr* compare_pair(Warp& w, const Instr* in) {
  const uint32_t* a = src_lanes<uint32_t>(w, in->op[1]);
  const uint32_t* b = src_lanes<uint32_t>(w, in->op[2]);
  uint32_t m[2] = {0, 0};
  {
    const FloatMode mode(false);
    for (unsigned k = 0; k < 2; ++k) {
      m[k] = lane_mask([=](unsigned i) {
        const auto x = static_cast<uint16_t>(a[i] >> (16 * k));
        const auto y = static_cast<uint16_t>(b[i] >> (16 * k));
        return Bf16 ? Op::template apply<float>(float_of_bf16(x), float_of_bf16(y))
                    : Op::template apply<float>(float_of_f16(x), float_of_f16(y));
      });
    }
  }
  if (in->kind != 0) {
    const uint32_t c = pred_of(w, in->op[4]);
    for (uint32_t& part : m) part = in->kind == 1 ? part & c : in->kind == 2 ? part | c : part ^ c;
  }
  set_pred(w, in->op[0], m[0]);
  set_pred(w, in->op[3], m[1]);
  return in + 1;
}

struct Comparison {
  const char* name;
  Handler integer[8];  // u16 s16 u32 s32 u64 s64
  Handler f32_flushed, f32, f64, f16, bf16, f16x2, bf16x2;
};
#define SC_INTEGER_COMPARISON(Op) \
  {compare<uint16_t, Op>,         \
   compare<int16_t, Op>,          \
   compare<uint32_t, Op>,         \
   compare<int32_t, Op>,          \
   compare<uint64_t, Op>,         \
   compare<int64_t, Op>,          \
   nullptr,                       \
   nullptr}
#define SC_FLOAT_COMPARISON(Op)                                                          \
  compare<float, Op>, compare_exact<float, Op, 0>, compare_exact<double, Op, 0>,         \
      compare_exact<float, Op, 1>, compare_exact<float, Op, 2>, compare_pair<Op, false>, \
      compare_pair<Op, true>
const Comparison kComparisons[] = {
    {"eq", SC_INTEGER_COMPARISON(Eq), SC_FLOAT_COMPARISON(Eq)},
    {"ne", SC_INTEGER_COMPARISON(NeInteger), SC_FLOAT_COMPARISON(Ne)},
    {"lt", SC_INTEGER_COMPARISON(Lt), SC_FLOAT_COMPARISON(Lt)},
    {"le", SC_INTEGER_COMPARISON(Le), SC_FLOAT_COMPARISON(Le)},
    {"gt", SC_INTEGER_COMPARISON(Gt), SC_FLOAT_COMPARISON(Gt)},
    {"ge", SC_INTEGER_COMPARISON(Ge), SC_FLOAT_COMPARISON(Ge)},
    {"lo", SC_INTEGER_COMPARISON(Lt), SC_FLOAT_COMPARISON(Lt)},
    {"ls", SC_INTEGER_COMPARISON(Le), SC_FLOAT_COMPARISON(Le)},
    {"hi", SC_INTEGER_COMPARISON(Gt), SC_FLOAT_COMPARISON(Gt)},
    {"hs", SC_INTEGER_COMPARISON(Ge), SC_FLOAT_COMPARISON(Ge)},
    {"equ", {}, SC_FLOAT_COMPARISON(Equ)},
    {"neu", {}, SC_FLOAT_COMPARISON(Neu)},
    {"ltu", {}, SC_FLOAT_COMPARISON(Ltu)},
    {"leu", {}, SC_FLOAT_COMPARISON(Leu)},
    {"gtu", {}, SC_FLOAT_COMPARISON(Gtu)},
    {"geu", {}, SC_FLOAT_COMPARISON(Geu)},
    {"num", {}, SC_FLOAT_COMPARISON(Num)},
    {"nan", {}, SC_FLOAT_COMPARISON(Nan)},
};

Handler comparison_of(const Comparison& c, Type type, bool flush) {
  switch (type) {
    case Type::b16:
    case Type::u16:
      return c.integer[0];
    case Type::s16:
      return c.integer[1];
    case Type::b32:
    case Type::u32:
      return c.integer[2];
    case Type::s32:
      return c.integer[3];
    case Type::b64:
    case Type::u64:
      return c.integer[4];
    case Type::s64:
      return c.integer[5];
    case Type::f32:
      return flush ? c.f32_flushed : c.f32;
    case Type::f64:
      return c.f64;
    case Type::f16:
      return c.f16;
    case Type::bf16:
      return c.bf16;
    case Type::f16x2:
      return c.f16x2;
    case Type::bf16x2:
      return c.bf16x2;
    default:
      return nullptr;
  }
}

// set: a comparison like setp, with a 32-bit result. op[5] is the destination and `imm` the value
// that means true. The field `guarded`, otherwise the handler for lanes whose guard predicate is
// true, holds the handler of the comparison.
const Instr* set_value(Warp& w, const Instr* in) {
  Instr inner = *in;
  const uint32_t* saved = reinterpret_cast<const uint32_t*>(w.regs + in->op[0]);
  in->guarded(w, &inner);
  const uint32_t m = *saved;
  const auto value = static_cast<uint32_t>(in->imm);
  store_lanes<uint32_t>(w, in->op[5], [=](unsigned i) { return (m >> i & 1) != 0 ? value : 0u; });
  return in + 1;
}

}  // namespace

bool decode_compare(Builder& b, Opcode& op, Instr& in) {
  if (op.base != "setp" && op.base != "set") return false;
  const Comparison* comparison = nullptr;
  for (const Comparison& c : kComparisons) {
    if (op.take(c.name)) {
      comparison = &c;
      break;
    }
  }
  if (comparison == nullptr) return false;
  if (op.take("and")) in.kind = 1;
  if (op.take("or")) in.kind = 2;
  if (op.take("xor")) in.kind = 3;
  const bool flush = op.take("ftz");
  const bool set = op.base == "set";
  const Type result = set ? op.take_type() : Type::none;
  const Type type = op.take_type();
  in.run = comparison_of(*comparison, type, flush);
  if (in.run == nullptr) return false;
  in.op[1] = b.src(b.operand(1), type);
  in.op[2] = b.src(b.operand(2), type);
  if (in.kind != 0) in.op[4] = b.pred_src(b.operand(3));
  in.op[3] = kNoRegister;
  if (!set) {
    in.op[0] = b.pred_dst(b.operand(0));
    if (!b.operand(0).second.empty()) in.op[3] = b.pred_dst(b.operand(0).second[0]);
    return true;
  }
  if (result != Type::u32 && result != Type::s32 && result != Type::f32) return false;
  if (b.statement().guard >= 0) unsupported(op.line, "a guarded " + op.text());
  in.op[5] = b.dst(b.operand(0), 4);
  in.op[0] = b.carry_flag();
  in.imm = result == Type::f32 ? 0x3f800000 : 0xffffffff;
  in.guarded = in.run;
  in.run = set_value;
  return true;
}

}  // namespace ptx
}  // namespace softcuda
