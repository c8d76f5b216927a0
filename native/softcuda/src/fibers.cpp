// Memory of the fiber stacks, and the switch of stacks on machines other than x86-64, which uses
// ucontext. The switch for x86-64 is inline assembly in fibers.h.
#include "fibers.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#if defined(SOFTCUDA_ASAN_FIBERS)
#include <sanitizer/common_interface_defs.h>
#elif defined(SOFTCUDA_TSAN_FIBERS)
#include <sanitizer/tsan_interface.h>
#endif

namespace softcuda {
namespace {
// Size of a stack, CUDA's limit of local memory per thread. The system allocates its pages on
// demand.
constexpr size_t kStack = 512 << 10;
constexpr size_t kGuard = 64 << 10;
// Number of stacks that are mapped at once (a slab).
constexpr size_t kSlab = 32;
// The tops of successive stacks of a slab differ by a multiple of this many bytes, see grow().
constexpr size_t kStagger = 192;
}  // namespace

// Initializes a context so that the first switch to it calls `entry`.
#ifdef SOFTCUDA_OWN_SWITCH
static void prepare(Context* context, char* stack, size_t size, void (*entry)()) {
  // The first switch to the fiber pops `entry` from the stack and jumps to it. The stack pointer is
  // then aligned as after a call instruction.
  char* top = stack + size - 16;
  std::memcpy(top, &entry, sizeof entry);
  context->stack_pointer = top;
}
#else
void switch_stacks(Context* from, Context* to) { swapcontext(&from->machine, &to->machine); }

static void prepare(Context* context, char* stack, size_t size, void (*entry)()) {
  getcontext(&context->machine);
  context->machine.uc_stack.ss_sp = stack;
  context->machine.uc_stack.ss_size = size;
  context->machine.uc_link = nullptr;
  makecontext(&context->machine, entry, 0);
}
#endif

#if defined(SOFTCUDA_ASAN_FIBERS)
namespace {
// The context that was left by the last switch of stacks. It is needed because the bounds of the
// worker's own stack become known only when the worker leaves that stack for the first time.
thread_local Context* t_left = nullptr;

void finish_switch(void* fake_stack) {
  const void* bottom = nullptr;
  size_t size = 0;
  __sanitizer_finish_switch_fiber(fake_stack, &bottom, &size);
  if (t_left != nullptr && t_left->bottom == nullptr) {
    t_left->bottom = bottom;
    t_left->size = size;
  }
}
}  // namespace

__attribute__((noinline, no_sanitize_address)) void switch_context(Context* from, Context* to) {
  t_left = from;
  __sanitizer_start_switch_fiber(&from->fake_stack, to->bottom, to->size);
  switch_stacks(from, to);
  finish_switch(from->fake_stack);
}

void announce_new_stack() { finish_switch(nullptr); }

void announce_jump(Context* main) {
  if (main->bottom == nullptr) return;
  void* discarded = nullptr;
  __sanitizer_start_switch_fiber(&discarded, main->bottom, main->size);
  __sanitizer_finish_switch_fiber(main->fake_stack, nullptr, nullptr);
}
#elif defined(SOFTCUDA_TSAN_FIBERS)
__attribute__((noinline, no_sanitize_thread)) void switch_context(Context* from, Context* to) {
  if (from->fiber == nullptr) from->fiber = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(to->fiber, 0);
  switch_stacks(from, to);
}

void announce_new_stack() {}
void announce_jump(Context* main) { __tsan_switch_to_fiber(main->fiber, 0); }
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
    // The tops of the stacks have different offsets, so that they are in different cache sets. With
    // equal offsets, every switch of stacks would miss the first-level cache.
    prepare(&fiber->context, stack, kStack - (i + 1) * kStagger, entry_);
#if defined(SOFTCUDA_ASAN_FIBERS)
    fiber->context.bottom = stack;
    fiber->context.size = kStack;
#elif defined(SOFTCUDA_TSAN_FIBERS)
    fiber->context.fiber = __tsan_create_fiber(0);
#endif
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
