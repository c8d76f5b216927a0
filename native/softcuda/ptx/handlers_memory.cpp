// Loads and stores in all state spaces (INVARIANTS.md P6, P7).
#include "counts.h"
#include "lanes.h"

namespace softcuda {
namespace ptx {
namespace {

inline uint64_t lane_address(const Warp& w, const Instr* in, unsigned operand, unsigned lane) {
  const int32_t o = in->op[operand];
  const uint64_t base =
      (in->aux & kWide) != 0 ? src_lanes<uint64_t>(w, o)[lane] : src_lanes<uint32_t>(w, o)[lane];
  return base + static_cast<uint64_t>(in->imm);
}

// Returns the host memory of one lane's access, or null after a fault.
char* resolve_lane(Warp& w, const Instr* in, Space space, unsigned lane, uint64_t a, unsigned bytes,
                   bool write) {
  Block& b = *w.block;
  if (space == Space::generic) {
    if (a < kSharedWindow) {
      space = Space::global;
    } else if (a < kLocalWindow) {
      space = Space::shared;
      a -= kSharedWindow;
    } else if (a < kParamWindow) {
      space = Space::local;
      a -= kLocalWindow;
    } else {
      space = Space::param;
      a -= kParamWindow;
    }
  } else if (space == Space::param && a >= kLocalWindow) {
    // The address is generic: that of a parameter of an inlined function, which is in local memory,
    // or that of a kernel parameter.
    space = a < kParamWindow ? Space::local : Space::param;
    a -= a < kParamWindow ? kLocalWindow : kParamWindow;
  }
  if ((a & (bytes - 1)) != 0) {
    misaligned(w, in, lane, a, bytes);
    return nullptr;
  }
  switch (space) {
    case Space::shared:
      if (a < kSharedBase || a > b.shared_end || bytes > b.shared_end - a) {
        bad_window_access(w, in, lane, "shared", a, bytes, write);
        return nullptr;
      }
      if (b.racecheck) note_shared(w, in, lane, static_cast<uint32_t>(a), bytes, write);
      if (b.counts != nullptr) b.counts->note_window(in, space, bytes, write);
      return b.shared + a;
    case Space::local: {
      const unsigned size = b.kernel->local_bytes;
      if (a < kLocalBase || a > size || bytes > size - a) {
        bad_window_access(w, in, lane, "local", a, bytes, write);
        return nullptr;
      }
      if (b.counts != nullptr) b.counts->note_window(in, space, bytes, write);
      return b.local + (size_t{w.index} * kLanes + lane) * size + a;
    }
    case Space::param: {
      const unsigned size = b.kernel->param_bytes;
      if (a > size || bytes > size - a || write) {
        bad_window_access(w, in, lane, "parameter", a, bytes, write);
        return nullptr;
      }
      return const_cast<char*>(b.params) + a;
    }
    default:
      return resolve_global(w, in, lane, a, bytes, write);
  }
}

// Resolves the addresses of all active lanes. Inactive lanes get the address of scratch memory.
// Returns false after a fault.
template <Space S>
bool resolve(Warp& w, const Instr* in, unsigned operand, unsigned bytes, bool write, char** at) {
  Block& b = *w.block;
  const auto offset = static_cast<uint64_t>(in->imm);
  const bool wide = (in->aux & kWide) != 0;
  const uint64_t align = bytes - 1;
  // The fast path: all lanes are active, and no lane's access is out of bounds or misaligned.
  const bool checked = S == Space::shared ? b.checks_shared : b.checks_accesses;
  if ((S == Space::global || S == Space::shared) && w.mask == kAllLanes && !checked) {
    alignas(64) uint64_t a[kLanes];
    if (wide) {
      const uint64_t* base = src_lanes<uint64_t>(w, in->op[operand]);
      SC_LANES a[i] = base[i] + offset;
    } else {
      const uint32_t* base = src_lanes<uint32_t>(w, in->op[operand]);
      SC_LANES a[i] = base[i] + offset;
    }
    uint64_t from = kSharedBase;
    uint64_t span = b.shared_end - kSharedBase;
    uint64_t delta = reinterpret_cast<uint64_t>(b.shared);
    if (S == Space::global) {
      const Site& site = b.sites[in->site];
      from = site.from;
      span = site.span;
      delta = static_cast<uint64_t>(site.delta);
    }
    if (span >= bytes) {
      const uint64_t last = span - bytes;
      uint64_t bad = 0;
      SC_LANES bad |= (a[i] - from > last ? 1u : 0u) | (a[i] & align);
      if (bad == 0) {
        SC_LANES at[i] = reinterpret_cast<char*>(a[i] + delta);
        return true;
      }
    }
  }
  for (unsigned i = 0; i < kLanes; ++i) {
    if ((w.mask >> i & 1) == 0) {
      at[i] = b.scratch;
      continue;
    }
    at[i] = resolve_lane(w, in, S, i, lane_address(w, in, operand, i), bytes, write);
    if (at[i] == nullptr) return false;
  }
  return true;
}

template <class T>
inline T load_volatile(const char* p) {
  return __atomic_load_n(reinterpret_cast<const T*>(p), __ATOMIC_RELAXED);
}
template <class T>
inline void store_volatile(char* p, T value) {
  __atomic_store_n(reinterpret_cast<T*>(p), value, __ATOMIC_RELAXED);
}

inline const int32_t* element_operands(const Warp& w, const Instr* in) {
  return in->count == 1 ? &in->op[0] : w.block->kernel->operand_pool.data() + in->op[2];
}

// Whether an access uses the store buffers and the loaded values of host memory (stores.cpp).
template <Space S>
inline bool uses_stores(const Warp& w, const Instr* in) {
  return (S == Space::global || S == Space::generic) && w.block->stores != nullptr &&
         (in->aux & kBuffered) != 0;
}

// Loads `count` elements of type M and stores them in registers of type D. op[1] is the address.
// For one element op[0] is the destination; otherwise Kernel::operand_pool has the destinations.
template <Space S, class M, class D>
const Instr* load(Warp& w, const Instr* in) {
  alignas(64) char* at[kLanes];
  if (!resolve<S>(w, in, 1, sizeof(M) * in->count, false, at)) return in;
  const int32_t* to = element_operands(w, in);
  if (uses_stores<S>(w, in)) forward_stores(w, in, at, sizeof(M) * in->count);
  if ((in->aux & kStrong) != 0) {
    for (unsigned k = 0; k < in->count; ++k) {
      store_lanes<D>(w, to[k], [&](unsigned i) {
        return static_cast<D>(load_volatile<M>(at[i] + k * sizeof(M)));
      });
    }
    if ((in->aux & kAcquire) != 0) {
      __atomic_thread_fence(__ATOMIC_ACQUIRE);
      acquire_loads(w, in->aux);
    }
    if (w.block->races != nullptr) note_strong_read(w, in, at);
    return in + 1;
  }
  for (unsigned k = 0; k < in->count; ++k) {
    store_lanes<D>(
        w, to[k], [&](unsigned i) { return static_cast<D>(reinterpret_cast<const M*>(at[i])[k]); });
  }
  return in + 1;
}

// Stores elements of type M from registers of type D. op[1] is the address, op[0] the source.
template <Space S, class M, class D>
const Instr* store(Warp& w, const Instr* in) {
  alignas(64) char* at[kLanes];
  if ((in->aux & kRelease) != 0) publish_stores(w, in->aux);
  if (!resolve<S>(w, in, 1, sizeof(M) * in->count, true, at)) return in;
  const int32_t* from = element_operands(w, in);
  const bool buffered = uses_stores<S>(w, in);
  if (buffered) begin_stores(w, at);
  if ((in->aux & kRelease) != 0) __atomic_thread_fence(__ATOMIC_RELEASE);
  for (unsigned k = 0; k < in->count; ++k) {
    const D* a = src_lanes<D>(w, from[k]);
    if ((in->aux & kStrong) != 0) {
      for (unsigned i = 0; i < kLanes; ++i) {
        store_volatile<M>(at[i] + k * sizeof(M), static_cast<M>(a[i]));
      }
    } else {
      for (unsigned i = 0; i < kLanes; ++i) {
        reinterpret_cast<M*>(at[i])[k] = static_cast<M>(a[i]);
      }
    }
  }
  if (buffered) end_stores(w, sizeof(M) * in->count);
  return in + 1;
}

// ld.param with a constant address, which loads the same value for all lanes.
template <class M, class D>
const Instr* load_param(Warp& w, const Instr* in) {
  const int32_t* to = element_operands(w, in);
  for (unsigned k = 0; k < in->count; ++k) {
    M value{};
    std::memcpy(&value, w.block->params + in->imm + k * sizeof(M), sizeof value);
    store_lanes<D>(w, to[k], [=](unsigned) { return static_cast<D>(value); });
  }
  return in + 1;
}

enum class Kind { load, store, param };
template <Kind K, Space S, class M, class D>
Handler handler_for() {
  if (K == Kind::load) return load<S, M, D>;
  if (K == Kind::store) return store<S, M, D>;
  return load_param<M, D>;
}
template <Kind K, class M, class D>
Handler in_space(Space space) {
  if (K == Kind::param) return load_param<M, D>;
  switch (space) {
    case Space::global:
      return handler_for<K, Space::global, M, D>();
    case Space::shared:
      return handler_for<K, Space::shared, M, D>();
    case Space::local:
      return handler_for<K, Space::local, M, D>();
    case Space::param:
      return handler_for<K, Space::param, M, D>();
    default:
      return handler_for<K, Space::generic, M, D>();
  }
}
template <Kind K, class M>
Handler to_register(Space space, unsigned bytes, bool extends) {
  constexpr bool kSigned = std::is_signed<M>::value;
  switch (bytes) {
    case 2:
      if (sizeof(M) > 2) return nullptr;
      return kSigned && extends ? in_space<K, M, int16_t>(space) : in_space<K, M, uint16_t>(space);
    case 4:
      if (sizeof(M) > 4) return nullptr;
      return kSigned && extends ? in_space<K, M, int32_t>(space) : in_space<K, M, uint32_t>(space);
    case 8:
      return kSigned && extends ? in_space<K, M, int64_t>(space) : in_space<K, M, uint64_t>(space);
    default:
      return nullptr;
  }
}
// Returns the handler for an element type and a register size. Signed elements that are smaller
// than the register are extended by their sign.
template <Kind K>
Handler find(Space space, Type type, unsigned bytes) {
  switch (type) {
    case Type::b8:
    case Type::u8:
      return to_register<K, uint8_t>(space, bytes, false);
    case Type::s8:
      return to_register<K, int8_t>(space, bytes, true);
    case Type::b16:
    case Type::u16:
    case Type::f16:
    case Type::bf16:
      return to_register<K, uint16_t>(space, bytes, false);
    case Type::s16:
      if (bytes == 2) return to_register<K, uint16_t>(space, bytes, false);
      return to_register<K, int16_t>(space, bytes, true);
    case Type::b32:
    case Type::u32:
    case Type::f32:
    case Type::f16x2:
    case Type::bf16x2:
      return to_register<K, uint32_t>(space, bytes, false);
    case Type::s32:
      if (bytes == 4) return to_register<K, uint32_t>(space, bytes, false);
      return to_register<K, int32_t>(space, bytes, true);
    case Type::b64:
    case Type::u64:
    case Type::s64:
    case Type::f64:
      return to_register<K, uint64_t>(space, bytes, false);
    default:
      return nullptr;
  }
}

void take_order(Opcode& op, Instr& in) {
  // A volatile access has the same effect as a relaxed access with scope .sys.
  if (op.take("volatile")) in.aux |= kStrong | kDeviceScope | kSystemScope;
  if (op.take("mmio") || op.take("relaxed")) in.aux |= kStrong;
  if (op.take("acquire")) in.aux |= kStrong | kAcquire;
  if (op.take("release")) in.aux |= kStrong | kRelease;
  if (op.take("nc")) in.aux |= kNonCoherent;
  op.take("weak");
  op.take("relaxed");
  for (const char* scope : {"cta", "cluster"}) op.take(scope);
  if (op.take("gpu")) in.aux |= kDeviceScope;
  if (op.take("sys")) in.aux |= kDeviceScope | kSystemScope;
  if ((in.aux & kStrong) == 0) in.aux |= kBuffered;
}

Space take_space(Opcode& op) {
  if (op.take("global")) return Space::global;
  if (op.take("shared") || op.take("shared::cta")) return Space::shared;
  if (op.take("local")) return Space::local;
  if (op.take("param") || op.take("param::entry") || op.take("param::func")) return Space::param;
  if (op.take("const")) return Space::global;
  return Space::generic;
}

unsigned take_vector(Opcode& op) {
  if (op.take("v2")) return 2;
  if (op.take("v4")) return 4;
  if (op.take("v8")) return 8;
  return 1;
}

bool decode_access(Builder& b, Opcode& op, Instr& in, bool is_store) {
  Space space = take_space(op);
  take_order(op, in);
  op.take_cache_hints();
  const unsigned count = take_vector(op);
  const Type type = op.take_type();
  const unsigned element = size_of(type);
  if (element == 0 || element > 8 || element * count > 32) return false;
  in.count = static_cast<uint16_t>(count);
  const Operand& values = b.operand(is_store ? 1 : 0);
  std::vector<const Operand*> elements;
  if (values.kind == Operand::vector) {
    for (const Operand& part : values.parts) elements.push_back(&part);
  } else {
    elements.push_back(&values);
  }
  if (elements.size() != count) b.refuse_operand("the number of elements does not match");
  unsigned width = 8;
  int64_t offset = 0;
  const Operand& memory = b.operand(is_store ? 0 : 1);
  in.op[1] = b.address(memory, &space, &width, &offset);
  in.imm = offset;
  if (width == 8) in.aux |= kWide;
  in.site = b.new_site();
  // The size of the operand registers. For constant operands, it is the size of an element.
  unsigned bytes = 0;
  for (const Operand* o : elements) bytes = std::max(bytes, b.register_bytes(*o));
  if (bytes == 0) bytes = std::max(is_store ? 2u : 4u, element);
  std::vector<int32_t> operands;
  for (const Operand* o : elements) {
    if (o->kind == Operand::reg && b.register_bytes(*o) != bytes) {
      b.refuse_operand("the registers differ in size");
    }
    const Type register_type = bytes == 2 ? Type::b16 : bytes == 4 ? Type::b32 : Type::b64;
    const bool constant_float = o->kind == Operand::real;
    operands.push_back(is_store ? b.src(*o, constant_float ? type : register_type)
                                : b.dst(*o, bytes));
  }
  if (count == 1) {
    in.op[0] = operands[0];
  } else {
    in.op[2] = static_cast<int32_t>(b.pool_operands(operands));
  }
  const bool constant_address = (in.op[1] & kConstant) != 0;
  if (!is_store && space == Space::param && constant_address) {
    // A constant address of a parameter is checked now, so load_param() does not check it.
    uint64_t at = 0;
    if (!b.constant_value(in.op[1], &at)) return false;
    at += static_cast<uint64_t>(offset);
    const uint64_t size = b.kernel().param_bytes;
    if (at > size || element * count > size - at) {
      b.refuse_operand("the address is outside of the parameters");
    }
    in.imm = static_cast<int64_t>(at);
    in.run = find<Kind::param>(space, type, bytes);
    return in.run != nullptr;
  }
  in.run = is_store ? find<Kind::store>(space, type, bytes) : find<Kind::load>(space, type, bytes);
  return in.run != nullptr;
}

const Instr* no_operation(Warp&, const Instr* in) { return in + 1; }

// prefetch and other hints: the address is not checked.
bool decode_hint(Opcode& op, Instr& in) {
  while (!op.finished()) op.take_any();
  in.run = no_operation;
  return true;
}

}  // namespace

bool decode_memory(Builder& b, Opcode& op, Instr& in) {
  if (op.base == "ld" || op.base == "ldu") return decode_access(b, op, in, false);
  if (op.base == "st") return decode_access(b, op, in, true);
  if (op.base == "prefetch" || op.base == "prefetchu" || op.base == "applypriority" ||
      op.base == "discard" || op.base == "createpolicy") {
    if (op.base == "createpolicy" || op.has("tensor")) return false;
    return decode_hint(op, in);
  }
  return false;
}

// The handlers of other instruction families that access memory call this function, too.
char* resolve_address(Warp& w, const Instr* in, Space space, unsigned lane, uint64_t address,
                      unsigned bytes, bool write) {
  return resolve_lane(w, in, space, lane, address, bytes, write);
}

}  // namespace ptx
}  // namespace softcuda
