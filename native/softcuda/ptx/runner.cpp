// The runner: schedules the warps of a block and the groups of lanes of a warp
// (INVARIANTS.md P8 to P11).
#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "builder.h"
#include "counts.h"
#include "library.h"
#include "races.h"
#include "stores.h"

namespace softcuda {
namespace ptx {

const Options& options() {
  static const Options& result = *new Options([] {
    Options o;
    if (const char* seed = std::getenv("SOFTCUDA_PTX_SEED")) {
      o.adversarial = *seed != 0;
      o.seed = std::strtoull(seed, nullptr, 10);
    }
    if (const char* race = std::getenv("SOFTCUDA_RACECHECK"))
      o.racecheck = std::strcmp(race, "1") == 0;
    if (const char* steps = std::getenv("SOFTCUDA_PTX_STEPS")) {
      o.max_steps = std::strtoull(steps, nullptr, 10);
    }
    if (const char* mma = std::getenv("SOFTCUDA_PTX_MMA")) {
      if (std::strcmp(mma, "exact") == 0) o.accumulation = Accumulation::exact;
      if (std::strcmp(mma, "hardware") == 0) o.accumulation = Accumulation::hardware;
    }
    if (const char* file = std::getenv("SOFTCUDA_COUNT")) o.count_file = file;
    return o;
  }());
  return result;
}

namespace {

// Number of instructions that a warp executes before the next warp gets its turn. It is limited
// because a warp may wait in a loop for another warp.
constexpr uint64_t kTurn = 20000;
// The threads of a warp that are at the same instruction form a group. The group with the lowest
// program counter runs first. If this group seems to wait in a loop, the one with the highest
// counter may execute this number of instructions out of turn.
constexpr uint64_t kOutOfTurn = 200;

std::string triple(unsigned x, unsigned y, unsigned z) {
  return "(" + std::to_string(x) + "," + std::to_string(y) + "," + std::to_string(z) + ")";
}

std::string thread_name(const Block& b, unsigned thread) {
  return triple(thread % b.size.x, thread / b.size.x % b.size.y, thread / b.size.x / b.size.y);
}

std::string place_of(const Block& b) {
  return "kernel '" + b.kernel->name + "' block " + triple(b.index.x, b.index.y, b.index.z);
}

std::string lanes_text(uint32_t lanes) { return hex(lanes); }

}  // namespace

void Block::fail(CUresult code, const Warp* w, int lane, const Instr* in, const std::string& text) {
  if (!failed) {
    std::string message = place_of(*this);
    if (w != nullptr && lane >= 0) {
      message += " thread " + thread_name(*this, w->index * kLanes + static_cast<unsigned>(lane));
    }
    message += ": " + text;
    if (in != nullptr) message += ", at " + kernel->where(in);
    device().fault(code, message.c_str());
  }
  failed = true;
  for (Warp& other : warps) {
    other.stop = nullptr;
    other.why = Stop::failed;
  }
}

// ---- memory -----------------------------------------------------------------------------------

// Checks an access against the accesses of the kernels that precede this one over programmatic
// edges. Until griddepcontrol.wait, a preceding kernel may still run: it must not write what this
// kernel reads, nor access what this kernel writes. Even after the wait, a non-coherent load may
// not see the writes of a preceding kernel, because it may read from a cache that was filled
// earlier. Returns false after a fault.
static bool check_preceding(Warp& w, const Instr* in, unsigned lane, uint64_t address,
                            const char* storage, unsigned bytes, bool write) {
  const bool nc = !write && (in->aux & kNonCoherent) != 0;
  if (w.waited_for_grid && !nc) return true;
  for (const auto& log : w.block->launch->unordered) {
    const bool written = log->writes(storage, bytes);
    if (!written && !(write && log->accesses(storage, bytes))) continue;
    const std::string text = std::string(write ? "write to "
                                         : nc  ? "ld.nc of "
                                               : "read of ") +
                             hex(address) + (nc ? "" : " before griddepcontrol.wait") +
                             ", but the preceding kernel '" + log->kernel() +
                             "', from which a programmatic edge leads to this kernel, " +
                             (written ? "writes" : "reads") + " there";
    w.block->fail(CUDA_ERROR_LAUNCH_FAILED, &w, static_cast<int>(lane), in, text);
    return false;
  }
  return true;
}

// If checks_accesses is set: counts an access to global memory, orders buffered stores, and checks
// the access for races and against the accesses of preceding kernels that may still run. Returns
// false after a fault.
static bool check_access(Warp& w, const Instr* in, unsigned lane, uint64_t address, char* storage,
                         unsigned bytes, bool write) {
  Block& b = *w.block;
  if (!b.checks_accesses) return true;
  if (b.counts != nullptr) {
    b.counts->note_global(in, b.sites[in->site], storage, bytes, write);
  }
  if (b.stores != nullptr) order_accesses(w, in, storage, bytes, write);
  if (!check_preceding(w, in, lane, address, storage, bytes, write)) return false;
  if (b.launch->log != nullptr) b.launch->log->add(storage, bytes, write);
  return b.races == nullptr || note_global(w, in, lane, address, storage, bytes, write);
}

char* resolve_global(Warp& w, const Instr* in, unsigned lane, uint64_t address, unsigned bytes,
                     bool write) {
  Block& b = *w.block;
  Site& site = b.sites[in->site];
  const uint64_t at = address - site.from;
  if (site.span >= bytes && at <= site.span - bytes) {
    char* storage = reinterpret_cast<char*>(address + static_cast<uint64_t>(site.delta));
    return check_access(w, in, lane, address, storage, bytes, write) ? storage : nullptr;
  }
  softcuda_memory found{};
  if (device().find_memory(address, bytes, &found) != 0) {
    auto memory = std::make_shared<Memory>(found);
    const auto same = [&](const auto& owner) { return owner->storage == found.storage; };
    if (std::none_of(b.owners.begin(), b.owners.end(), same)) b.owners.push_back(memory);
    site.from = found.address;
    site.span = found.size;
    site.delta = static_cast<int64_t>(reinterpret_cast<uint64_t>(found.storage) - found.address);
    site.host = found.host_readable != 0;
    char* storage = reinterpret_cast<char*>(address + static_cast<uint64_t>(site.delta));
    return check_access(w, in, lane, address, storage, bytes, write) ? storage : nullptr;
  }
  char why[1024];
  device().explain(address, bytes, &found, why, sizeof why);
  std::string text =
      std::string("illegal ") + (write ? "write" : "read") + " at " + hex(address) + why;
  // Name the parameter that points into the allocation.
  const auto& offsets = b.kernel->param_offsets;
  for (size_t i = 0; i < offsets.size() && found.size != 0; ++i) {
    if (b.kernel->param_sizes[i] != 8) continue;
    uint64_t value = 0;
    std::memcpy(&value, b.params + offsets[i], sizeof value);
    if (value < found.address || value >= found.address + found.size) continue;
    text += ", parameter " + std::to_string(i);
    break;
  }
  b.fail(CUDA_ERROR_ILLEGAL_ADDRESS, &w, static_cast<int>(lane), in, text);
  return nullptr;
}

void bad_window_access(Warp& w, const Instr* in, unsigned lane, const char* space, uint64_t address,
                       unsigned bytes, bool write) {
  const Block& b = *w.block;
  std::string text = std::string("illegal ") + (write ? "write" : "read") + " of " +
                     std::to_string(bytes) + " bytes at " + space + " address " + hex(address);
  if (std::strcmp(space, "shared") == 0) {
    text += ", outside of the " + std::to_string(b.shared_end - kSharedBase) +
            " bytes of shared memory at " + hex(kSharedBase);
  }
  w.block->fail(CUDA_ERROR_ILLEGAL_ADDRESS, &w, static_cast<int>(lane), in, text);
}

void misaligned(Warp& w, const Instr* in, unsigned lane, uint64_t address, unsigned bytes) {
  w.block->fail(
      CUDA_ERROR_MISALIGNED_ADDRESS, &w, static_cast<int>(lane), in,
      "misaligned access: " + hex(address) + " is not a multiple of " + std::to_string(bytes));
}

// ---- barriers and warp-synchronous operations ---------------------------------------------------

const Instr* wait_for_lanes(Warp& w, const Instr* in) {
  w.why = Stop::warp_sync;
  w.stop = nullptr;
  return in;
}

namespace {

void write_results(const Barrier& barrier, Warp& w, const Group& group) {
  const Instr* in = group.pc - 1;
  if (in->kind == kBarrier || in->op[3] == kNoRegister) return;
  char* to = w.regs + in->op[3];
  if (in->kind == kBarrierCount) {
    for (unsigned i = 0; i < kLanes; ++i) {
      if ((group.mask >> i & 1) != 0) reinterpret_cast<uint32_t*>(to)[i] = barrier.count;
    }
    return;
  }
  const bool result =
      in->kind == kBarrierAnd ? barrier.count == barrier.arrived : barrier.count != 0;
  uint32_t* p = reinterpret_cast<uint32_t*>(to);
  *p = result ? *p | group.mask : *p & ~group.mask;
}

// Lets the groups of lanes that wait at a barrier continue if all threads that the barrier waits
// for have arrived.
void check_barrier(Block& b, unsigned number) {
  Barrier& barrier = b.barriers[number];
  if (barrier.arrived == 0) return;
  const unsigned expected = barrier.expected != 0 ? barrier.expected : b.threads - b.exited;
  if (barrier.arrived < expected) return;
  if (b.races != nullptr) join_at_barrier(b, number);
  if (b.counts != nullptr) b.counts->join_at_barrier(b, number);
  bool waited_for_grid = false;
  for (const Warp& w : b.warps) waited_for_grid = waited_for_grid || w.waited_for_grid;
  for (Warp& w : b.warps) {
    for (unsigned g = 0; g < w.group_count; ++g) {
      Group& group = w.groups[g];
      if (group.state != Group::at_barrier || group.barrier != number) continue;
      write_results(barrier, w, group);
      w.waited_for_grid = waited_for_grid;
      group.state = Group::ready;
    }
  }
  barrier = Barrier();
}

}  // namespace

const Instr* arrive_at_barrier(Warp& w, const Instr* in, uint32_t lanes, unsigned number,
                               unsigned threads, bool wait, uint32_t predicate) {
  Block& b = *w.block;
  const int lane = __builtin_ctz(lanes);
  if (number >= 16) {
    b.fail(CUDA_ERROR_LAUNCH_FAILED, &w, lane, in, "there is no barrier " + std::to_string(number));
    return in;
  }
  if (threads % kLanes != 0) {
    b.fail(CUDA_ERROR_LAUNCH_FAILED, &w, lane, in,
           "the number of threads " + std::to_string(threads) + " is not a multiple of 32");
    return in;
  }
  Barrier& barrier = b.barriers[number];
  if (barrier.used && barrier.expected != threads) {
    b.fail(CUDA_ERROR_LAUNCH_FAILED, &w, lane, in,
           "mismatched barrier: " + std::to_string(barrier.expected) +
               " threads are expected at barrier " + std::to_string(number) +
               ", but this thread expects " + std::to_string(threads));
    return in;
  }
  barrier.used = true;
  barrier.expected = threads;
  // If the instruction gives a number of threads, a warp at an aligned barrier counts as 32
  // threads, even if some of its lanes have exited or do not exist.
  const bool aligned = (in->count & 2) != 0;
  barrier.arrived +=
      threads != 0 && aligned ? kLanes : static_cast<unsigned>(__builtin_popcount(lanes));
  barrier.count += static_cast<unsigned>(__builtin_popcount(predicate));
  if (b.races != nullptr) arrive_for_races(w, number);
  publish_stores(w, 0);
  if (threads != 0 && barrier.arrived > threads) {
    b.fail(CUDA_ERROR_LAUNCH_FAILED, &w, lane, in,
           "more than " + std::to_string(threads) + " threads arrive at barrier " +
               std::to_string(number));
    return in;
  }
  if (!wait) {
    check_barrier(b, number);
    return in + 1;
  }
  w.why = Stop::barrier;
  w.barrier = static_cast<uint8_t>(number);
  w.stop = nullptr;
  return in + 1;
}

void lanes_exited(Warp& w, uint32_t lanes) {
  w.exited |= lanes;
  publish_stores(w, 0);
  // A warp-synchronous operation does not wait for lanes that have exited, so the groups that wait
  // at such an operation try again.
  for (unsigned g = 0; g < w.group_count; ++g) {
    if (w.groups[g].state == Group::at_warp_sync) w.groups[g].state = Group::ready;
  }
  Block& b = *w.block;
  b.exited += static_cast<unsigned>(__builtin_popcount(lanes));
  for (unsigned number = 0; number < 16; ++number) {
    if (b.barriers[number].used) check_barrier(b, number);
  }
}

// ---- cp.async -----------------------------------------------------------------------------------

namespace {

void land(Block& b, const AsyncCopy& copy) {
  for (uint32_t left = copy.mask; left != 0; left &= left - 1) {
    const auto lane = static_cast<unsigned>(__builtin_ctz(left));
    char* to = b.shared + copy.to[lane];
    const unsigned valid = copy.valid[lane];
    if (valid != 0) std::memcpy(to, copy.from[lane], valid);
    std::memset(to + valid, 0, copy.bytes - valid);
  }
}

}  // namespace

bool queue_copy(Warp& w, const AsyncCopy& copy) {
  Block& b = *w.block;
  if (!b.adversarial) {
    land(b, copy);
    return true;
  }
  // The destination contains 0xff until the program waits for the copy's group.
  for (uint32_t left = copy.mask; left != 0; left &= left - 1) {
    std::memset(b.shared + copy.to[__builtin_ctz(left)], 0xff, copy.bytes);
  }
  b.copies[w.index].push_back(copy);
  b.copies[w.index].back().group = b.commits[w.index];
  return true;
}

void commit_copies(Warp& w) { ++w.block->commits[w.index]; }

bool land_copies(Warp& w, const Instr* in, unsigned groups_left) {
  Block& b = *w.block;
  auto& queue = b.copies[w.index];
  const unsigned commits = b.commits[w.index];
  size_t kept = 0;
  for (AsyncCopy& copy : queue) {
    // cp.async.wait_all (aux != 0) also completes copies that are not committed. Only the copies of
    // the lanes that execute the instruction are completed.
    const bool done = in->aux != 0 || copy.group + groups_left < commits;
    if (done && (copy.mask & w.mask) != 0) {
      AsyncCopy part = copy;
      part.mask &= w.mask;
      land(b, part);
      copy.mask &= ~w.mask;
    }
    if (copy.mask != 0) queue[kept++] = copy;
  }
  queue.resize(kept);
  return true;
}

// ---- scheduling ---------------------------------------------------------------------------------

namespace {

// Merges groups that are at the same instruction, except those that wait at a barrier. A merged
// group is ready: if it waits for lanes at a warp-synchronous operation, more lanes are there now.
void merge_groups(Warp& w) {
  for (unsigned i = 0; i < w.group_count; ++i) {
    Group& group = w.groups[i];
    if (group.state == Group::at_barrier) continue;
    for (unsigned k = i + 1; k < w.group_count;) {
      const Group& other = w.groups[k];
      if (other.state == Group::at_barrier || other.pc != group.pc) {
        ++k;
        continue;
      }
      group.mask |= other.mask;
      group.state = Group::ready;
      w.groups[k] = w.groups[--w.group_count];
    }
  }
}

// Index of the ready group with the lowest or, with `highest`, the highest program counter;
// group_count if none is ready.
unsigned choose_group(const Warp& w, bool highest) {
  unsigned best = w.group_count;
  for (unsigned i = 0; i < w.group_count; ++i) {
    if (w.groups[i].state != Group::ready) continue;
    const bool better = best == w.group_count || (w.groups[i].pc < w.groups[best].pc) != highest;
    if (better) best = i;
  }
  return best;
}

// Runs a warp until it waits, has exited or has executed `turn` instructions. Returns whether it
// executed any instruction.
bool run_warp(Warp& w, uint64_t turn) {
  Block& b = *w.block;
  uint64_t left = turn;
  bool ran = false;
  bool highest = false;
  while (left > 0 && !b.failed) {
    merge_groups(w);
    const unsigned chosen = choose_group(w, highest);
    if (chosen == w.group_count) return ran;
    const Group group = w.groups[chosen];
    w.groups[chosen] = w.groups[--w.group_count];
    // The group runs until it reaches the lowest program counter of the other groups, at which it
    // merges with that group.
    const Instr* stop = b.kernel->code.data() + b.kernel->code.size();
    if (!highest) {
      for (unsigned i = 0; i < w.group_count; ++i) {
        if (w.groups[i].state != Group::at_barrier) stop = std::min(stop, w.groups[i].pc);
      }
    }
    w.stop = stop;
    w.mask = group.mask;
    w.why = Stop::none;
    const bool alone = w.group_count == 0;
    const uint64_t budget = alone ? left : std::min(left, highest ? kOutOfTurn : kTurn / 4);
    uint64_t steps = budget;
    const Instr* in = group.pc;
    do {
      in = in->run(w, in);
      --steps;
    } while (in < w.stop && steps > 0);
    const uint64_t executed = budget - steps;
    w.steps += executed;
    left -= std::min(left, executed);
    const bool blocked = w.why == Stop::warp_sync;
    ran = ran || executed > 1 || !blocked;
    if (b.failed) return true;
    if (w.why != Stop::exited && w.mask != 0) {
      Group& back = w.groups[w.group_count++];
      back.pc = in;
      back.mask = w.mask;
      back.barrier = w.barrier;
      back.state = blocked                  ? Group::at_warp_sync
                   : w.why == Stop::barrier ? Group::at_barrier
                                            : Group::ready;
      if (w.why == Stop::barrier) check_barrier(b, w.barrier);
    }
    if (w.why == Stop::yielded) {
      // The group waits in a loop for other lanes or warps. The other groups of this warp run
      // first, then the other warps.
      if (w.group_count == 1) return true;
      left -= std::min(left, kTurn / 16);
      highest = !highest;
      continue;
    }
    // A group that has executed `budget` instructions may be waiting in a loop for the group with
    // the highest program counter, which therefore runs next.
    highest = steps == 0 && !alone && !highest;
    if (b.adversarial && w.group_count > 1) highest = (b.next_random() & 3) == 0;
  }
  return ran;
}

void report_deadlock(Block& b) {
  // A warp-synchronous operation that waits for lanes at other instructions is the most likely
  // cause of the deadlock, so it is reported first.
  for (Warp& w : b.warps) {
    for (unsigned g = 0; g < w.group_count; ++g) {
      const Group& group = w.groups[g];
      if (group.state != Group::at_warp_sync) continue;
      std::string text = "divergent warp-synchronous operation: lanes " + lanes_text(group.mask) +
                         " of warp " + std::to_string(w.index) + " wait";
      for (unsigned k = 0; k < w.group_count; ++k) {
        if (k == g) continue;
        const Instr* in =
            w.groups[k].state == Group::at_barrier ? w.groups[k].pc - 1 : w.groups[k].pc;
        text += "; lanes " + lanes_text(w.groups[k].mask) + " wait at " + b.kernel->where(in);
      }
      if ((w.exists & w.exited) != 0) text += "; lanes " + lanes_text(w.exited) + " have exited";
      b.fail(CUDA_ERROR_LAUNCH_FAILED, &w, __builtin_ctz(group.mask), group.pc, text);
      return;
    }
  }
  std::string text = "divergent barrier: ";
  unsigned waiting = 0;
  std::string detail;
  const Instr* first = nullptr;
  for (Warp& w : b.warps) {
    for (unsigned g = 0; g < w.group_count; ++g) {
      const Group& group = w.groups[g];
      waiting += static_cast<unsigned>(__builtin_popcount(group.mask));
      if (first == nullptr) first = group.pc - 1;
      if (detail.size() < 600 && (detail.empty() || group.pc - 1 != first)) {
        detail += "; warp " + std::to_string(w.index) + " lanes " + lanes_text(group.mask) +
                  " at barrier " + std::to_string(group.barrier) + ", " +
                  b.kernel->where(group.pc - 1);
      }
    }
  }
  text +=
      std::to_string(waiting) + " threads wait, " + std::to_string(b.exited) + " exited" + detail;
  b.fail(CUDA_ERROR_LAUNCH_FAILED, nullptr, -1, nullptr, text);
}

template <class T>
void fill(char* to, T value) {
  T* lanes = reinterpret_cast<T*>(to);
  for (unsigned i = 0; i < kLanes; ++i) lanes[i] = value;
}

void set_special(const Block& b, Warp& w, Special special, char* to) {
  auto* lanes = reinterpret_cast<uint32_t*>(to);
  const unsigned first = w.index * kLanes;
  const softcuda_dim3 grid = b.work->grid;
  switch (special) {
    case Special::tid_x:
      for (unsigned i = 0; i < kLanes; ++i) lanes[i] = (first + i) % b.size.x;
      break;
    case Special::tid_y:
      for (unsigned i = 0; i < kLanes; ++i) lanes[i] = (first + i) / b.size.x % b.size.y;
      break;
    case Special::tid_z:
      for (unsigned i = 0; i < kLanes; ++i) lanes[i] = (first + i) / b.size.x / b.size.y;
      break;
    case Special::laneid:
      for (unsigned i = 0; i < kLanes; ++i) lanes[i] = i;
      break;
    case Special::lanemask_eq:
      for (unsigned i = 0; i < kLanes; ++i) lanes[i] = 1u << i;
      break;
    case Special::lanemask_le:
      for (unsigned i = 0; i < kLanes; ++i) lanes[i] = kAllLanes >> (31 - i);
      break;
    case Special::lanemask_lt:
      for (unsigned i = 0; i < kLanes; ++i) lanes[i] = (1u << i) - 1;
      break;
    case Special::lanemask_ge:
      for (unsigned i = 0; i < kLanes; ++i) lanes[i] = kAllLanes << i;
      break;
    case Special::lanemask_gt:
      for (unsigned i = 0; i < kLanes; ++i) lanes[i] = ~(kAllLanes >> (31 - i));
      break;
    case Special::ntid_x:
      fill<uint32_t>(to, b.size.x);
      break;
    case Special::ntid_y:
      fill<uint32_t>(to, b.size.y);
      break;
    case Special::ntid_z:
      fill<uint32_t>(to, b.size.z);
      break;
    case Special::ctaid_x:
      fill<uint32_t>(to, b.index.x);
      break;
    case Special::ctaid_y:
      fill<uint32_t>(to, b.index.y);
      break;
    case Special::ctaid_z:
      fill<uint32_t>(to, b.index.z);
      break;
    case Special::nctaid_x:
      fill<uint32_t>(to, grid.x);
      break;
    case Special::nctaid_y:
      fill<uint32_t>(to, grid.y);
      break;
    case Special::nctaid_z:
      fill<uint32_t>(to, grid.z);
      break;
    case Special::warpid:
      fill<uint32_t>(to, w.index);
      break;
    case Special::nwarpid:
      fill<uint32_t>(to, static_cast<uint32_t>(b.warps.size()));
      break;
    case Special::smid:
      fill<uint32_t>(to, b.worker);
      break;
    case Special::nsmid:
      fill<uint32_t>(to, device().workers);
      break;
    case Special::gridid:
      fill<uint64_t>(to, 1);
      break;
    case Special::dynamic_smem_size:
      fill<uint32_t>(to, b.dynamic_bytes);
      break;
    case Special::total_smem_size:
      fill<uint32_t>(to, b.shared_end - kSharedBase);
      break;
    case Special::one:
      fill<uint32_t>(to, 1);
      break;
    default:
      fill<uint32_t>(to, 0);
      break;
  }
}

char* aligned(std::vector<char>* memory, size_t bytes) {
  if (memory->size() < bytes + 64) memory->resize(bytes + 64);
  const auto raw = reinterpret_cast<uintptr_t>(memory->data());
  return memory->data() + ((64 - raw % 64) % 64);
}

// Sets those members of the worker's Block object that are the same for all blocks of a launch.
void prepare_launch(Block& b, const softcuda_ptx_work& work, unsigned worker) {
  const Kernel& k = static_cast<const Kernel&>(*work.kernel);
  b.kernel = &k;
  b.work = &work;
  b.worker = worker;
  b.size = work.block;
  b.threads = work.block.x * work.block.y * work.block.z;
  b.dynamic_bytes = work.shared_bytes;
  b.shared_end = kSharedBase + k.shared_bytes + work.shared_bytes;
  b.shared = aligned(&b.shared_memory, b.shared_end);
  b.params = work.parameters;
  b.sites.assign(k.sites, Site());
  b.adversarial = options().adversarial;
  b.racecheck = options().racecheck;
  b.random = options().seed * 0x9e3779b97f4a7c15u + 0x853c49e6748fea9bu;
  b.failed = false;
  const unsigned warps = (b.threads + kLanes - 1) / kLanes;
  b.warps.assign(warps, Warp());
  b.copies.resize(warps);
  b.commits.assign(warps, 0);
  if (k.recursive) b.stack_limit = device().stack_limit();
  const size_t register_bytes = (k.register_bytes + 63) / 64 * 64;
  char* registers = aligned(&b.registers, register_bytes * warps);
  b.local = aligned(&b.local_memory, size_t{k.local_bytes} * warps * kLanes);
  for (unsigned i = 0; i < warps; ++i) {
    Warp& w = b.warps[i];
    w.block = &b;
    w.index = i;
    w.regs = registers + register_bytes * i;
    w.constants = k.constants;
    const unsigned lanes = std::min(kLanes, b.threads - i * kLanes);
    w.exists = lanes == kLanes ? kAllLanes : (1u << lanes) - 1;
  }
  // Registers are not initialized on a GPU. This function runs once for every few blocks, so
  // clearing the registers here would take as long as a small kernel.
  if (b.adversarial) std::memset(registers, 0xff, register_bytes * warps);
}

void prepare_block(Block& b) {
  const Kernel& k = *b.kernel;
  b.exited = 0;
  if (k.recursive) b.frames.assign(b.warps.size() * kLanes, {});
  for (Barrier& barrier : b.barriers) barrier = Barrier();
  // Shared memory is not initialized on a GPU. The value 0xff makes reads of uninitialized memory
  // visible.
  std::memset(b.shared, b.adversarial || b.racecheck ? 0xff : 0, b.shared_end);
  if (k.local_bytes != 0 && b.adversarial) {
    std::memset(b.local, 0xff, size_t{k.local_bytes} * b.warps.size() * kLanes);
  }
  for (Warp& w : b.warps) {
    w.exited = 0;
    w.steps = 0;
    w.waited_for_grid = b.launch->unordered.empty();
    w.group_count = 1;
    w.groups[0] = {k.code.data(), w.exists, Group::ready, 0};
    for (const auto& special : k.specials)
      set_special(b, w, special.first, w.regs + special.second);
    b.copies[w.index].clear();
    b.commits[w.index] = 0;
  }
  b.random ^=
      (b.index.x + 1) * 0x9e3779b97f4a7c15u ^ (b.index.y + 7) * 0xbf58476d1ce4e5b9u ^ b.index.z;
  if (b.random == 0) b.random = 1;
  start_races(b);
  begin_block_stores(b);
}

bool finished(const Warp& w) { return w.group_count == 0; }

// Runs all warps of a block until they have exited. Returns false after a fault.
bool run_block(Block& b) {
  prepare_block(b);
  const auto warps = static_cast<unsigned>(b.warps.size());
  const uint64_t max_steps = options().max_steps;
  for (;;) {
    bool alive = false;
    bool ran = false;
    for (unsigned n = 0; n < warps; ++n) {
      const unsigned i = b.adversarial ? static_cast<unsigned>(b.next_random() % warps) : n;
      Warp& w = b.warps[i];
      if (finished(w)) continue;
      alive = true;
      const uint64_t turn = b.adversarial ? 1 + b.next_random() % 400 : kTurn;
      ran = run_warp(w, turn) || ran;
      if (b.failed) return false;
      if (b.stores != nullptr) age_stores(w);
      if (max_steps != 0 && w.steps > max_steps) {
        b.fail(CUDA_ERROR_LAUNCH_TIMEOUT, &w, 0, nullptr,
               "a warp has executed more than SOFTCUDA_PTX_STEPS=" + std::to_string(max_steps) +
                   " instructions");
        return false;
      }
    }
    if (b.adversarial && !ran) {
      // Warps are chosen at random, so a warp that can run may not have been chosen. Try all.
      for (Warp& w : b.warps) {
        if (finished(w)) continue;
        alive = true;
        ran = run_warp(w, 1 + b.next_random() % 400) || ran;
        if (b.failed) return false;
      }
    }
    if (!ran && !alive) {
      end_block_stores(b);
      return true;
    }
    if (!ran) {
      report_deadlock(b);
      return false;
    }
  }
}

}  // namespace

bool run_blocks(const softcuda_ptx_work& work, LaunchState* launch, unsigned worker, uint64_t first,
                uint64_t last) {
  // Each worker has one block, whose buffers are reused.
  static thread_local Block& block = *new Block;
  Block& b = block;
  prepare_launch(b, work, worker);
  b.launch = launch;
  b.checks_accesses = launch->log != nullptr || launch->races != nullptr ||
                      !launch->unordered.empty() || b.adversarial || launch->counts != nullptr;
  b.counts = launch->counts.get();
  b.checks_shared = b.racecheck || b.counts != nullptr;
  if (b.counts != nullptr) b.counts->begin_blocks(work, first);
  bool good = true;
  for (uint64_t index = first; index < last && good; ++index) {
    b.index = {static_cast<unsigned>(index % work.grid.x),
               static_cast<unsigned>(index / work.grid.x % work.grid.y),
               static_cast<unsigned>(index / work.grid.x / work.grid.y)};
    if (b.counts != nullptr) b.counts->begin_block(b);
    good = run_block(b);
    if (b.counts != nullptr && good) b.counts->end_block();
  }
  if (b.counts != nullptr) b.counts->end_blocks(last);
  b.owners.clear();
  return good;
}

}  // namespace ptx
}  // namespace softcuda
