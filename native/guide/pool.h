// Persistent threads that serve the slots of a step.
//
// 1. A job is a number. One thread posts; any thread of the pool claims a job, once, in order. A
//    job that is posted must not be posted again before it was served.
// 2. post(), wake(), claim() and wait() never allocate, throw, take the GIL or call the driver. The
//    pool's threads are inside host work: a driver call of theirs is refused.
// 3. An idle thread spins for kSpins looks and then parks. Posting wakes parked threads; it takes
//    the mutex only when some are parked.
// 4. A thread inside a job is never waited for by others' jobs: whoever is not busy goes on with
// the
//    queue. Whether all of a step's jobs are done is for the caller to know.
// 5. The destructor ends each thread after the job it is in; jobs nobody claimed are dropped.
// 6. Threads do not survive fork(). A forked child must not post; there Pool::End leaks the pool,
//    whose destructor would wait for threads that do not exist.
#pragma once

#include <sys/types.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "counters.h"

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
    void operator()(Pool* pool) const;
  };

  // `capacity`: jobs that may be posted and not served. Starts the threads.
  Pool(int threads, int capacity, Work work, void* context);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  void post(int job) noexcept;
  void wake(int threads) noexcept;
  // The next job, or -1.
  int claim() noexcept;
  bool waiting() const { return waiting_.load(); }
  int threads() const { return static_cast<int>(threads_.size()); }

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
          wake(threads());
          woken = true;
        }
        left = std::min(left, spent < budget.ns ? budget.ns - spent : kLook);
      }
      if (spins < kSpins) {
        relax();
        continue;
      }
      std::unique_lock<std::mutex> lock(mutex_);
      waiting_.store(true);
      if (!done()) nap(lock, left);
      waiting_.store(false);
    }
  }

 private:
  static constexpr int kSpins = 400;          // some 10 to 20 microseconds
  static constexpr int64_t kNap = 1'000'000;  // ns between looks at a clock that a test moves
  static constexpr int64_t kLook = 100'000;   // ns between looks at the threads' own clocks

  static void relax() noexcept;
  void run(int index) noexcept;
  bool idle() const noexcept { return claimed_.load() >= posted_.load(); }
  void nap(std::unique_lock<std::mutex>& lock, int64_t ns) noexcept;

  const Work work_;
  void* const context_;
  const pid_t owner_;
  std::vector<std::atomic<int>> ring_;
  std::atomic<uint64_t> posted_{0}, claimed_{0};
  std::atomic<int> parked_{0};
  std::atomic<bool> waiting_{false}, stop_{false};
  std::mutex mutex_;
  std::condition_variable posted_more_, served_one_;
  std::vector<std::thread> threads_;
};

}  // namespace graft::guide
