// Execution of stream memory operations, and the poller thread that watches pending waits
// (INVARIANTS.md W2 to W4).
#include "memops.h"

#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <thread>

#include "time_slice.h"

namespace softcuda {
namespace {

// How long the poller spins, in nanoseconds, after a batch was completed, or after a batch was
// suspended while no other batch was suspended.
constexpr uint64_t kSpinNs = 50000;
// How long the poller sleeps between two polls when it does not spin, in nanoseconds.
constexpr long kSleepNs = 50000;

// A suspended batch.
struct Pending {
  Op* op;
  size_t next;  // index of the unsatisfied wait
};

// Never destroyed, because the poller is a detached thread.
struct Poller {
  std::mutex mutex;
  std::condition_variable wake;
  std::vector<Pending> pending;
  std::deque<Op*> held;  // operations held back by hold_behind_wait()
  int polling_kernels = 0;
  bool started = false;
};
Poller& g_poller = *new Poller;

uint64_t load(const Memop& op) {
  if (op.wide) {
    return __atomic_load_n(reinterpret_cast<const uint64_t*>(op.word.address), __ATOMIC_ACQUIRE);
  }
  return __atomic_load_n(reinterpret_cast<const uint32_t*>(op.word.address), __ATOMIC_ACQUIRE);
}

void store(const Memop& op) {
  if (op.wide) {
    __atomic_store_n(reinterpret_cast<uint64_t*>(op.word.address), op.value, __ATOMIC_SEQ_CST);
  } else {
    __atomic_store_n(reinterpret_cast<uint32_t*>(op.word.address), static_cast<uint32_t>(op.value),
                     __ATOMIC_SEQ_CST);
  }
}

// Evaluates the comparison of a wait as documented. GEQ is cyclic.
bool satisfied(const Memop& op) {
  const uint64_t current = load(op);
  switch (op.flags & 3u) {
    case CU_STREAM_WAIT_VALUE_GEQ:
      if (op.wide) return static_cast<int64_t>(current - op.value) >= 0;
      return static_cast<int32_t>(static_cast<uint32_t>(current - op.value)) >= 0;
    case CU_STREAM_WAIT_VALUE_EQ:
      return current == op.value;
    case CU_STREAM_WAIT_VALUE_AND:
      return (current & op.value) != 0;
    default:  // NOR
      if (op.wide) return ~(current | op.value) != 0;
      return static_cast<uint32_t>(~(current | op.value)) != 0;
  }
}

// If the word of an operation is in a range of virtual memory management (MemoryKind::reserved),
// acquires `lock` on virtual_mutex(), so that the memory stays mapped during the access. If the
// memory was unmapped after the operation was created, or if the device may not access it, records
// a fault and returns false.
bool lock_mapping(const Memop& op, std::unique_lock<std::mutex>* lock) {
  if (op.word.owner == nullptr || op.word.owner->kind != MemoryKind::reserved) return true;
  *lock = std::unique_lock<std::mutex>(virtual_mutex());
  const bool writes = op.operation == CU_STREAM_MEM_OP_WRITE_VALUE_32 ||
                      op.operation == CU_STREAM_MEM_OP_WRITE_VALUE_64;
  int flags = 0;
  const bool mapped = find_mapping(op.word, op.wide ? 8 : 4, &flags);
  if (mapped && flags != 0 && (!writes || flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE)) return true;
  lock->unlock();
  fault(CUDA_ERROR_ILLEGAL_ADDRESS,
        std::string("a memory operation ") + (writes ? "writes to " : "reads ") +
            hex(op.word.owner->alias +
                static_cast<size_t>(op.word.address - op.word.owner->storage)) +
            (mapped ? ", to which the device has no such access" : ", where no memory is mapped"));
  return false;
}

// Runs the operations of a batch in array order, starting at `next` (INVARIANTS.md W1). Returns the
// index of the first unsatisfied wait, or the number of operations if the batch is complete.
size_t advance(const MemopWork& work, size_t next) {
  for (; next < work.ops.size(); ++next) {
    const Memop& op = work.ops[next];
    if (sticky() != CUDA_SUCCESS) return work.ops.size();
    if (!op.word.live()) {
      fault(CUDA_ERROR_ILLEGAL_ADDRESS,
            "use after free: a memory operation accesses " + op.word.owner->describe());
      return work.ops.size();
    }
    std::unique_lock<std::mutex> lock;
    if (!lock_mapping(op, &lock)) return work.ops.size();
    switch (op.operation) {
      case CU_STREAM_MEM_OP_WAIT_VALUE_32:
      case CU_STREAM_MEM_OP_WAIT_VALUE_64:
        if (!satisfied(op)) return next;
        break;
      case CU_STREAM_MEM_OP_WRITE_VALUE_32:
      case CU_STREAM_MEM_OP_WRITE_VALUE_64:
        store(op);
        break;
      default:  // barrier, flush
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
    }
  }
  return next;
}

// Polls the wait of every suspended batch once. Removes the batches that are now complete and
// appends their operations to `done`.
void poll_pending(std::vector<Op*>* done) {
  auto completed = [&](Pending& item) {
    const MemopWork& work = *item.op->work.memop;
    item.next = advance(work, item.next);
    if (item.next < work.ops.size()) return false;
    done->push_back(item.op);
    return true;
  };
  auto end = std::remove_if(g_poller.pending.begin(), g_poller.pending.end(), completed);
  g_poller.pending.erase(end, g_poller.pending.end());
}

void poll_main() {
  pthread_setname_np(pthread_self(), "softcuda-poll");
  request_short_time_slice();
  // Linux may delay a wake-up by the timer slack. The default slack of 50 us would double the sleep
  // time.
  prctl(PR_SET_TIMERSLACK, 1000UL);
  uint64_t active = now_ns();
  std::vector<Op*> done;
  std::deque<Op*> held;
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(g_poller.mutex);
      if (g_poller.pending.empty()) {
        g_poller.wake.wait(lock, [&] { return !g_poller.pending.empty(); });
        active = now_ns();
      }
      poll_pending(&done);
      if (g_poller.pending.empty() && g_poller.polling_kernels == 0) held.swap(g_poller.held);
    }
    // All operations that become ready are queued for the workers (keep_one is false). The poller
    // thread runs no device work itself.
    for (Op* op : done) complete(op, false);
    for (Op* op : held) dispatch(op, false);
    if (!done.empty()) active = now_ns();
    done.clear();
    held.clear();
    if (now_ns() - active > kSpinNs) {
      const timespec pause{0, kSleepNs};
      nanosleep(&pause, nullptr);
    }
  }
}

}  // namespace

bool start_memops(Op* op) {
  const MemopWork& work = *op->work.memop;
  const size_t next = advance(work, 0);
  if (next == work.ops.size()) return true;
  std::lock_guard<std::mutex> lock(g_poller.mutex);
  g_poller.pending.push_back({op, next});
  if (!g_poller.started) {
    g_poller.started = true;
    std::thread(poll_main).detach();
  }
  g_poller.wake.notify_one();
  return false;
}

bool hold_behind_wait(Op* op) {
  if (settings().queues != 1) return false;
  std::lock_guard<std::mutex> lock(g_poller.mutex);
  if (g_poller.pending.empty() && g_poller.polling_kernels == 0) return false;
  g_poller.held.push_back(op);
  return true;
}

PollingKernel::PollingKernel() {
  std::lock_guard<std::mutex> lock(g_poller.mutex);
  ++g_poller.polling_kernels;
}

PollingKernel::~PollingKernel() {
  std::deque<Op*> held;
  {
    std::lock_guard<std::mutex> lock(g_poller.mutex);
    if (--g_poller.polling_kernels == 0 && g_poller.pending.empty()) held.swap(g_poller.held);
  }
  for (Op* op : held) dispatch(op, false);
}

}  // namespace softcuda
