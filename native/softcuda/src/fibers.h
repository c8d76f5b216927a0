// Fibers: stacks for the waiting threads of a block, and the switch between stacks.
#pragma once

#include <cstddef>
#include <vector>

#include "softcuda_abi.h"

#if defined(__x86_64__)
#define SOFTCUDA_OWN_SWITCH 1
#else
#include <ucontext.h>
#endif

// SOFTCUDA_ASAN_FIBERS and SOFTCUDA_TSAN_FIBERS are defined in builds with a sanitizer, to which
// every switch between stacks must be announced (INVARIANTS.md X9).

namespace softcuda {

// The state of a suspended thread of execution: its stack pointer or registers, and the sanitizer's
// data about its stack.
struct Context {
#ifdef SOFTCUDA_OWN_SWITCH
  void* stack_pointer = nullptr;
#else
  ucontext_t machine;
#endif
#if defined(SOFTCUDA_ASAN_FIBERS)
  // Lower end of the stack. For a worker's own stack, this is unknown until the first switch away
  // from it.
  const void* bottom = nullptr;
  size_t size = 0;
  void* fake_stack = nullptr;
#elif defined(SOFTCUDA_TSAN_FIBERS)
  void* fiber = nullptr;
#endif
};

// A stack and the state of the GPU thread that is suspended on it.
struct Fiber {
  Context context;
  softcuda_dim3 thread_idx{};  // threadIdx of the suspended thread
  unsigned thread = 0;         // linear index of the suspended thread
};

// Pool of fibers. Each stack has a guard page below it. Fibers are reused by later blocks; their
// memory is never returned to the system.
class FiberPool {
 public:
  // `entry` is the first function on each new stack.
  explicit FiberPool(void (*entry)()) : entry_(entry) {}
  Fiber* get();
  void put(Fiber* fiber) { free_.push_back(fiber); }
  // Whether `address` is in a guard page, which means that a kernel's stack has overflowed.
  bool in_guard(unsigned long long address) const;

 private:
  void grow();
  void (*entry_)();
  std::vector<Fiber*> free_;
  std::vector<char*> slabs_;
};

#if defined(SOFTCUDA_ASAN_FIBERS) || defined(SOFTCUDA_TSAN_FIBERS)
void switch_context(Context* from, Context* to);
// Announces to the sanitizer that a new stack runs. Must be the first call on this stack.
void announce_new_stack();
// Announces to the sanitizer that a signal handler has jumped to the worker's own stack. Call this
// function after the jump.
void announce_jump(Context* main);
#else
inline void announce_new_stack() {}
inline void announce_jump(Context*) {}
#endif

#ifdef SOFTCUDA_OWN_SWITCH
// Saves the current position in `from` and continues at the position in `to`. Inlining this
// function reduces the mispredictions of return addresses to one per switch instead of one per call
// level. The assembly saves some of the registers that a call preserves and lists the others as
// clobbered. The first instruction skips the red zone, the 128 bytes below the stack pointer, which
// the compiler may use.
inline __attribute__((always_inline)) void switch_stacks(Context* from, Context* to) {
  void** save = &from->stack_pointer;
  void* load = to->stack_pointer;
  asm volatile(
      "leaq -128(%%rsp), %%rsp\n\t"
      "pushq %%rbp\n\t"
      "leaq 1f(%%rip), %%rax\n\t"
      "pushq %%rax\n\t"
      "movq %%rsp, (%0)\n\t"
      "movq %1, %%rsp\n\t"
      "popq %%rax\n\t"
      "jmpq *%%rax\n"
      "1:\n\t"
      "popq %%rbp\n\t"
      "leaq 128(%%rsp), %%rsp\n\t"
      : "+D"(save), "+S"(load)
      :
      : "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "xmm0",
        "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",
        "xmm12", "xmm13", "xmm14", "xmm15", "memory", "cc");
}
#else
void switch_stacks(Context* from, Context* to);
#endif

#if !defined(SOFTCUDA_ASAN_FIBERS) && !defined(SOFTCUDA_TSAN_FIBERS)
inline __attribute__((always_inline)) void switch_context(Context* from, Context* to) {
  switch_stacks(from, to);
}
#endif

}  // namespace softcuda
