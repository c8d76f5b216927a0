// The threads of the device: the workers, which play the role of SMs and run kernels, copies and
// memsets, and the host-function thread (INVARIANTS.md S7 to S9).
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "executor.h"
#include "ptx_library.h"
#include "time_slice.h"
#include "trace.h"

namespace softcuda {
namespace {

struct Pool {
  std::mutex mutex;
  std::condition_variable wake;
  // Operations that wait for a worker.
  std::deque<Op*> ready;
  // Running kernels with remaining blocks, which other workers may help to run.
  std::vector<Op*> shared;
  // Total number of entries of `ready` and `shared`. Idle workers poll it while they spin.
  std::atomic<int> available{0};
  // Number of workers that are running an operation.
  std::atomic<int> working{0};
  int sleeping = 0;
  unsigned workers = 0;
  std::vector<std::atomic<Executor*>> executors;
};
Pool& g_pool = *new Pool;

struct HostQueue {
  std::mutex mutex;
  std::condition_variable wake;
  std::deque<Op*> ready;
};
HostQueue& g_hosts = *new HostQueue;

// A kernel is shared with other workers only if its estimated run time is at least this long.
constexpr double kMinSharedNs = 20000;
// Target run time of the group of blocks that a worker takes at once.
constexpr double kChunkNs = 10000;
// How long an idle worker spins before it sleeps. It spins only while other workers are busy.
constexpr uint64_t kIdleSpinNs = 100000;

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

void wake_one() {
  if (g_pool.sleeping > 0) g_pool.wake.notify_one();
}

// Waits for the next operation and returns it. Sets `helping` if the operation is a kernel that
// another worker has already started.
Op* take(bool* helping) {
  const uint64_t spin_end = now_ns() + kIdleSpinNs;
  for (int spin = 0; g_pool.available.load(std::memory_order_relaxed) == 0; ++spin) {
    const bool others_busy = g_pool.working.load(std::memory_order_relaxed) > 0;
    if (spin >= 200 && !(others_busy && now_ns() < spin_end)) break;
    relax();
    if (spin % 32 == 31) sched_yield();  // a busy worker may need this processor
  }
  std::unique_lock<std::mutex> lock(g_pool.mutex);
  for (;;) {
    if (!g_pool.ready.empty()) {
      Op* op = g_pool.ready.front();
      g_pool.ready.pop_front();
      g_pool.available.fetch_sub(1, std::memory_order_relaxed);
      *helping = false;
      return op;
    }
    if (!g_pool.shared.empty()) {
      Op* op = g_pool.shared.back();
      op->users.fetch_add(1, std::memory_order_relaxed);
      *helping = true;
      return op;
    }
    ++g_pool.sleeping;
    g_pool.wake.wait(lock);
    --g_pool.sleeping;
  }
}

// Removes a kernel from the list of shared kernels, because all its blocks have been taken.
void unshare(Op* op) {
  std::lock_guard<std::mutex> lock(g_pool.mutex);
  auto it = std::find(g_pool.shared.begin(), g_pool.shared.end(), op);
  if (it == g_pool.shared.end()) return;
  g_pool.shared.erase(it);
  g_pool.available.fetch_sub(1, std::memory_order_relaxed);
}

uint64_t blocks_of(const KernelWork& work) {
  return static_cast<uint64_t>(work.grid.x) * work.grid.y * work.grid.z;
}

// Adds a kernel to the list of shared kernels, so that other workers also run its blocks.
void share(Op* op) {
  std::lock_guard<std::mutex> lock(g_pool.mutex);
  g_pool.shared.push_back(op);
  g_pool.available.fetch_add(1, std::memory_order_relaxed);
  wake_one();
}

// Updates the moving average of a kernel's run time per thread.
void update_run_time(Function& function, double estimate, double measured) {
  const double updated = estimate > 0 ? 0.75 * estimate + 0.25 * measured : measured;
  function.ns_per_thread.store(static_cast<float>(updated), std::memory_order_relaxed);
}

// Runs blocks of a kernel until none is left. Returns true if this worker was the last one to
// leave, so that the operation is complete (INVARIANTS.md S8).
bool run_kernel(Executor* executor, Op* op, bool helping) {
  const KernelWork& work = *op->work.kernel;
  const uint64_t blocks = blocks_of(work);
  const double threads = static_cast<double>(work.block.x) * work.block.y * work.block.z;
  Function& function = *work.function;
  constexpr double kInitialNsPerThread = 20;
  const double estimate = function.ns_per_thread.load(std::memory_order_relaxed);
  const double block_ns = (estimate > 0 ? estimate : kInitialNsPerThread) * threads;
  bool shared = false;
  if (!helping) {
    op->next_block.store(0, std::memory_order_relaxed);
    op->users.store(1, std::memory_order_relaxed);
    if (function.ptx != nullptr) ptx::begin_launch(*op);
    const double kernel_ns = block_ns * static_cast<double>(blocks);
    shared = blocks > 1 && g_pool.workers > 1 && kernel_ns > kMinSharedNs;
    if (shared) share(op);
  } else {
    std::lock_guard<std::mutex> lock(g_pool.mutex);
    // Wake one more worker. Each woken worker wakes the next one, so that no worker has to wake all
    // others.
    wake_one();
  }
  const bool alone = g_pool.workers == 1 || (!shared && !helping);
  uint64_t chunk = blocks;
  if (!alone) {
    const uint64_t max_chunk = std::max<uint64_t>(1, blocks / (uint64_t{g_pool.workers} * 8));
    chunk = std::clamp<uint64_t>(static_cast<uint64_t>(kChunkNs / block_ns), 1, max_chunk);
  }
  const uint64_t start = now_ns();
  uint64_t ran = 0;
  for (;;) {
    const uint64_t first = op->next_block.fetch_add(chunk, std::memory_order_relaxed);
    if (first >= blocks) break;
    const uint64_t last = std::min(blocks, first + chunk);
    if (sticky() != CUDA_SUCCESS || !run_blocks(executor, *op, first, last)) break;
    ran += last - first;
  }
  const uint64_t limit_ns = settings().kernel_seconds * uint64_t{1000000000};
  if (limit_ns != 0 && now_ns() - start > limit_ns) {
    fault(CUDA_ERROR_LAUNCH_TIMEOUT, "kernel '" + function.name + "' ran for more than " +
                                         std::to_string(settings().kernel_seconds) +
                                         " s (SOFTCUDA_ATTRIBUTE_17)");
  }
  if (ran > 0) {
    const auto elapsed = static_cast<double>(now_ns() - start);
    update_run_time(function, estimate, elapsed / (static_cast<double>(ran) * threads));
  }
  if (shared || helping) unshare(op);
  if (op->users.fetch_sub(1, std::memory_order_acq_rel) != 1) return false;
  if (function.ptx != nullptr) ptx::end_launch(*op);
  return true;
}

void worker_main(unsigned index) {
  pthread_setname_np(pthread_self(), ("softcuda-sm" + std::to_string(index)).c_str());
  request_short_time_slice();
  Executor* executor = make_executor(index);
  g_pool.executors[index] = executor;
  Op* op = nullptr;
  for (;;) {
    bool helping = false;
    if (op == nullptr) {
      g_pool.working.fetch_sub(1, std::memory_order_relaxed);
      op = take(&helping);
      g_pool.working.fetch_add(1, std::memory_order_relaxed);
    }
    bool finished = true;
    const bool run = sticky() == CUDA_SUCCESS;  // after a fault operations complete without running
    TraceSpan span(op);
    switch (op->work.kind) {
      case WorkKind::kernel:
        if (!helping && run) count_add(Counter::kernel_launch);
        finished = run || helping ? run_kernel(executor, op, helping) : true;
        break;
      case WorkKind::copy:
        if (run) run_copy(executor, *op->work.copy);
        break;
      case WorkKind::fill:
        if (run) run_fill(executor, *op->work.fill);
        break;
      default:
        break;
    }
    span.end(index);
    op = finished ? complete(op, true) : nullptr;
  }
}

void host_main() {
  pthread_setname_np(pthread_self(), "softcuda-host");
  request_short_time_slice();
  for (;;) {
    Op* op = nullptr;
    {
      std::unique_lock<std::mutex> lock(g_hosts.mutex);
      g_hosts.wake.wait(lock, [&] { return !g_hosts.ready.empty(); });
      op = g_hosts.ready.front();
      g_hosts.ready.pop_front();
    }
    // After a fault, host functions are not called (INVARIANTS.md E2).
    if (sticky() == CUDA_SUCCESS) {
      count_add(Counter::host_func);
      TraceSpan span(op);
      run_host_function(op->work.host.fn, op->work.host.data);
      span.end(kHostWorker);
    }
    complete(op, false);
  }
}

}  // namespace

// Queues an operation for the workers.
void push_device(Op* op) {
  std::lock_guard<std::mutex> lock(g_pool.mutex);
  g_pool.ready.push_back(op);
  g_pool.available.fetch_add(1, std::memory_order_relaxed);
  wake_one();
}

// Queues a host function for the host-function thread.
void push_host(Op* op) {
  std::lock_guard<std::mutex> lock(g_hosts.mutex);
  g_hosts.ready.push_back(op);
  g_hosts.wake.notify_one();
}

void describe_workers(std::string* out) {
  for (auto& slot : g_pool.executors) {
    Executor* executor = slot.load();
    const char* kernel = executor != nullptr ? executor->running_kernel() : nullptr;
    if (kernel != nullptr) *out += std::string("a worker runs kernel '") + kernel + "'\n";
  }
}

void start_workers() {
  static std::once_flag once;
  std::call_once(once, [] {
    g_pool.workers = settings().workers;
    g_pool.working = static_cast<int>(g_pool.workers);
    g_pool.executors = std::vector<std::atomic<Executor*>>(g_pool.workers);
    for (unsigned i = 0; i < g_pool.workers; ++i) std::thread(worker_main, i).detach();
    std::thread(host_main).detach();
  });
}

}  // namespace softcuda
