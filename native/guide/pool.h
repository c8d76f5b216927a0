// Persistent threads that serve the slots of a step.
//
// 1. A job is a number. One thread posts; any thread of the pool claims a job, once, in order. A
//    job that is posted must not be posted again before it was served.
// 2. post(), wake(), claim() and wait() never allocate, throw, take the GIL or call the driver. The
//    pool's threads are inside host work: a driver call of theirs is refused.
// 3. An idle thread spins for kSpins looks and then parks. Posting wakes parked threads; it takes
//    the mutex only when some are parked.
// 4. A thread inside a job is never waited for by others' jobs: whoever is not busy goes on with
//    the queue. Whether all of a step's jobs are done is for the caller to know.
// 5. The destructor ends each thread after the job it is in; jobs nobody claimed are dropped.
// 6. Threads do not survive fork(). A forked child must not post; there Pool::End leaks the pool,
//    whose destructor would wait for threads that do not exist.
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
#include "threads.h"

namespace graft::guide {

// How long a step waits for a slot. Its clock may be a word that a test moves.
struct Budget {
  // Where threads do not get on although they are not at work, this many budgets are waited.
  static constexpr int64_t kPatience = 200;

  int64_t ns = 0;  // 0: for ever
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

  // `capacity`: jobs that may be posted and not served. Starts the threads.
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
    // A thread that was in Python takes the GIL once more, to give its thread state back.
    const bool in_python = Py_IsInitialized() != 0 && PyGILState_Check() != 0;
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

  // The next job, or -1.
  int claim() noexcept {
    uint64_t at = claimed_.load();
    while (!stop_.load(std::memory_order_relaxed) && at < posted_.load()) {
      const int job = ring_[at % ring_.size()].load(std::memory_order_relaxed);
      // The cell is written again only once `claimed_` has passed it: then this fails.
      if (claimed_.compare_exchange_weak(at, at + 1)) return job;
    }
    return -1;
  }

  bool waiting() const { return waiting_.load(); }

  // Waits until `done` says so (true), or the budget is spent and `late` says that whoever is not
  // done has had as much of a processor (false): a loaded machine makes nobody late. Where jobs are
  // left unclaimed at half of the budget, every parked thread is woken: those at work may be stuck.
  template <typename Done, typename Late>
  bool wait(const Done& done, const Late& late, const Budget& budget, int64_t start) noexcept {
    bool woken = false;
    for (int spins = 0;; ++spins) {
      if (done()) return true;
      int64_t left = kNap;
      if (budget.ns > 0) {
        const int64_t spent = budget.now() - start;
        const bool given_up = budget.clock != nullptr || spent >= Budget::kPatience * budget.ns;
        if (spent >= budget.ns && (given_up || late())) return done();
        if (!woken && 2 * spent >= budget.ns) {
          wake(static_cast<int>(threads_.size()));
          woken = true;
        }
        left = std::min(left, spent < budget.ns ? budget.ns - spent : kLook);
      }
      if (spins < kSpins) {
        cpu_relax();
        continue;
      }
      std::unique_lock<std::mutex> lock(mutex_);
      waiting_.store(true);
      // the system's clock: the thread sanitizer knows waits by no other
      const auto until = std::chrono::system_clock::now() + std::chrono::nanoseconds(left);
      if (!done()) served_one_.wait_until(lock, until);
      waiting_.store(false);
    }
  }

 private:
  static constexpr int kSpins = 400;          // some 10 to 20 microseconds
  static constexpr int64_t kNap = 1'000'000;  // ns between looks at a clock that a test moves
  static constexpr int64_t kLook = 100'000;   // ns between looks at the threads' own clocks

  void run(int index) noexcept {
    pthread_setname_np(pthread_self(), ("guide" + std::to_string(index)).c_str());
    ask_for_short_slice();  // a step waits for what is done here
    // On the soft device: from now on a driver call of this thread is refused.
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
