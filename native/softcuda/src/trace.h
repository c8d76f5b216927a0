// Tracing: start and end times of the operations that workers and the host-function thread run
// (INVARIANTS.md T1 to T3).
#pragma once

#include "scheduler.h"

namespace softcuda {

extern std::atomic<bool> g_tracing;
constexpr unsigned kHostWorker = 0xffffffffu;  // worker index of the host-function thread

// Records the time that one worker spends on one operation. Construct the object before the
// operation runs. The constructor copies the operation's data, because the operation may be
// destroyed when it is complete.
class TraceSpan {
 public:
  explicit TraceSpan(const Op* op) {
    if (__builtin_expect(g_tracing.load(std::memory_order_relaxed), 0)) begin(op);
  }
  void end(unsigned worker) {
    if (__builtin_expect(begin_ns_ != 0, 0)) record(worker);
  }

 private:
  void begin(const Op* op);
  void record(unsigned worker);
  const Program* program_ = nullptr;
  unsigned node_ = 0;
  uint64_t launch_ = 0, run_ = 0;
  WorkKind kind_ = WorkKind::none;
  uint64_t begin_ns_ = 0;
};

}  // namespace softcuda
