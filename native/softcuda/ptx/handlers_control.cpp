// Branches, exits, barriers, fences, asynchronous copies, and calls of functions that the device
// provides, such as vprintf.
#include <sched.h>

#include <cstdio>

#include "lanes.h"
#include "softcuda_conditional.h"

namespace softcuda {
namespace ptx {

// Splits the running group: `lanes` continue at `to`, the other lanes at `from`. The group at the
// lower of the two instructions runs first, so that the two groups merge again later (INVARIANTS.md
// P8).
static const Instr* split(Warp& w, uint32_t lanes, const Instr* to, const Instr* from) {
  const bool to_first = to < from;
  Group& other = w.groups[w.group_count++];
  other.pc = to_first ? from : to;
  other.mask = to_first ? w.mask & ~lanes : lanes;
  other.state = Group::ready;
  other.barrier = 0;
  w.mask = to_first ? lanes : w.mask & ~lanes;
  if (w.stop != nullptr && other.pc < w.stop) w.stop = other.pc;
  return to_first ? to : from;
}

const Instr* run_guarded(Warp& w, const Instr* in) {
  const uint32_t lanes = w.mask & pred_of(w, in->guard);
  if (lanes == 0) return in + 1;
  const uint32_t saved = w.mask;
  w.mask = lanes;
  const Instr* next = in->guarded(w, in);
  w.mask = saved;
  return next;
}

const Instr* jump(Warp& w, const Instr* in) {
  const uint32_t taken = active_lanes(w, in);
  if (taken == w.mask) return in + in->imm;
  if (taken == 0) return in + 1;
  return split(w, taken, in + in->imm, in + 1);
}

const Instr* exit_lanes(Warp& w, const Instr* in) {
  const uint32_t lanes = active_lanes(w, in);
  if (lanes == 0) return in + 1;
  lanes_exited(w, lanes);
  w.mask &= ~lanes;
  if (w.mask != 0) return in + 1;
  w.why = Stop::exited;
  w.stop = nullptr;
  return in;
}

// ---- calls that the device provides -----------------------------------------------------------
namespace {

// Returns argument number `index` of a call. Arguments are in the local memory of the thread.
uint64_t argument(const Warp& w, const Instr* in, unsigned lane, unsigned index,
                  unsigned bytes = 8) {
  const Block& b = *w.block;
  const int32_t at = b.kernel->operand_pool[static_cast<size_t>(in->imm) + index];
  uint64_t value = 0;
  std::memcpy(&value, b.local + (size_t{w.index} * kLanes + lane) * b.kernel->local_bytes + at,
              bytes);
  return value;
}

// Reads a string at a generic address. Returns false after a fault.
bool read_text(Warp& w, const Instr* in, unsigned lane, uint64_t address, std::string* out) {
  for (unsigned n = 0; n < 4096; ++n) {
    const char* p = resolve_address(w, in, Space::generic, lane, address + n, 1, false);
    if (p == nullptr) return false;
    if (*p == 0) return true;
    *out += *p;
  }
  return true;
}

// Formats the printf output of one thread. The values to print are stored one after another from
// the address `values` on, each aligned to its size.
bool format_text(Warp& w, const Instr* in, unsigned lane, const std::string& format,
                 uint64_t values, std::string* out) {
  uint64_t at = values;
  const auto next = [&](unsigned bytes, uint64_t* value) {
    at = (at + bytes - 1) / bytes * bytes;
    const char* p = resolve_address(w, in, Space::generic, lane, at, bytes, false);
    if (p == nullptr) return false;
    *value = 0;
    std::memcpy(value, p, bytes);
    at += bytes;
    return true;
  };
  for (size_t i = 0; i < format.size(); ++i) {
    if (format[i] != '%') {
      *out += format[i];
      continue;
    }
    if (i + 1 < format.size() && format[i + 1] == '%') {
      *out += '%';
      ++i;
      continue;
    }
    std::string spec = "%";
    bool wide = false;
    for (++i; i < format.size() && std::strchr("-+ #0123456789.*lhzjt", format[i]) != nullptr;
         ++i) {
      if (format[i] == '*') {
        uint64_t width = 0;
        if (!next(4, &width)) return false;
        spec += std::to_string(static_cast<int32_t>(width));
      } else if (std::strchr("lzjt", format[i]) != nullptr) {
        wide = true;
      } else if (format[i] != 'h' && spec.size() < 32) {
        spec += format[i];
      }
    }
    if (i >= format.size()) break;
    char text[512];
    uint64_t value = 0;
    int n = 0;
    switch (format[i]) {
      case 'd':
      case 'i':
        if (!next(wide ? 8 : 4, &value)) return false;
        n = std::snprintf(text, sizeof text, (spec + "lld").c_str(),
                          wide ? static_cast<long long>(value)
                               : static_cast<long long>(static_cast<int32_t>(value)));
        break;
      case 'u':
      case 'x':
      case 'X':
      case 'o':
        if (!next(wide ? 8 : 4, &value)) return false;
        n = std::snprintf(text, sizeof text, (spec + "ll" + format[i]).c_str(),
                          static_cast<unsigned long long>(value));
        break;
      case 'c':
        if (!next(4, &value)) return false;
        n = std::snprintf(text, sizeof text, (spec + "c").c_str(), static_cast<int>(value));
        break;
      case 'f':
      case 'F':
      case 'e':
      case 'E':
      case 'g':
      case 'G':
      case 'a':
      case 'A':
        if (!next(8, &value)) return false;
        n = std::snprintf(text, sizeof text, (spec + format[i]).c_str(), bit_cast<double>(value));
        break;
      case 's': {
        std::string inner;
        if (!next(8, &value) || !read_text(w, in, lane, value, &inner)) return false;
        n = std::snprintf(text, sizeof text, (spec + "s").c_str(), inner.c_str());
        break;
      }
      case 'p':
        if (!next(8, &value)) return false;
        n = std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
        break;
      default:
        text[0] = 0;
    }
    if (n > 0) *out += text;
  }
  return true;
}

bool call_one(Warp& w, const Instr* in, unsigned lane) {
  const auto thread = static_cast<int>(lane);
  switch (in->kind) {
    case kVprintf: {
      std::string format, text;
      if (!read_text(w, in, lane, argument(w, in, lane, 0), &format)) return false;
      if (!format_text(w, in, lane, format, argument(w, in, lane, 1), &text)) return false;
      std::fputs(text.c_str(), stdout);
      const int32_t result = w.block->kernel->operand_pool[static_cast<size_t>(in->imm) + 2];
      if (result >= 0) {
        const auto n = static_cast<int32_t>(text.size());
        std::memcpy(w.block->local +
                        (size_t{w.index} * kLanes + lane) * w.block->kernel->local_bytes + result,
                    &n, 4);
      }
      return true;
    }
    case kAssertFail: {
      std::string message, file, function;
      if (!read_text(w, in, lane, argument(w, in, lane, 0), &message)) return false;
      if (!read_text(w, in, lane, argument(w, in, lane, 1), &file)) return false;
      if (!read_text(w, in, lane, argument(w, in, lane, 3), &function)) return false;
      const auto line = static_cast<unsigned>(argument(w, in, lane, 2, 4));
      w.block->fail(CUDA_ERROR_ASSERT, &w, thread, in,
                    file + ":" + std::to_string(line) + ": " + function + ": assertion '" +
                        message + "' failed");
      return false;
    }
    default: {
      const uint64_t handle = argument(w, in, lane, 0);
      auto* cell = reinterpret_cast<softcuda_condition*>(handle);
      if (device().is_condition(handle) == 0) {
        w.block->fail(CUDA_ERROR_LAUNCH_FAILED, &w, thread, in,
                      "cudaGraphSetConditional: the value is not a conditional handle");
        return false;
      }
      __atomic_store_n(&cell->value, static_cast<unsigned>(argument(w, in, lane, 1, 4)),
                       __ATOMIC_RELEASE);
      return true;
    }
  }
}

}  // namespace

const Instr* special_call(Warp& w, const Instr* in) {
  for (uint32_t left = w.mask; left != 0; left &= left - 1) {
    if (!call_one(w, in, static_cast<unsigned>(__builtin_ctz(left)))) return in;
  }
  return in + 1;
}

namespace {

const Instr* no_operation(Warp&, const Instr* in) { return in + 1; }

// Splits the running group of lanes by branch target. Lanes whose guard predicate is true go to
// target(lane), which is null after a fault. The other lanes of the group go to the next
// instruction. The lanes with the lowest target continue as the running group.
template <class F>
const Instr* branch_by_lane(Warp& w, const Instr* in, F target) {
  const uint32_t active = active_lanes(w, in);
  const Instr* to[kLanes];
  for (unsigned i = 0; i < kLanes; ++i) {
    to[i] = (active >> i & 1) != 0 ? target(i) : in + 1;
    if (to[i] == nullptr) return in;
  }
  const Instr* lowest = nullptr;
  for (uint32_t left = w.mask; left != 0; left &= left - 1) {
    const Instr* t = to[__builtin_ctz(left)];
    if (lowest == nullptr || t < lowest) lowest = t;
  }
  uint32_t remaining = w.mask;
  uint32_t first = 0;
  while (remaining != 0) {
    const Instr* t = to[__builtin_ctz(remaining)];
    uint32_t same = 0;
    for (unsigned i = 0; i < kLanes; ++i) same |= to[i] == t ? 1u << i : 0u;
    same &= remaining;
    remaining &= ~same;
    if (t == lowest) {
      first = same;
      continue;
    }
    w.groups[w.group_count++] = {t, same, Group::ready, 0};
    if (w.stop != nullptr && t < w.stop) w.stop = t;
  }
  w.mask = first;
  return lowest;
}

const Instr* indexed_branch(Warp& w, const Instr* in) {
  const uint32_t* index = src_lanes<uint32_t>(w, in->op[0]);
  const int32_t* table = w.block->kernel->operand_pool.data() + in->imm;
  return branch_by_lane(w, in, [&](unsigned lane) -> const Instr* {
    if (index[lane] < in->count) return in + table[index[lane]];
    w.block->fail(CUDA_ERROR_LAUNCH_FAILED, &w, static_cast<int>(lane), in,
                  "the index " + std::to_string(index[lane]) + " exceeds the " +
                      std::to_string(in->count) + " branch targets");
    return nullptr;
  });
}

// bar and barrier. Operands: op[0] is the number of the barrier, op[1] the number of threads or
// kNoRegister, op[2] the predicate or kNoRegister, op[3] the destination. `count` has two flags:
// bit 0 means that the lanes wait, and bit 1 that the barrier is aligned.
const Instr* barrier(Warp& w, const Instr* in) {
  const uint32_t lanes = active_lanes(w, in);
  if (lanes == 0) return in + 1;
  // All lanes of the warp must execute an aligned barrier together.
  if ((in->count & 2) != 0 && lanes != w.live()) return wait_for_lanes(w, in);
  const auto lane = static_cast<unsigned>(__builtin_ctz(lanes));
  const uint32_t number = src_lanes<uint32_t>(w, in->op[0])[lane];
  const uint32_t threads = in->op[1] == kNoRegister ? 0 : src_lanes<uint32_t>(w, in->op[1])[lane];
  const uint32_t predicate = in->op[2] == kNoRegister ? 0 : pred_of(w, in->op[2]) & lanes;
  if (lanes != w.mask) {
    // The other lanes of the group continue after the barrier.
    Group& other = w.groups[w.group_count++];
    other = {in + 1, w.mask & ~lanes, Group::ready, 0};
    w.mask = lanes;
  }
  return arrive_at_barrier(w, in, lanes, number, threads, (in->count & 1) != 0, predicate);
}

const Instr* fence(Warp& w, const Instr* in) {
  publish_stores(w, in->aux);
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  acquire_loads(w, in->aux);
  if (w.block->races != nullptr) note_fence(w, in);
  return in + 1;
}
const Instr* nanosleep(Warp& w, const Instr* in) {
  (void)w;
  sched_yield();
  return in + 1;
}
const Instr* trap(Warp& w, const Instr* in) {
  w.block->fail(CUDA_ERROR_LAUNCH_FAILED, &w, __builtin_ctz(w.mask), in, "trap");
  return in;
}
const Instr* grid_wait(Warp& w, const Instr* in) {
  w.waited_for_grid = true;
  acquire_loads(w, kDeviceScope | kSystemScope);
  return in + 1;
}

bool decode_barrier(Builder& b, Opcode& op, Instr& in) {
  op.take("cta");
  if (op.has("cluster")) return false;
  const bool unaligned = op.base == "barrier" && !op.take("aligned");
  if (op.base == "bar") op.take("aligned");
  uint16_t waits = 1;
  size_t at = 0;
  in.op[1] = in.op[2] = in.op[3] = kNoRegister;
  if (op.take("red")) {
    if (op.take("popc")) {
      in.kind = kBarrierCount;
    } else if (op.take("and")) {
      in.kind = kBarrierAnd;
    } else if (op.take("or")) {
      in.kind = kBarrierOr;
    } else {
      return false;
    }
    op.take_type();
    in.op[3] = in.kind == kBarrierCount ? b.dst(b.operand(0), 4) : b.pred_dst(b.operand(0));
    at = 1;
  } else if (op.take("arrive")) {
    waits = 0;
  } else if (!op.take("sync")) {
    return false;
  }
  in.count = static_cast<uint16_t>(waits | (unaligned ? 0 : 2));
  in.op[0] = b.src(b.operand(at), Type::u32);
  size_t next = at + 1;
  const size_t left = b.operand_count() - next;
  const bool reduces = in.kind != kBarrier;
  if (left > (reduces ? 1u : 0u)) in.op[1] = b.src(b.operand(next++), Type::u32);
  if (waits == 0 && in.op[1] == kNoRegister) b.refuse_operand("the number of threads is missing");
  if (reduces) in.op[2] = b.pred_src(b.operand(next));
  in.run = in.guarded = barrier;
  return true;
}

// ---- cp.async -----------------------------------------------------------------------------------
// Operands: op[0] is the destination, op[1] the source, op[2] the number of source bytes or
// kNoRegister, op[3] kNoRegister or a predicate; where it is true, the destination is filled with
// zeros instead. `count` is the number of bytes of the destination.
const Instr* copy_async(Warp& w, const Instr* in) {
  AsyncCopy copy;
  copy.mask = w.mask;
  copy.bytes = in->count;
  copy.group = 0;
  copy.in = in;
  const uint32_t ignored = in->op[3] == kNoRegister ? 0 : pred_of(w, in->op[3]);
  const auto offsets = in->imm;
  const uint64_t to_offset =
      static_cast<uint64_t>(w.block->kernel->operand_pool[static_cast<size_t>(offsets)]);
  const uint64_t from_offset = static_cast<uint64_t>(
      static_cast<int64_t>(w.block->kernel->operand_pool[static_cast<size_t>(offsets) + 1]));
  for (uint32_t left = w.mask; left != 0; left &= left - 1) {
    const auto lane = static_cast<unsigned>(__builtin_ctz(left));
    uint64_t to = (in->aux & 1) != 0 ? src_lanes<uint64_t>(w, in->op[0])[lane]
                                     : src_lanes<uint32_t>(w, in->op[0])[lane];
    to += static_cast<uint64_t>(static_cast<int64_t>(static_cast<int32_t>(to_offset)));
    if (to >= kSharedWindow) to -= kSharedWindow;
    const uint64_t from = src_lanes<uint64_t>(w, in->op[1])[lane] + from_offset;
    unsigned valid = in->op[2] == kNoRegister ? in->count : src_lanes<uint32_t>(w, in->op[2])[lane];
    if (valid > in->count) valid = in->count;
    if ((ignored >> lane & 1) != 0) valid = 0;
    if (resolve_address(w, in, Space::shared, lane, to, in->count, true) == nullptr) return in;
    copy.to[lane] = static_cast<uint32_t>(to);
    copy.valid[lane] = valid;
    copy.from[lane] = nullptr;
    if (valid == 0) continue;
    if ((from & (in->count - 1)) != 0) {
      misaligned(w, in, lane, from, in->count);
      return in;
    }
    copy.from[lane] = resolve_global(w, in, lane, from, valid, false);
    if (copy.from[lane] == nullptr) return in;
  }
  return queue_copy(w, copy) ? in + 1 : in;
}
const Instr* commit_group(Warp& w, const Instr* in) {
  commit_copies(w);
  return in + 1;
}
const Instr* wait_group(Warp& w, const Instr* in) {
  return land_copies(w, in, static_cast<unsigned>(in->imm)) ? in + 1 : in;
}

}  // namespace

bool decode_async(Builder& b, Opcode& op, Instr& in) {
  if (op.base != "cp" || op.has("bulk") || op.has("mbarrier")) return false;
  if (!op.take("async")) return false;
  if (op.take("commit_group")) {
    in.run = commit_group;
    return true;
  }
  if (op.take("wait_group")) {
    in.imm = static_cast<int64_t>(b.integer(b.operand(0)));
    in.run = wait_group;
    return true;
  }
  if (op.take("wait_all")) {
    in.imm = 0;
    in.aux = 1;
    in.run = wait_group;
    return true;
  }
  op.take_cache_hints();
  op.take("noinc");
  if (!op.take("shared")) op.take("shared::cta");
  op.take("global");
  Space shared = Space::shared;
  Space global = Space::global;
  unsigned width = 8;
  int64_t to_offset = 0;
  int64_t from_offset = 0;
  in.op[0] = b.address(b.operand(0), &shared, &width, &to_offset);
  in.aux = width == 8;
  in.op[1] = b.address(b.operand(1), &global, &width, &from_offset);
  if (width != 8 || global != Space::global || shared != Space::shared) {
    b.refuse_operand("the addresses are in other state spaces");
  }
  in.imm = static_cast<int64_t>(
      b.pool_operands({static_cast<int32_t>(to_offset), static_cast<int32_t>(from_offset)}));
  const uint64_t bytes = b.integer(b.operand(2));
  if (bytes != 4 && bytes != 8 && bytes != 16) b.refuse_operand("the size must be 4, 8 or 16");
  in.count = static_cast<uint16_t>(bytes);
  in.op[2] = in.op[3] = kNoRegister;
  if (b.operand_count() > 3) {
    const Operand& third = b.operand(3);
    const bool predicate = third.kind == Operand::reg && b.register_bytes(third) == 0;
    if (predicate) {
      in.op[3] = b.pred_src(third);
    } else {
      in.op[2] = b.src(third, Type::u32);
    }
  }
  in.site = b.new_site();
  in.run = copy_async;
  return true;
}

// op[0] is the address of the called function. From index `imm` on, Kernel::operand_pool has
// Instr::count pairs: the number of a function that the call may reach, and the distance from this
// instruction to the inlined body of the function, in instructions.
const Instr* indirect_call(Warp& w, const Instr* in) {
  const uint64_t* address = src_lanes<uint64_t>(w, in->op[0]);
  const int32_t* table = w.block->kernel->operand_pool.data() + in->imm;
  return branch_by_lane(w, in, [&](unsigned lane) -> const Instr* {
    for (unsigned k = 0; k < in->count; ++k) {
      const auto number = static_cast<uint64_t>(table[2 * k]);
      if (address[lane] == kFunctionWindow + 16 * number) return in + table[2 * k + 1];
    }
    w.block->fail(CUDA_ERROR_LAUNCH_FAILED, &w, static_cast<int>(lane), in,
                  hex(address[lane]) + " is not the address of a function that the call can reach");
    return nullptr;
  });
}

// recursion.cpp describes the elements of Kernel::operand_pool from index `imm` on.
const Instr* recursive_call(Warp& w, const Instr* in) {
  for (uint32_t left = w.mask; left != 0; left &= left - 1) {
    if (!push_frame(w, in, static_cast<unsigned>(__builtin_ctz(left)))) return in;
  }
  return in + w.block->kernel->operand_pool[static_cast<size_t>(in->imm)];
}

// The end of an inlined copy of a function to which recursive calls jump back (recursion.cpp).
// `imm` is the number of the copy. A thread that entered the copy by a recursive call continues
// after the instruction of that call, any other thread at in + 1.
const Instr* recursive_return(Warp& w, const Instr* in) {
  return branch_by_lane(w, in, [&](unsigned lane) -> const Instr* {
    const Instr* to = pop_frame(w, lane, static_cast<int32_t>(in->imm));
    return to != nullptr ? to : in + 1;
  });
}

bool decode_control(Builder& b, Opcode& op, Instr& in) {
  if (op.base == "brx.idx") {
    in.run = in.guarded = indexed_branch;
    return true;
  }
  if (op.base == "ret" || op.base == "exit") {
    op.take("uni");
    in.run = in.guarded = exit_lanes;
    return true;
  }
  if ((op.base == "bar" && !op.has("warp")) || op.base == "barrier")
    return decode_barrier(b, op, in);
  if (op.base == "membar") {
    if (op.take("sys")) {
      in.aux = kDeviceScope | kSystemScope;
    } else if (op.take("gl")) {
      in.aux = kDeviceScope;
    } else if (!op.take("cta")) {
      return false;
    }
    in.run = fence;
    return true;
  }
  if (op.base == "fence") {
    if (op.has("proxy") || op.has("mbarrier_init")) return false;
    for (const char* order : {"sc", "acq_rel", "acquire", "release"}) op.take(order);
    for (const char* scope : {"cta", "cluster"}) op.take(scope);
    if (op.take("gpu")) in.aux = kDeviceScope;
    if (op.take("sys")) in.aux = kDeviceScope | kSystemScope;
    in.run = fence;
    return true;
  }
  if (op.base == "nanosleep") {
    op.take_type();
    in.run = nanosleep;
    return true;
  }
  if (op.base == "griddepcontrol") {
    const bool waits = op.take("wait");
    if (!waits && !op.take("launch_dependents")) return false;
    in.run = waits ? grid_wait : no_operation;
    return true;
  }
  if (op.base == "trap") {
    in.run = trap;
    return true;
  }
  if (op.base == "brkpt" || op.base == "pmevent") {
    op.take("mask");
    in.run = no_operation;
    return true;
  }
  return false;
}

}  // namespace ptx
}  // namespace softcuda
