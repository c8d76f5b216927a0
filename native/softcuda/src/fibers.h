// Stacks that suspended threads of a block keep, and the switch between them.
#pragma once

#include <vector>

#include "softcuda_abi.h"

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace softcuda {

// A suspended point of execution.
struct Context {
#if defined(__x86_64__)
  void* stack_pointer = nullptr;
#else
  ucontext_t machine;
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

void switch_context(Context* from, Context* to);

}  // namespace softcuda
