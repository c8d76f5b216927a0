// Warp-synchronous operations: shuffles, votes, matches, reductions and bar.warp.sync. They run
// when all lanes of their member mask have reached the instruction (INVARIANTS.md P9).
#include "lanes.h"

namespace softcuda {
namespace ptx {
namespace {

// Calls body(lanes) once for each member mask of the active lanes, with the lanes that have this
// mask. Returns the next instruction, or the same instruction if lanes of a mask have not arrived
// yet.
template <class F>
inline const Instr* for_members(Warp& w, const Instr* in, int32_t mask_operand, F body) {
  const uint32_t active = active_lanes(w, in);
  if (active == 0) return in + 1;
  const uint32_t* masks = src_lanes<uint32_t>(w, mask_operand);
  // All lanes usually have the same mask.
  const uint32_t first = masks[__builtin_ctz(active)];
  if ((first & w.live()) == active) {
    uint32_t different = 0;
    SC_LANES different |= (active >> i & 1) != 0 ? masks[i] ^ first : 0u;
    if (different == 0) {
      const uint32_t saved = w.mask;
      w.mask = active;
      body(active);
      w.mask = saved;
      return in + 1;
    }
  }
  for (uint32_t left = active; left != 0; left &= left - 1) {
    const auto lane = static_cast<unsigned>(__builtin_ctz(left));
    if ((masks[lane] >> lane & 1) == 0) {
      w.block->fail(CUDA_ERROR_LAUNCH_FAILED, &w, static_cast<int>(lane), in,
                    "the thread is not in its own member mask " + hex(masks[lane]));
      return in;
    }
    if ((masks[lane] & w.live() & ~active) != 0) return wait_for_lanes(w, in);
    for (uint32_t other = masks[lane] & active; other != 0; other &= other - 1) {
      const auto k = static_cast<unsigned>(__builtin_ctz(other));
      if (masks[k] == masks[lane]) continue;
      w.block->fail(CUDA_ERROR_LAUNCH_FAILED, &w, static_cast<int>(lane), in,
                    "lanes " + std::to_string(lane) + " and " + std::to_string(k) +
                        " have the member masks " + hex(masks[lane]) + " and " + hex(masks[k]));
      return in;
    }
  }
  const uint32_t saved = w.mask;
  for (uint32_t left = active; left != 0;) {
    const uint32_t group = masks[__builtin_ctz(left)] & active;
    w.mask = group;
    body(group);
    left &= ~group;
  }
  w.mask = saved;
  return in + 1;
}

enum ShuffleKind : uint16_t { kUp, kDown, kBfly, kIdx };

// Returns the source lane of a shuffle. Sets `in_range` to whether it is in the lane's segment.
inline unsigned source_lane(unsigned kind, unsigned lane, uint32_t b, uint32_t c, bool* in_range) {
  const unsigned segment = c >> 8 & 31;
  const unsigned clamp = c & 31;
  const unsigned first = lane & segment;
  const unsigned last = first | (clamp & ~segment);
  const unsigned n = b & 31;
  int j = 0;
  switch (kind) {
    case kUp:
      j = static_cast<int>(lane) - static_cast<int>(n);
      *in_range = j >= static_cast<int>(last);
      break;
    case kDown:
      j = static_cast<int>(lane + n);
      *in_range = j <= static_cast<int>(last);
      break;
    case kBfly:
      j = static_cast<int>(lane ^ n);
      *in_range = j <= static_cast<int>(last);
      break;
    default:
      j = static_cast<int>(first | (n & ~segment));
      *in_range = j <= static_cast<int>(last);
      break;
  }
  return *in_range ? static_cast<unsigned>(j) : lane;
}

const Instr* shuffle(Warp& w, const Instr* in) {
  return for_members(w, in, in->op[5], [&](uint32_t lanes) {
    const uint32_t* a = src_lanes<uint32_t>(w, in->op[1]);
    const uint32_t* b = src_lanes<uint32_t>(w, in->op[2]);
    const uint32_t* c = src_lanes<uint32_t>(w, in->op[3]);
    alignas(64) uint32_t r[kLanes];
    uint32_t valid = 0;
    for (unsigned i = 0; i < kLanes; ++i) {
      bool in_range = false;
      const unsigned j = source_lane(in->kind, i, b[i], c[i], &in_range);
      // If the source lane does not take part, all bits of the result are set (INVARIANTS.md X8).
      r[i] = (lanes >> j & 1) != 0 ? a[j] : kAllLanes;
      valid |= in_range ? 1u << i : 0u;
    }
    store_lanes<uint32_t>(w, in->op[0], [&](unsigned i) { return r[i]; });
    set_pred(w, in->op[4], valid);
  });
}

// vote. `in->kind` is the mode: 0 all, 1 any, 2 uni, 3 ballot.
const Instr* vote(Warp& w, const Instr* in) {
  return for_members(w, in, in->op[2], [&](uint32_t lanes) {
    const uint32_t m = pred_of(w, in->op[1]) & lanes;
    bool result = false;
    switch (in->kind) {
      case 0:
        result = m == lanes;
        break;
      case 1:
        result = m != 0;
        break;
      case 2:
        result = m == lanes || m == 0;
        break;
      default:
        store_lanes<uint32_t>(w, in->op[0], [=](unsigned) { return m; });
        return;
    }
    set_pred(w, in->op[0], result ? kAllLanes : 0u);
  });
}

template <class T>
const Instr* match(Warp& w, const Instr* in) {
  return for_members(w, in, in->op[2], [&](uint32_t lanes) {
    const T* a = src_lanes<T>(w, in->op[1]);
    alignas(64) uint32_t r[kLanes] = {};
    bool all = true;
    for (uint32_t left = lanes; left != 0; left &= left - 1) {
      const auto i = static_cast<unsigned>(__builtin_ctz(left));
      for (uint32_t other = lanes; other != 0; other &= other - 1) {
        const auto j = static_cast<unsigned>(__builtin_ctz(other));
        if (a[i] == a[j]) r[i] |= 1u << j;
      }
      all = all && r[i] == lanes;
    }
    if (in->kind != 0) {  // match.all
      const uint32_t value = all ? lanes : 0u;
      store_lanes<uint32_t>(w, in->op[0], [=](unsigned) { return value; });
      set_pred(w, in->op[3], all ? kAllLanes : 0u);
    } else {
      store_lanes<uint32_t>(w, in->op[0], [&](unsigned i) { return r[i]; });
    }
  });
}

enum ReduceKind : uint16_t { kAdd, kMin, kMax, kAnd, kOr, kXor };
template <class T>
const Instr* reduce(Warp& w, const Instr* in) {
  return for_members(w, in, in->op[2], [&](uint32_t lanes) {
    const T* a = src_lanes<T>(w, in->op[1]);
    T r = a[__builtin_ctz(lanes)];
    for (uint32_t left = lanes & (lanes - 1); left != 0; left &= left - 1) {
      const T x = a[__builtin_ctz(left)];
      switch (in->kind) {
        case kAdd:
          r = static_cast<T>(static_cast<uint32_t>(r) + static_cast<uint32_t>(x));
          break;
        case kMin:
          r = x < r ? x : r;
          break;
        case kMax:
          r = r < x ? x : r;
          break;
        case kAnd:
          r &= x;
          break;
        case kOr:
          r |= x;
          break;
        default:
          r ^= x;
          break;
      }
    }
    store_lanes<T>(w, in->op[0], [=](unsigned) { return r; });
  });
}
// redux.sync of f32. `in->aux` is a sum of 1 (absolute values) and 2 (if an operand is NaN, the
// result is NaN).
const Instr* reduce_f32(Warp& w, const Instr* in) {
  return for_members(w, in, in->op[2], [&](uint32_t lanes) {
    const FloatMode mode(false);
    const float* a = src_lanes<float>(w, in->op[1]);
    float r = bit_cast<float>(0x7fffffffu);
    bool nan = false;
    for (uint32_t left = lanes; left != 0; left &= left - 1) {
      float x = a[__builtin_ctz(left)];
      if ((in->aux & 1) != 0) x = std::fabs(x);
      nan = nan || x != x;
      if (x != x) continue;
      const bool better = in->kind == kMin ? x < r : r < x;
      if (r != r || better || (x == r && std::signbit(x) == (in->kind == kMin))) r = x;
    }
    if (nan && (in->aux & 2) != 0) r = bit_cast<float>(0x7fffffffu);
    store_lanes<float>(w, in->op[0], [=](unsigned) { return r; });
  });
}

const Instr* warp_barrier(Warp& w, const Instr* in) {
  return for_members(w, in, in->op[0], [](uint32_t) {});
}
const Instr* elect(Warp& w, const Instr* in) {
  return for_members(w, in, in->op[2], [&](uint32_t lanes) {
    const auto leader = static_cast<uint32_t>(__builtin_ctz(lanes));
    store_lanes<uint32_t>(w, in->op[0], [=](unsigned) { return leader; });
    set_pred(w, in->op[3], 1u << leader);
  });
}
const Instr* active_mask(Warp& w, const Instr* in) {
  const uint32_t m = w.mask;
  store_lanes<uint32_t>(w, in->op[0], [=](unsigned) { return m; });
  return in + 1;
}

bool decode_shuffle(Builder& b, Opcode& op, Instr& in) {
  if (!op.take("sync")) return false;
  if (op.take("up")) {
    in.kind = kUp;
  } else if (op.take("down")) {
    in.kind = kDown;
  } else if (op.take("bfly")) {
    in.kind = kBfly;
  } else if (op.take("idx")) {
    in.kind = kIdx;
  } else {
    return false;
  }
  if (op.take_type() != Type::b32) return false;
  const Operand& d = b.operand(0);
  in.op[0] = b.dst(d, 4);
  in.op[4] = d.second.empty() ? kNoRegister : b.pred_dst(d.second[0]);
  in.op[1] = b.src(b.operand(1), Type::b32);
  in.op[2] = b.src(b.operand(2), Type::b32);
  in.op[3] = b.src(b.operand(3), Type::b32);
  in.op[5] = b.src(b.operand(4), Type::b32);
  in.run = in.guarded = shuffle;
  return true;
}

bool decode_vote(Builder& b, Opcode& op, Instr& in) {
  if (!op.take("sync")) return false;
  constexpr const char* kKinds[] = {"all", "any", "uni", "ballot"};
  bool found = false;
  for (uint16_t kind = 0; kind < 4; ++kind) {
    if (op.take(kKinds[kind])) {
      in.kind = kind;
      found = true;
    }
  }
  if (!found) return false;
  op.take_type();
  in.op[0] = in.kind == 3 ? b.dst(b.operand(0), 4) : b.pred_dst(b.operand(0));
  in.op[1] = b.pred_src(b.operand(1));
  in.op[2] = b.src(b.operand(2), Type::b32);
  in.run = in.guarded = vote;
  return true;
}

bool decode_match(Builder& b, Opcode& op, Instr& in) {
  if (!op.take("sync")) return false;
  in.kind = op.take("all");
  if (in.kind == 0 && !op.take("any")) return false;
  const Type type = op.take_type();
  const Operand& d = b.operand(0);
  in.op[0] = b.dst(d, 4);
  in.op[3] = d.second.empty() ? kNoRegister : b.pred_dst(d.second[0]);
  in.op[1] = b.src(b.operand(1), type);
  in.op[2] = b.src(b.operand(2), Type::b32);
  in.run = in.guarded = size_of(type) == 8 ? match<uint64_t> : match<uint32_t>;
  return true;
}

bool decode_redux(Builder& b, Opcode& op, Instr& in) {
  if (!op.take("sync")) return false;
  constexpr const char* kKinds[] = {"add", "min", "max", "and", "or", "xor"};
  for (uint16_t kind = 0; kind < 6; ++kind) {
    if (op.take(kKinds[kind])) in.kind = kind;
  }
  in.aux = (op.take("abs") ? 1u : 0u) | (op.take("NaN") ? 2u : 0u);
  const Type type = op.take_type();
  in.op[0] = b.dst(b.operand(0), 4);
  in.op[1] = b.src(b.operand(1), type);
  in.op[2] = b.src(b.operand(2), Type::b32);
  in.run = type == Type::s32 ? reduce<int32_t> : reduce<uint32_t>;
  if (type == Type::f32) in.run = reduce_f32;
  in.guarded = in.run;
  return true;
}

}  // namespace

bool decode_warp(Builder& b, Opcode& op, Instr& in) {
  if (op.base == "shfl") return decode_shuffle(b, op, in);
  if (op.base == "vote") return decode_vote(b, op, in);
  if (op.base == "match") return decode_match(b, op, in);
  if (op.base == "redux") return decode_redux(b, op, in);
  if (op.base == "activemask") {
    op.take_type();
    in.op[0] = b.dst(b.operand(0), 4);
    in.run = active_mask;
    return true;
  }
  if (op.base == "elect") {
    op.take("sync");
    const Operand& d = b.operand(0);
    in.op[0] = b.dst(d, 4);
    in.op[3] = d.second.empty() ? kNoRegister : b.pred_dst(d.second[0]);
    in.op[2] = b.src(b.operand(1), Type::b32);
    in.run = in.guarded = elect;
    return true;
  }
  if (op.base == "bar" && op.has("warp")) {
    op.take("warp");
    op.take("sync");
    in.op[0] = b.src(b.operand(0), Type::b32);
    in.run = in.guarded = warp_barrier;
    return true;
  }
  return false;
}

}  // namespace ptx
}  // namespace softcuda
