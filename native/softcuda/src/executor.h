// One worker's block executor: runs the threads of a block as lazy fibers (invariants X1-X10).
#pragma once

#include <csetjmp>

#include "fibers.h"
#include "modules.h"

namespace softcuda {

unsigned long long hook_warp(softcuda_block* block, unsigned op, unsigned mask,
                             unsigned long long value, unsigned arg, unsigned width);

class Executor {
 public:
  explicit Executor(unsigned worker);

  bool run_blocks(const KernelWork& work, uint64_t first, uint64_t last);
  // Runs `body` so that a memory fault in it is reported as `what`; false after a fault.
  template <class Body>
  bool guarded(const std::string& what, const Body& body) {
    if (sigsetjmp(recover_, 0) != 0) {
      report_fault(what, nullptr);
      return false;
    }
    armed_ = true;
    body();
    armed_ = false;
    return true;
  }
  // From the signal handler: does not return when the fault is the device's.
  void caught(int signal, unsigned long long address, bool known, bool write);

  // Hooks of the kernel image.
  inline __attribute__((always_inline)) int barrier(unsigned op, int predicate);
  inline __attribute__((always_inline)) unsigned long long warp(unsigned op, unsigned mask,
                                                                unsigned long long value,
                                                                unsigned arg, unsigned width);
  void thread_exit();
  [[noreturn]] void fail(CUresult code, const std::string& text);
  void fiber_loop();
  const char* running_kernel() const { return running_kernel_.load(std::memory_order_relaxed); }

 private:
  struct Lane {
    unsigned op, mask, arg, width;
    unsigned long long value, result;
  };
  void begin_tracking();
  void suspend();
  Fiber* next_ready(unsigned warp);
  void release_barrier();
  bool try_release_warp(unsigned warp, unsigned mask);
  [[noreturn]] void deadlock();
  [[noreturn]] void abandon();  // the block, after a fault
  std::string where() const;
  void report_fault(const std::string& what, const KernelWork* work);

  unsigned worker_;
  FiberPool fibers_;
  Context main_;
  Fiber* running_ = nullptr;
  softcuda_block* block_ = nullptr;
  const softcuda_entry* entry_ = nullptr;
  void** params_ = nullptr;
  char* shared_end_ = nullptr;  // dynamic shared memory ends here, at a guard page
  bool failed_ = false;
  std::atomic<const char*> running_kernel_{nullptr};

  // Valid while block_->tracked: who waits where, as one bit per lane of each warp.
  Fiber* suspended_[1024];
  Lane lanes_[1024];
  unsigned ready_[32], at_barrier_[32], at_warp_[32], exited_[32];
  unsigned arrived_ = 0;
  unsigned count_ = 0;                          // predicates true at the barrier being gathered
  unsigned last_count_ = 0, last_arrived_ = 0;  // of the barrier last released

  sigjmp_buf recover_;
  volatile bool armed_ = false;
  int fault_signal_ = 0;
  unsigned long long fault_address_ = 0;
  bool fault_known_ = false, fault_write_ = false;
};

// Next ready thread in warp order from `warp` on.
inline __attribute__((always_inline)) Fiber* Executor::next_ready(unsigned warp) {
  const unsigned warps = (block_->count + 31) / 32;
  for (unsigned i = 0; i < warps; ++i, warp = warp + 1 == warps ? 0 : warp + 1) {
    if (ready_[warp] == 0) continue;
    const unsigned lane = static_cast<unsigned>(__builtin_ctz(ready_[warp]));
    ready_[warp] &= ready_[warp] - 1;
    return suspended_[warp * 32 + lane];
  }
  return nullptr;
}

// Gives the stack to the running thread and continues with a ready thread, else with one that has
// not started; with neither, nobody can ever release anybody.
inline __attribute__((always_inline)) void Executor::suspend() {
  Fiber* self = running_;
  self->thread = block_->current;
  self->thread_idx = block_->thread_idx;
  suspended_[self->thread] = self;
  Fiber* next = next_ready(self->thread / 32);
  if (__builtin_expect(next == nullptr, 0)) {
    if (block_->next >= block_->count) deadlock();
    next = fibers_.get();
  }
  running_ = next;
  switch_context(&self->context, &next->context);
  block_->current = self->thread;
  block_->thread_idx = self->thread_idx;
}

}  // namespace softcuda
