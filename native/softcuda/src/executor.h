// The executor runs the blocks of kernels on one worker. The threads of a block run one after
// another on one stack, called a fiber. A thread that waits at a barrier or warp operation keeps
// its fiber, and the other threads continue on another fiber (INVARIANTS.md X1 to X10).
#pragma once

#include <csetjmp>
#include <optional>

#include "fibers.h"
#include "memops.h"
#include "modules.h"

namespace softcuda {

unsigned long long hook_warp(softcuda_block* block, unsigned op, unsigned mask,
                             unsigned long long value, unsigned arg, unsigned width);

class Executor {
 public:
  explicit Executor(unsigned worker);

  bool run_blocks(const Op& op, uint64_t first, uint64_t last);
  // Runs `body`. If an illegal memory access occurs in it, records a fault whose text names
  // `operation` and returns false.
  template <class Body>
  bool guarded(const std::string& operation, const Body& body) {
    if (sigsetjmp(recover_, 0) != 0) {
      report_fault(operation, nullptr);
      return false;
    }
    armed_ = true;
    body();
    armed_ = false;
    return true;
  }
  // Called by the signal handler with the address of the access, if it is known. Does not return if
  // device work caused the signal.
  void handle_signal(int signal, unsigned long long address, bool known, bool write);

  // The device functions that kernels call through the table of hooks (softcuda_abi.h).
  inline __attribute__((always_inline)) int barrier(unsigned op, int predicate);
  inline __attribute__((always_inline)) unsigned long long warp(unsigned op, unsigned mask,
                                                                unsigned long long value,
                                                                unsigned arg, unsigned width);
  void thread_exit();
  [[noreturn]] void fail(CUresult code, const std::string& text);
  void fiber_loop();
  const char* running_kernel() const { return running_kernel_.load(std::memory_order_relaxed); }
  // Called when the running kernel reads the clock. Such a kernel probably polls memory until a
  // time limit. With SOFTCUDA_QUEUES=1 (one hardware queue), operations after such a kernel are
  // held back (PollingKernel).
  void note_clock() {
    if (settings().queues == 1 && !polling_) polling_.emplace();
  }
  void end_polling() { polling_.reset(); }

 private:
  // The warp operation at which one lane waits: the arguments of the operation and the lane's
  // result.
  struct Lane {
    unsigned op, mask, arg, width;
    unsigned long long value, result;
  };
  void begin_tracking();
  void suspend();
  Fiber* next_ready(unsigned warp);
  void release_barrier();
  static void reduce_warp(Lane* lanes, unsigned group, unsigned op);
  static void resolve_lane(Lane* lanes, unsigned group, unsigned votes, unsigned i);
  bool try_release_warp(unsigned warp, unsigned mask);
  [[noreturn]] void deadlock();
  // Leaves the block after a fault and returns to the worker's own stack.
  [[noreturn]] void abort_block();
  // Returns the text "kernel 'name' block (x,y,z)" for error messages.
  std::string location() const;
  void report_fault(const std::string& operation, const KernelWork* work);
  std::string describe_address(const KernelWork* work) const;

  unsigned worker_;
  FiberPool fibers_;
  Context main_;
  Fiber* running_ = nullptr;  // fiber of the running thread
  softcuda_block* block_ = nullptr;
  const softcuda_entry* entry_ = nullptr;
  void** params_ = nullptr;
  char* shared_end_ = nullptr;  // end of the dynamic shared memory; guard pages follow
  bool failed_ = false;
  std::atomic<const char*> running_kernel_{nullptr};
  std::optional<PollingKernel> polling_;

  // States of the threads of the block. They are valid while block_->tracked is set (INVARIANTS.md
  // X2). The arrays of `unsigned` contain one bit mask per warp, with one bit per lane.
  Fiber* suspended_[1024];
  Lane lanes_[1024];
  unsigned ready_[32], at_barrier_[32], at_warp_[32], exited_[32];
  // Number of threads that have arrived at a barrier, and number of those whose predicate is true
  // (__syncthreads_count).
  struct Arrivals {
    unsigned threads = 0;
    unsigned predicates = 0;
  };
  Arrivals pending_barrier_;
  // The arrivals at the barrier that was completed last. Threads that waited at it may still read
  // its result (INVARIANTS.md X3).
  Arrivals last_barrier_;

  // Where the signal handler jumps to after a fault.
  sigjmp_buf recover_;
  // Set while device work runs on this worker. Only then does a signal mean a fault of device code.
  volatile bool armed_ = false;
  int fault_signal_ = 0;
  unsigned long long fault_address_ = 0;
  bool fault_known_ = false, fault_write_ = false;
};

// Returns the fiber of the next ready thread, searching the warps in order from `warp` on. Returns
// null if no thread is ready.
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

// Suspends the running thread, which keeps its stack, and runs another one. This is a ready thread
// or, if no thread is ready, the next thread that has not started, on another stack. If no such
// thread exists either, the block is deadlocked (INVARIANTS.md X5).
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
