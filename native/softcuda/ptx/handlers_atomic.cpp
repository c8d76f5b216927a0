// Atomic operations (atom, red). The lanes of a warp perform them one after another.
#include <algorithm>

#include "lanes.h"

namespace softcuda {
namespace ptx {
namespace {

// Replaces *p with f(*p) atomically and returns the old value.
template <class T, class F>
inline T update(T* p, F f) {
  T old = __atomic_load_n(p, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(p, &old, f(old), false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {
  }
  return old;
}

struct Add {
  template <class T>
  static inline T apply(T* p, T b, T) {
    return __atomic_fetch_add(p, b, __ATOMIC_SEQ_CST);
  }
};
struct And {
  template <class T>
  static inline T apply(T* p, T b, T) {
    return __atomic_fetch_and(p, b, __ATOMIC_SEQ_CST);
  }
};
struct Or {
  template <class T>
  static inline T apply(T* p, T b, T) {
    return __atomic_fetch_or(p, b, __ATOMIC_SEQ_CST);
  }
};
struct Xor {
  template <class T>
  static inline T apply(T* p, T b, T) {
    return __atomic_fetch_xor(p, b, __ATOMIC_SEQ_CST);
  }
};
struct Exch {
  template <class T>
  static inline T apply(T* p, T b, T) {
    return __atomic_exchange_n(p, b, __ATOMIC_SEQ_CST);
  }
};
struct Cas {
  template <class T>
  static inline T apply(T* p, T b, T c) {
    __atomic_compare_exchange_n(p, &b, c, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return b;
  }
};
struct Min {
  template <class T>
  static inline T apply(T* p, T b, T) {
    return update(p, [=](T x) { return b < x ? b : x; });
  }
};
struct Max {
  template <class T>
  static inline T apply(T* p, T b, T) {
    return update(p, [=](T x) { return x < b ? b : x; });
  }
};
struct Inc {
  template <class T>
  static inline T apply(T* p, T b, T) {
    return update(p, [=](T x) { return x >= b ? T{0} : static_cast<T>(x + 1); });
  }
};
struct Dec {
  template <class T>
  static inline T apply(T* p, T b, T) {
    return update(p, [=](T x) { return x == 0 || x > b ? b : static_cast<T>(x - 1); });
  }
};

// Floating-point additions. Operands and results are the bits of the floats. AddF32 flushes
// denormals, as atom.add.f32 does in global memory. It sets no FloatMode for that, because the
// worker threads always run in this mode.
struct AddF32 {
  template <class T>
  static inline T apply(T* p, T b, T) {
    return update(p, [=](T x) {
      return bit_cast<uint32_t>(canonical(bit_cast<float>(x) + bit_cast<float>(b)));
    });
  }
};
struct AddF64 {
  template <class T>
  static inline T apply(T* p, T b, T) {
    const FloatMode mode(false);
    return update(p, [=](T x) {
      return bit_cast<uint64_t>(canonical(bit_cast<double>(x) + bit_cast<double>(b)));
    });
  }
};
inline uint16_t add_f16(uint16_t a, uint16_t b) {
  return f16_of_float(float_of_f16(a) + float_of_f16(b));
}
inline uint16_t add_bf16(uint16_t a, uint16_t b) {
  return bf16_of_float(static_cast<float>(
      fma_odd(static_cast<double>(float_of_bf16(a)), 1.0, static_cast<double>(float_of_bf16(b)))));
}
template <uint16_t (*AddHalf)(uint16_t, uint16_t)>
struct AddHalves {
  template <class T>
  static inline T apply(T* p, T b, T) {
    const FloatMode mode(false);
    return update(p, [=](T x) {
      uint32_t r = AddHalf(static_cast<uint16_t>(x), static_cast<uint16_t>(b));
      if (sizeof(T) == 4) {
        r |= uint32_t{AddHalf(static_cast<uint16_t>(uint32_t{x} >> 16),
                              static_cast<uint16_t>(uint32_t{b} >> 16))}
             << 16;
      }
      return static_cast<T>(r);
    });
  }
};

// op[0] is the destination or kNoRegister, op[1] the address, op[2] and op[3] the operands. If the
// operands are vectors, Kernel::operand_pool has them from index op[4] on.
template <class T, class Op>
const Instr* atomic(Warp& w, const Instr* in) {
  const auto space = static_cast<Space>(in->aux >> kSpaceShift & 7);
  const bool wide = (in->aux & kWide) != 0;
  Block& block = *w.block;
  const int32_t* pool = block.kernel->operand_pool.data() + in->op[4];
  uint32_t left = w.mask;
  char* at[kLanes] = {};
  if ((in->aux & kRelease) != 0) publish_stores(w, in->aux);
  // With SOFTCUDA_PTX_SEED, the lanes perform the operation in turn, beginning with a random lane.
  const unsigned rotate = block.adversarial ? static_cast<unsigned>(block.next_random() & 31) : 0;
  for (unsigned n = 0; n < kLanes && left != 0; ++n) {
    const unsigned lane = (n + rotate) & 31;
    if ((left >> lane & 1) == 0) continue;
    left &= ~(1u << lane);
    const uint64_t base =
        wide ? src_lanes<uint64_t>(w, in->op[1])[lane] : src_lanes<uint32_t>(w, in->op[1])[lane];
    const unsigned bytes = sizeof(T) * in->count;
    char* p =
        resolve_address(w, in, space, lane, base + static_cast<uint64_t>(in->imm), bytes, true);
    if (p == nullptr) return in;
    at[lane] = p;
    for (unsigned k = 0; k < in->count; ++k) {
      const int32_t source = in->count == 1 ? in->op[2] : pool[in->count + k];
      const int32_t to = in->count == 1 ? in->op[0] : pool[k];
      const T b = src_lanes<T>(w, source)[lane];
      const T c = src_lanes<T>(w, in->op[3])[lane];
      const T old = Op::template apply<T>(reinterpret_cast<T*>(p) + k, b, c);
      if (to >= 0) dst_lanes<T>(w, to)[lane] = old;
    }
  }
  if ((in->aux & kAcquire) != 0) acquire_loads(w, in->aux);
  if (block.races != nullptr) note_strong_read(w, in, at);
  return in + 1;
}

Handler find(const std::string& name, Type type) {
#define SC_ATOMIC(Op, T) atomic<T, Op>
#define SC_BITS(name_of, Op)                                \
  if (name == name_of) {                                    \
    if (size_of(type) == 4) return SC_ATOMIC(Op, uint32_t); \
    if (size_of(type) == 8) return SC_ATOMIC(Op, uint64_t); \
    return nullptr;                                         \
  }
  if (name == "add") {
    switch (type) {
      case Type::f32:
        return SC_ATOMIC(AddF32, uint32_t);
      case Type::f64:
        return SC_ATOMIC(AddF64, uint64_t);
      case Type::f16:
        return SC_ATOMIC(AddHalves<add_f16>, uint16_t);
      case Type::f16x2:
        return SC_ATOMIC(AddHalves<add_f16>, uint32_t);
      case Type::bf16:
        return SC_ATOMIC(AddHalves<add_bf16>, uint16_t);
      case Type::bf16x2:
        return SC_ATOMIC(AddHalves<add_bf16>, uint32_t);
      default:
        break;
    }
  }
  if (type == Type::f32 || type == Type::f64) return nullptr;
  SC_BITS("add", Add)
  SC_BITS("and", And)
  SC_BITS("or", Or)
  SC_BITS("xor", Xor)
  SC_BITS("exch", Exch)
  if (name == "cas" && size_of(type) == 2) return SC_ATOMIC(Cas, uint16_t);
  SC_BITS("cas", Cas)
  SC_BITS("inc", Inc)
  SC_BITS("dec", Dec)
  const bool is_signed = type == Type::s32 || type == Type::s64;
  const bool wide = size_of(type) == 8;
  if (size_of(type) < 4) return nullptr;
  if (name == "min") {
    if (wide) return is_signed ? SC_ATOMIC(Min, int64_t) : SC_ATOMIC(Min, uint64_t);
    return is_signed ? SC_ATOMIC(Min, int32_t) : SC_ATOMIC(Min, uint32_t);
  }
  if (name == "max") {
    if (wide) return is_signed ? SC_ATOMIC(Max, int64_t) : SC_ATOMIC(Max, uint64_t);
    return is_signed ? SC_ATOMIC(Max, int32_t) : SC_ATOMIC(Max, uint32_t);
  }
  return nullptr;
}

}  // namespace

bool decode_atomic(Builder& b, Opcode& op, Instr& in) {
  const bool red = op.base == "red";
  if (op.base != "atom" && !red) return false;
  if (op.has("async") || op.has("shared::cluster")) return false;
  Space space = Space::generic;
  if (op.take("global")) space = Space::global;
  if (op.take("shared") || op.take("shared::cta")) space = Space::shared;
  uint32_t order = kStrong;
  op.take("relaxed");
  if (op.take("acquire")) order |= kAcquire;
  if (op.take("release")) order |= kRelease;
  if (op.take("acq_rel")) order |= kAcquire | kRelease;
  op.take("gpu");
  if (op.take("sys")) order |= kSystemScope;
  if (!op.take("cta") && !op.take("cluster")) order |= kDeviceScope;
  op.take_cache_hints();
  op.take("noftz");
  const unsigned count = op.take("v2") ? 2 : op.take("v4") ? 4 : op.take("v8") ? 8 : 1;
  std::string name;
  for (const char* known : {"and", "or", "xor", "cas", "exch", "add", "inc", "dec", "min", "max"}) {
    if (op.take(known)) name = known;
  }
  const Type type = op.take_type();
  in.run = find(name, type);
  if (in.run == nullptr) return false;
  const unsigned bytes = size_of(type);
  const size_t first = red ? 0 : 1;
  unsigned width = 8;
  in.count = static_cast<uint16_t>(count);
  in.op[1] = b.address(b.operand(first), &space, &width, &in.imm);
  in.aux = (width == 8 ? kWide : 0) | order | static_cast<uint32_t>(space) << kSpaceShift;
  in.site = b.new_site();
  const Operand& value = b.operand(first + 1);
  in.op[0] = kNoRegister;
  in.op[4] = 0;
  if (count == 1) {
    if (!red) in.op[0] = b.dst(b.operand(0), bytes);
    in.op[2] = b.src(value, type);
  } else {
    std::vector<int32_t> pool(count, kNoRegister);
    if (value.parts.size() != count || (!red && b.operand(0).parts.size() != count))
      b.refuse_operand("the number of elements does not match");
    if (!red) {
      for (unsigned k = 0; k < count; ++k) pool[k] = b.dst(b.operand(0).parts.at(k), bytes);
    }
    for (const Operand& part : value.parts) pool.push_back(b.src(part, type));
    in.op[4] = static_cast<int32_t>(b.pool_operands(pool));
    in.op[2] = pool[count];
  }
  in.op[3] = name == "cas" ? b.src(b.operand(first + 2), type) : b.constant(0, bytes);
  return true;
}

}  // namespace ptx
}  // namespace softcuda
