// mbarrier objects: barriers in shared memory. Arrivals of threads and of cp.async are supported.
// Transactions are not, because only TMA, which is not supported either, completes them.
#include <algorithm>

#include "lanes.h"

namespace softcuda {
namespace ptx {
namespace {

// The state of an mbarrier object, which is packed into its 64 bits. The upper 16 bits have the
// value kMark if the object is initialized.
struct State {
  uint32_t pending;   // arrivals until the phase is complete
  uint32_t expected;  // arrivals of the next phase
  bool phase;
};
constexpr uint64_t kMark = 0x6d62;
constexpr uint32_t kMaxCount = (1u << 20) - 1;

uint64_t packed(const State& s) {
  return s.pending | uint64_t{s.expected} << 20 | uint64_t{s.phase} << 40 | kMark << 48;
}
State unpacked(uint64_t bits) {
  return {static_cast<uint32_t>(bits) & kMaxCount, static_cast<uint32_t>(bits >> 20) & kMaxCount,
          (bits >> 40 & 1) != 0};
}

enum Kind : uint16_t { kInit, kInvalidate, kArrive, kDrop, kTest, kTestParity, kAsync };
constexpr uint16_t kNoComplete = 16;
constexpr uint16_t kNoIncrement = 64;

bool refuse(Warp& w, const Instr* in, unsigned lane, const std::string& text) {
  w.block->fail(CUDA_ERROR_LAUNCH_FAILED, &w, static_cast<int>(lane), in, text);
  return false;
}

// Performs `count` arrivals by the thread in `lane`. Returns false after a fault.
bool arrive(Warp& w, const Instr* in, unsigned lane, uint64_t* object, uint32_t count) {
  State s = unpacked(*object);
  if (count == 0 || count > s.pending) {
    return refuse(w, in, lane,
                  std::to_string(count) + " threads arrive at an mbarrier that waits for " +
                      std::to_string(s.pending));
  }
  if ((in->kind & 15) == kDrop) s.expected -= std::min(count, s.expected);
  s.pending -= count;
  if (s.pending == 0) {
    if ((in->kind & kNoComplete) != 0)
      return refuse(w, in, lane, "the arrival completes the phase");
    s.phase = !s.phase;
    s.pending = s.expected;
  }
  *object = packed(s);
  return true;
}

// Operands: op[0] is the result, op[1] the address of the object, op[2] the count, state or parity,
// or kNoRegister.
template <unsigned K>
const Instr* mbarrier(Warp& w, const Instr* in) {
  const bool wide = (in->aux & kWide) != 0;
  const auto space = static_cast<Space>(in->aux >> kSpaceShift & 7);
  bool all_complete = true;
  for (uint32_t left = w.mask; left != 0; left &= left - 1) {
    const auto lane = static_cast<unsigned>(__builtin_ctz(left));
    uint64_t at =
        wide ? src_lanes<uint64_t>(w, in->op[1])[lane] : src_lanes<uint32_t>(w, in->op[1])[lane];
    at += static_cast<uint64_t>(in->imm);
    char* p = resolve_address(w, in, space, lane, at, 8, K != kTest && K != kTestParity);
    if (p == nullptr) return in;
    auto* object = reinterpret_cast<uint64_t*>(p);
    if (K == kInit) {
      const uint32_t count = src_lanes<uint32_t>(w, in->op[2])[lane];
      if (count == 0 || count > kMaxCount) {
        refuse(w, in, lane, "the count " + std::to_string(count) + " is not in [1, 1048575]");
        return in;
      }
      *object = packed({count, count, false});
      continue;
    }
    if (*object >> 48 != kMark) {
      refuse(w, in, lane, "the mbarrier object is not initialized");
      return in;
    }
    if (K == kInvalidate) *object = 0;
    if (K == kArrive) {
      publish_stores(w, 0);
      const uint32_t count = in->op[2] == kNoRegister ? 1 : src_lanes<uint32_t>(w, in->op[2])[lane];
      const uint64_t before = *object;
      if (!arrive(w, in, lane, object, count)) return in;
      if (in->op[0] >= 0) dst_lanes<uint64_t>(w, in->op[0])[lane] = before;
    }
    // Without .noinc, the instruction adds 1 to the pending count before it arrives. The arrival
    // subtracts this 1 again, so the handler does nothing.
    if (K == kAsync && (in->kind & kNoIncrement) != 0 && !arrive(w, in, lane, object, 1)) return in;
    if (K == kTest || K == kTestParity) {
      const bool phase = unpacked(*object).phase;
      const bool waited = K == kTest ? unpacked(src_lanes<uint64_t>(w, in->op[2])[lane]).phase
                                     : (src_lanes<uint32_t>(w, in->op[2])[lane] & 1) != 0;
      const bool complete = phase != waited;
      uint32_t* result = reinterpret_cast<uint32_t*>(w.regs + in->op[0]);
      *result = (*result & ~(1u << lane)) | static_cast<uint32_t>(complete) << lane;
      all_complete = all_complete && complete;
      if (complete && w.block->races != nullptr) note_mbarrier(w, p, false);
    } else if (w.block->races != nullptr) {
      note_mbarrier(w, p, true);
    }
  }
  if (!all_complete) yield_turn(w);
  return in + 1;
}

const Instr* pending_count(Warp& w, const Instr* in) {
  const uint64_t* state = src_lanes<uint64_t>(w, in->op[1]);
  store_lanes<uint32_t>(w, in->op[0],
                        [=](unsigned i) { return static_cast<uint32_t>(state[i]) & kMaxCount; });
  return in + 1;
}

// cp.async.mbarrier.arrive. On a GPU, a thread arrives when its copies are complete. This handler
// completes the copies of the active lanes, and then the lanes arrive.
const Instr* arrive_after_copies(Warp& w, const Instr* in) {
  Instr all = *in;
  all.aux = 1;
  land_copies(w, &all, 0);
  return mbarrier<kAsync>(w, in);
}

void take_scope(Opcode& op) {
  for (const char* order : {"release", "acquire", "relaxed", "cta", "cluster"}) op.take(order);
}

// Decodes operand number `at`, which is the address of the object, and the operand after it, if
// there is one.
void decode_operands(Builder& b, Instr& in, size_t at, Space space) {
  unsigned width = 8;
  in.op[1] = b.address(b.operand(at), &space, &width, &in.imm);
  in.aux = (width == 8 ? kWide : 0) | kStrong | static_cast<uint32_t>(space) << kSpaceShift;
  in.op[2] = kNoRegister;
}

bool decode_async_arrive(Builder& b, Opcode& op, Instr& in) {
  if (!op.take("async") || !op.take("mbarrier") || !op.take("arrive")) return false;
  if (op.take("noinc")) in.kind = kNoIncrement;
  const Space space = op.take("shared") || op.take("shared::cta") ? Space::shared : Space::generic;
  if (op.take_type() != Type::b64) return false;
  decode_operands(b, in, 0, space);
  in.run = arrive_after_copies;
  return true;
}

bool decode_wait(Builder& b, Opcode& op, Instr& in, Space space) {
  const bool parity = op.take("parity");
  in.op[0] = b.pred_dst(b.operand(0));
  if (in.op[0] == kNoRegister) b.refuse_operand("a predicate is expected");
  decode_operands(b, in, 1, space);
  in.op[2] = b.src(b.operand(2), parity ? Type::u32 : Type::b64);
  in.run = parity ? mbarrier<kTestParity> : mbarrier<kTest>;
  return true;
}

}  // namespace

bool decode_mbarrier(Builder& b, Opcode& op, Instr& in) {
  if (op.base == "cp" && op.has("mbarrier")) return decode_async_arrive(b, op, in);
  if (op.base != "mbarrier") return false;
  if (op.has("expect_tx") || op.has("complete_tx") || op.has("shared::cluster")) return false;
  take_scope(op);
  const Space space = op.take("shared") || op.take("shared::cta") ? Space::shared : Space::generic;
  if (op.take_type() != Type::b64) return false;
  if (op.take("pending_count")) {
    in.op[0] = b.dst(b.operand(0), 4);
    in.op[1] = b.src(b.operand(1), Type::b64);
    in.run = pending_count;
    return true;
  }
  if (op.take("init")) {
    decode_operands(b, in, 0, space);
    in.op[2] = b.src(b.operand(1), Type::u32);
    in.run = mbarrier<kInit>;
    return true;
  }
  if (op.take("inval")) {
    decode_operands(b, in, 0, space);
    in.run = mbarrier<kInvalidate>;
    return true;
  }
  if (op.take("test_wait") || op.take("try_wait")) return decode_wait(b, op, in, space);
  const bool drops = op.take("arrive_drop");
  if (!drops && !op.take("arrive")) return false;
  in.kind =
      static_cast<uint16_t>((drops ? kDrop : kArrive) | (op.take("noComplete") ? kNoComplete : 0));
  in.op[0] = b.dst(b.operand(0), 8);
  decode_operands(b, in, 1, space);
  if (b.operand_count() > 2) in.op[2] = b.src(b.operand(2), Type::u32);
  in.run = mbarrier<kArrive>;
  return true;
}

}  // namespace ptx
}  // namespace softcuda
