// Whether a grammar's work may be done by the step itself although there is a budget.
//
// Handing an order over and waiting for it costs some 50 microseconds. A grammar whose orders have
// all been in time is trusted after a few; the first that is not ends the trust for good. So a
// grammar holds a round up once at most, and where all are trusted a budget costs nothing.
#pragma once

#include <atomic>
#include <climits>

namespace graft::guide {

// Of one grammar, noted by all threads that serve matchers of it.
class Pace {
 public:
  static constexpr int kProof = 32;  // orders in time

  bool trusted() const { return in_time_.load(std::memory_order_relaxed) >= kProof; }
  void note(bool in_time) {
    if (!in_time) {
      in_time_.store(INT_MIN, std::memory_order_relaxed);
    } else if (const int known = in_time_.load(std::memory_order_relaxed); known >= 0) {
      // a note lost to another thread's delays the trust; one of distrust is not overwritten
      int expected = known;
      if (known < kProof) in_time_.compare_exchange_strong(expected, known + 1);
    }
  }

 private:
  std::atomic<int> in_time_{0};
};

}  // namespace graft::guide
