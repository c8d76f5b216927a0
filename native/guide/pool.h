// Thread pool that serves the slots of a grammar step.
//
// Invariants
// 1. A job is a number. The grammar worker uses the index of a slot. One thread posts jobs. The
//    pool's threads claim the jobs in order, each job once. A job must not be posted again before
//    it has been served.
// 2. post(), wake(), claim() and wait() never allocate, throw, take the GIL or call the driver. The
//    pool's threads count as host work, so their driver calls are refused.
// 3. An idle thread polls kSpins times and then parks. wake() takes the mutex only if threads are
//    parked.
// 4. A long job does not delay other jobs: idle threads continue with the queue. The caller
//    determines whether all jobs of a step are done.
// 5. The destructor joins each thread after its current job and drops unclaimed jobs.
// 6. Threads do not survive fork(). A forked child must not post jobs; Pool::End leaks the pool
//    there, because its destructor would wait for threads that do not exist.
#pragma once

#include <Python.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "hostwork/driver.h"
#include "hostwork/gate.h"
#include "threads.h"

namespace graft::guide {

// Maximum time that a step waits for the threads that serve its slots. A test can let `clock` point
// to a word that replaces the real clock and that the test increments.
struct Budget {
  int64_t ns = 0;           // 0: unlimited
  int64_t patience_ns = 0;  // maximum waiting time for threads that get no processor time
  const int64_t* clock = nullptr;
  int64_t now() const {
    return clock == nullptr ? monotonic_ns() : __atomic_load_n(clock, __ATOMIC_ACQUIRE);
  }
};

class Pool {
 public:
  using Work = void (*)(void* context, int job);
  struct End {
    void operator()(Pool* pool) const {
      if (getpid() == pool->owner_) delete pool;
    }
  };

  // Starts the threads. `capacity` is the maximum number of jobs that have been posted and not
  // claimed.
  Pool(int threads, int capacity, Work work, void* context)
      : work_(work), context_(context), ring_(static_cast<size_t>(capacity)) {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this, i] { run(i); });
  }
  ~Pool() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stop_.store(true);
    }
    posted_more_.notify_all();
    // A pool thread that has run Python code takes the GIL when it ends, to free its Python thread
    // state. If the caller holds the GIL, release it while the threads are joined.
    const bool in_python = hostwork::holds_gil();
    PyThreadState* const state = in_python ? PyEval_SaveThread() : nullptr;
    for (std::thread& thread : threads_) thread.join();
    if (state != nullptr) PyEval_RestoreThread(state);
  }

  void post(int job) noexcept {
    const uint64_t at = posted_.load(std::memory_order_relaxed);
    ring_[at % ring_.size()].store(job, std::memory_order_relaxed);
    posted_.store(at + 1);
  }

  void wake(int threads) noexcept {
    if (parked_.load() == 0) return;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
    }
    for (int i = 0; i < threads; ++i) posted_more_.notify_one();
  }

  // Claims the next job; returns -1 if there is none.
  int claim() noexcept {
    uint64_t at = claimed_.load();
    while (!stop_.load(std::memory_order_relaxed) && at < posted_.load()) {
      const int job = ring_[at % ring_.size()].load(std::memory_order_relaxed);
      // Another thread may have claimed this job, and the ring entry may then have been
      // overwritten. In this case `claimed_` has changed, the exchange fails and `job` is
      // discarded.
      if (claimed_.compare_exchange_weak(at, at + 1)) return job;
    }
    return -1;
  }

  bool waiting() const { return waiting_.load(); }

  // Waits until done() is true, or until the budget has passed and late() is true. late() returns
  // whether every unfinished job has used the budget in processor time. wait() therefore waits
  // longer for jobs that are waiting for a processor, but at most `patience_ns`. After half of the
  // budget, wait() wakes all parked threads, because the running threads may be blocked. Returns
  // whether all jobs are done.
  template <typename Done, typename Late>
  bool wait(const Done& done, const Late& late, const Budget& budget, int64_t start) noexcept {
    bool woken = false;
    for (int spins = 0;; ++spins) {
      if (done()) return true;
      int64_t left = kMaxSleep;
      if (budget.ns > 0) {
        const int64_t spent = budget.now() - start;
        const bool out_of_patience = budget.clock != nullptr || spent >= budget.patience_ns;
        if (spent >= budget.ns && (out_of_patience || late())) return done();
        if (!woken && 2 * spent >= budget.ns) {
          wake(static_cast<int>(threads_.size()));
          woken = true;
        }
        left = std::min(left, spent < budget.ns ? budget.ns - spent : kPollInterval);
      }
      if (spins < kSpins) {
        cpu_relax();
        continue;
      }
      std::unique_lock<std::mutex> lock(mutex_);
      waiting_.store(true);
      // Waits use the system clock, because the thread sanitizer does not support waiting with
      // other clocks.
      const auto until = std::chrono::system_clock::now() + std::chrono::nanoseconds(left);
      if (!done()) served_one_.wait_until(lock, until);
      waiting_.store(false);
    }
  }

 private:
  static constexpr int kSpins = 400;  // polls before a thread sleeps; about 10 to 20 microseconds
  static constexpr int64_t kMaxSleep = 1'000'000;    // ns between reads of the budget's clock
  static constexpr int64_t kPollInterval = 100'000;  // ns between reads of the threads' clocks

  void run(int index) noexcept {
    pthread_setname_np(pthread_self(), ("guide" + std::to_string(index)).c_str());
    ask_for_short_slice();  // a step waits for this thread
    // Tell the soft device that the device waits for this thread. It then refuses the thread's
    // driver calls.
    const hostwork::Driver* const driver = hostwork::bound_driver;
    if (driver != nullptr && driver->owe_answer != nullptr) driver->owe_answer(1);
    const hostwork::HostWorkScope host_work;
    for (;;) {
      for (int spins = 0; spins < kSpins; ++spins) {
        const int job = claim();
        if (job < 0) {
          cpu_relax();
          continue;
        }
        work_(context_, job);
        spins = 0;
        if (!waiting_.load()) continue;
        {
          const std::lock_guard<std::mutex> lock(mutex_);
        }
        served_one_.notify_all();
      }
      std::unique_lock<std::mutex> lock(mutex_);
      parked_.fetch_add(1);
      posted_more_.wait(lock, [&] { return stop_.load() || claimed_.load() < posted_.load(); });
      parked_.fetch_sub(1);
      if (stop_.load()) return;
    }
  }

  const Work work_;
  void* const context_;
  const pid_t owner_ = getpid();
  std::vector<std::atomic<int>> ring_;
  std::atomic<uint64_t> posted_{0}, claimed_{0};
  std::atomic<int> parked_{0};
  std::atomic<bool> waiting_{false}, stop_{false};
  std::mutex mutex_;
  std::condition_variable posted_more_, served_one_;
  std::vector<std::thread> threads_;
};

}  // namespace graft::guide
