// Fiber stacks and the context switch: own assembly on x86-64 (fibers.h), ucontext elsewhere.
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
constexpr size_t kColour = 192;
}  // namespace

#ifdef SOFTCUDA_OWN_SWITCH
static void prepare(Context* context, char* stack, size_t size, void (*entry)()) {
  // The first switch jumps to entry, with the stack alignment that a call would leave.
  char* top = stack + size - 16;
  std::memcpy(top, &entry, sizeof entry);
  context->stack_pointer = top;
}
#else
void switch_context(Context* from, Context* to) { swapcontext(&from->machine, &to->machine); }

static void prepare(Context* context, char* stack, size_t size, void (*entry)()) {
  getcontext(&context->machine);
  context->machine.uc_stack.ss_sp = stack;
  context->machine.uc_stack.ss_size = size;
  context->machine.uc_link = nullptr;
  makecontext(&context->machine, entry, 0);
}
#endif

void FiberPool::grow() {
  const size_t each = kStack + kGuard;
  void* slab =
      mmap(nullptr, kSlab * each, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
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
    // Tops at different cache sets: equal offsets would make every switch miss the first cache.
    prepare(&fiber->context, stack, kStack - (i + 1) * kColour, entry_);
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
