// Stacks that suspended threads of a block keep, and the switch between them.
#pragma once

#include <cstddef>
#include <vector>

#include "softcuda_abi.h"

#if defined(__x86_64__)
#define SOFTCUDA_OWN_SWITCH 1
#else
#include <ucontext.h>
#endif

// SOFTCUDA_ASAN_FIBERS and SOFTCUDA_TSAN_FIBERS: built with a sanitizer that follows stacks, so
// each switch is announced to it (native/tests/CMakeLists.txt).

namespace softcuda {

// A suspended point of execution.
struct Context {
#ifdef SOFTCUDA_OWN_SWITCH
  void* stack_pointer = nullptr;
#else
  ucontext_t machine;
#endif
#if defined(SOFTCUDA_ASAN_FIBERS)
  const void* bottom = nullptr;  // of the stack; of a worker's own stack once it was left
  size_t size = 0;
  void* fake_stack = nullptr;
#elif defined(SOFTCUDA_TSAN_FIBERS)
  void* fiber = nullptr;
#endif
};

struct Fiber {
  Context context;
  softcuda_dim3 thread_idx{};  // of the suspended thread that owns this stack
  unsigned thread = 0;
};

// Stacks with a guard page below each; never returned to the system, reused by later blocks.
class FiberPool {
 public:
  explicit FiberPool(void (*entry)()) : entry_(entry) {}
  Fiber* get();
  void put(Fiber* fiber) { free_.push_back(fiber); }
  // Whether `address` lies in a guard page: a kernel's stack overflowed.
  bool in_guard(unsigned long long address) const;

 private:
  void grow();
  void (*entry_)();
  std::vector<Fiber*> free_;
  std::vector<char*> slabs_;
};

#if defined(SOFTCUDA_ASAN_FIBERS) || defined(SOFTCUDA_TSAN_FIBERS)
void switch_context(Context* from, Context* to);
// First thing on a stack that was never left before.
void entered_stack();
// A fault's handler jumped to the worker's own stack.
void jumped_to(Context* main);
#else
inline void entered_stack() {}
inline void jumped_to(Context*) {}
#endif

#ifdef SOFTCUDA_OWN_SWITCH
// Inline, so that one return address is mispredicted per switch instead of one per call level.
// Everything a call would preserve is either saved here or named as clobbered; the 128 bytes below
// the stack pointer (the red zone) are stepped over.
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
