// Fiber stacks and the context switch: own assembly on x86-64, ucontext elsewhere.
#include "fibers.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace softcuda {
namespace {
constexpr size_t kStack = 512 << 10;  // touched lazily; CUDA's own limit of local memory a thread
constexpr size_t kGuard = 64 << 10;
constexpr size_t kSlab = 32;  // stacks mapped at once
}  // namespace

#if defined(__x86_64__)
// Saves the registers that a call preserves, exchanges stacks, restores. About 2 ns.
asm(R"(
.text
.align 16
.type softcuda_switch_stacks, @function
softcuda_switch_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size softcuda_switch_stacks, .-softcuda_switch_stacks
)");
extern "C" void softcuda_switch_stacks(void** from, void* to);

void switch_context(Context* from, Context* to) {
  softcuda_switch_stacks(&from->stack_pointer, to->stack_pointer);
}

static void prepare(Context* context, char* stack, void (*entry)()) {
  // The first switch "returns" into entry with the alignment a call would leave.
  char* top = stack + kStack - 16;
  std::memcpy(top, &entry, sizeof entry);
  top -= 6 * sizeof(void*);
  std::memset(top, 0, 6 * sizeof(void*));
  context->stack_pointer = top;
}
#else
void switch_context(Context* from, Context* to) { swapcontext(&from->machine, &to->machine); }

static void prepare(Context* context, char* stack, void (*entry)()) {
  getcontext(&context->machine);
  context->machine.uc_stack.ss_sp = stack;
  context->machine.uc_stack.ss_size = kStack;
  context->machine.uc_link = nullptr;
  makecontext(&context->machine, entry, 0);
}
#endif

void FiberPool::grow() {
  const size_t each = kStack + kGuard;
  void* slab = mmap(nullptr, kSlab * each, PROT_NONE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (slab == MAP_FAILED) {
    std::fprintf(stderr, "softcuda: cannot map stacks for a block's threads\n");
    std::abort();
  }
  slabs_.push_back(static_cast<char*>(slab));
  for (size_t i = kSlab; i-- > 0;) {
    char* stack = static_cast<char*>(slab) + i * each + kGuard;
    if (mprotect(stack, kStack, PROT_READ | PROT_WRITE) != 0) {
      std::fprintf(stderr, "softcuda: cannot map stacks for a block's threads\n");
      std::abort();
    }
    auto* fiber = new Fiber;
    prepare(&fiber->context, stack, entry_);
    free_.push_back(fiber);
  }
}

Fiber* FiberPool::get() {
  if (free_.empty()) grow();
  Fiber* fiber = free_.back();
  free_.pop_back();
  return fiber;
}

bool FiberPool::in_guard(unsigned long long address) const {
  for (char* slab : slabs_) {
    const auto from = reinterpret_cast<unsigned long long>(slab);
    if (address >= from && address < from + kSlab * (kStack + kGuard)) {
      return (address - from) % (kStack + kGuard) < kGuard;
    }
  }
  return false;
}

}  // namespace softcuda
