// Blocks, barriers and thread exits (INVARIANTS.md X1 to X5). Warp operations are in warp.cpp.
#include "executor.h"

#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "ptx_library.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace softcuda {

// The TLS model is initial-exec because the signal handler reads the variable: the storage of other
// models may be allocated on first access, and malloc is not allowed in a signal handler.
__attribute__((tls_model("initial-exec"))) thread_local Executor* t_executor = nullptr;

namespace {

constexpr size_t kSharedMax = 256 << 10;

// Flushes denormals to zero on the calling thread. Every worker does so, because results must not
// depend on the worker that computes them (INVARIANTS.md X10).
void flush_denormals() {
#if defined(__x86_64__)
  _mm_setcsr(_mm_getcsr() | 0x8040);
#elif defined(__aarch64__)
  unsigned long control;
  asm volatile("mrs %0, fpcr" : "=r"(control));
  asm volatile("msr fpcr, %0" ::"r"(control | (1ul << 24)));
#endif
}

// First function on the stack of every fiber.
void fiber_entry() {
  announce_new_stack();
  t_executor->fiber_loop();
}

std::string triple(const softcuda_dim3& v) {
  return "(" + std::to_string(v.x) + "," + std::to_string(v.y) + "," + std::to_string(v.z) + ")";
}

}  // namespace

Executor::Executor(unsigned worker) : worker_(worker), fibers_(fiber_entry) {
  t_executor = this;
  flush_denormals();
  // The signal handler runs on a stack of its own, because it cannot use a stack that has
  // overflowed.
  constexpr size_t kHandlerStack = 64 << 10;
  stack_t alternate{};
  alternate.ss_sp =
      mmap(nullptr, kHandlerStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  alternate.ss_size = kHandlerStack;
  sigaltstack(&alternate, nullptr);
  char* shared = static_cast<char*>(mmap(nullptr, kSharedMax + kSharedMax, PROT_NONE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  mprotect(shared, kSharedMax, PROT_READ | PROT_WRITE);
  shared_end_ = shared + kSharedMax;
}

Executor* make_executor(unsigned worker) { return new Executor(worker); }

bool run_blocks(Executor* executor, const Op& op, uint64_t first, uint64_t last) {
  const bool succeeded = executor->run_blocks(op, first, last);
  executor->end_polling();
  return succeeded;
}

bool Executor::run_blocks(const Op& op, uint64_t first, uint64_t last) {
  const KernelWork& work = *op.work.kernel;
  Function& function = *work.function;
  if (!function.module->live) {
    fault(CUDA_ERROR_ILLEGAL_ADDRESS,
          "kernel '" + function.name + "' was launched after its module had been unloaded");
    return false;
  }
  for (auto& pointer : work.pointers) {
    if (pointer.second->live.load(std::memory_order_acquire)) continue;
    fault(CUDA_ERROR_ILLEGAL_ADDRESS, "use after free: kernel '" + function.name + "' parameter " +
                                          std::to_string(pointer.first) + " points into " +
                                          pointer.second->describe());
    return false;
  }
  if (function.ptx != nullptr) {
    // Another operation may unmap memory that this kernel uses. guarded() turns the signal of such
    // an access into a fault.
    bool succeeded = false;
    running_kernel_.store(function.name.c_str(), std::memory_order_relaxed);
    const bool returned = guarded("kernel '" + function.name + "'",
                                  [&] { succeeded = ptx::run_blocks(op, worker_, first, last); });
    running_kernel_.store(nullptr, std::memory_order_relaxed);
    if (!returned) ptx::recover();
    return returned && succeeded;
  }
  const softcuda_image& image = *function.images[worker_];
  entry_ = function.copies[worker_];
  block_ = image.block;
  params_ = const_cast<void**>(work.arguments.data());
  block_->executor = this;
  block_->block_dim = work.block;
  block_->grid_dim = work.grid;
  block_->count = work.block.x * work.block.y * work.block.z;
  block_->dynamic_bytes = work.shared_bytes;
  block_->dynamic_shared = shared_end_ - (work.shared_bytes + 15) / 16 * 16;
  softcuda_dim3 at{static_cast<unsigned>(first % work.grid.x),
                   static_cast<unsigned>(first / work.grid.x % work.grid.y),
                   static_cast<unsigned>(first / work.grid.x / work.grid.y)};
  running_kernel_.store(function.name.c_str(), std::memory_order_relaxed);
  if (sigsetjmp(recover_, 0) != 0) {
    announce_jump(&main_);
    report_fault("kernel '" + work.function->name + "'", &work);
    return false;
  }
  armed_ = true;
  for (uint64_t index = first; index < last && !failed_; ++index) {
    block_->block_idx = at;
    block_->next = 0;
    block_->exited = 0;
    block_->tracked = 0;
    block_->next_idx = softcuda_dim3{0, 0, 0};
    running_ = fibers_.get();
    switch_context(&main_, &running_->context);
    if (++at.x == work.grid.x) {
      at.x = 0;
      if (++at.y == work.grid.y) {
        at.y = 0;
        ++at.z;
      }
    }
  }
  armed_ = false;
  running_kernel_.store(nullptr, std::memory_order_relaxed);
  return !failed_;
}

// Main loop of a fiber: runs threads that have not started. When none is left, returns the fiber to
// the pool and switches to a ready thread or, if the block is complete, to the worker's stack.
void Executor::fiber_loop() {
  for (;;) {
    entry_->run(block_, params_);
    Fiber* self = running_;
    Fiber* next = block_->tracked != 0 ? next_ready(0) : nullptr;
    if (next == nullptr && block_->exited != block_->count) deadlock();
    // The fiber may be reused from here on. This is safe although the thread still runs on its
    // stack, because only this worker takes stacks from the pool.
    fibers_.put(self);
    if (next == nullptr) {
      switch_context(&self->context, &main_);
    } else {
      running_ = next;
      switch_context(&self->context, &next->context);
    }
  }
}

// Initializes the thread states when a thread of the block waits for the first time. All threads
// that started earlier have exited (INVARIANTS.md X2).
void Executor::begin_tracking() {
  block_->tracked = 1;
  std::memset(ready_, 0, sizeof ready_);
  std::memset(at_barrier_, 0, sizeof at_barrier_);
  std::memset(at_warp_, 0, sizeof at_warp_);
  std::memset(exited_, 0, sizeof exited_);
  for (unsigned t = 0; t < block_->current; ++t) exited_[t / 32] |= 1u << (t % 32);
  pending_barrier_ = {};
}

// Completes a barrier: makes all threads that wait at it ready and keeps the numbers that the
// threads read as the barrier's result.
void Executor::release_barrier() {
  for (unsigned w = 0; w < (block_->count + 31) / 32; ++w) {
    ready_[w] |= at_barrier_[w];
    at_barrier_[w] = 0;
  }
  last_barrier_ = pending_barrier_;
  pending_barrier_ = {};
}

inline __attribute__((always_inline)) int Executor::barrier(unsigned op, int predicate) {
  if (block_->tracked == 0) begin_tracking();
  pending_barrier_.predicates += predicate != 0;
  const unsigned thread = block_->current;
  if (++pending_barrier_.threads == block_->count - block_->exited) {
    release_barrier();  // the last thread to arrive continues without a switch (INVARIANTS.md X4)
  } else {
    at_barrier_[thread / 32] |= 1u << (thread % 32);
    suspend();
  }
  // A thread that was suspended here reads the result later than the last thread to arrive. The
  // values are still those of this barrier, because the next barrier cannot complete before this
  // thread arrives at it (INVARIANTS.md X3).
  switch (op) {
    case SOFTCUDA_BARRIER_COUNT:
      return static_cast<int>(last_barrier_.predicates);
    case SOFTCUDA_BARRIER_AND:
      return last_barrier_.predicates == last_barrier_.threads;
    case SOFTCUDA_BARRIER_OR:
      return last_barrier_.predicates > 0;
    default:
      return 0;
  }
}

// Called when a thread exits. An exited thread counts as arrived at every barrier and warp
// operation, so its exit may release waiting threads.
void Executor::thread_exit() {
  const unsigned thread = block_->current;
  exited_[thread / 32] |= 1u << (thread % 32);
  const unsigned arrived = pending_barrier_.threads;
  if (arrived > 0 && arrived == block_->count - block_->exited) release_barrier();
  for (unsigned waiting = at_warp_[thread / 32]; waiting != 0; waiting &= at_warp_[thread / 32]) {
    const unsigned lane = static_cast<unsigned>(__builtin_ctz(waiting));
    try_release_warp(thread / 32, lanes_[thread / 32 * 32 + lane].mask);
    waiting &= waiting - 1;
  }
}

std::string Executor::location() const {
  return std::string("kernel '") + entry_->name + "' block " + triple(block_->block_idx);
}

void Executor::fail(CUresult code, const std::string& text) {
  fault(code, location() + " thread " + triple(block_->thread_idx) + ": " + text);
  abort_block();
}

void Executor::abort_block() {
  failed_ = true;
  // Receives the context of the running thread, which is discarded. The other stacks of the block
  // are abandoned too, because no device code runs after a fault.
  Context discarded;
  switch_context(&discarded, &main_);
  __builtin_unreachable();
}

void Executor::deadlock() {
  unsigned barrier = 0;
  unsigned warp = 0;
  std::string detail;
  for (unsigned w = 0; w < (block_->count + 31) / 32; ++w) {
    barrier += static_cast<unsigned>(__builtin_popcount(at_barrier_[w]));
    warp += static_cast<unsigned>(__builtin_popcount(at_warp_[w]));
    if (at_warp_[w] == 0 || !detail.empty()) continue;
    const unsigned lane = static_cast<unsigned>(__builtin_ctz(at_warp_[w]));
    const unsigned missing = lanes_[w * 32 + lane].mask & ~at_warp_[w] & ~exited_[w];
    detail = "; warp " + std::to_string(w) + " lane " + std::to_string(lane) + " waits with mask " +
             hex(lanes_[w * 32 + lane].mask) + ", missing lanes " + hex(missing);
  }
  fault(CUDA_ERROR_LAUNCH_FAILED, location() + ": divergent barrier: " + std::to_string(barrier) +
                                      " threads at __syncthreads, " + std::to_string(warp) +
                                      " at warp operations, " + std::to_string(block_->exited) +
                                      " exited" + detail);
  abort_block();
}

void Executor::handle_signal(int signal, unsigned long long address, bool known, bool write) {
  if (!armed_) return;
  armed_ = false;
  fault_signal_ = signal;
  fault_address_ = address;
  fault_known_ = known;
  fault_write_ = write;
  siglongjmp(recover_, 1);
}

// Returns a text about the faulting address: its position relative to the nearest allocation or to
// the dynamic shared memory, and the kernel parameter that points into this allocation.
std::string Executor::describe_address(const KernelWork* work) const {
  const auto shared = reinterpret_cast<unsigned long long>(shared_end_);
  const std::shared_ptr<Allocation> nearest = find_for_fault(fault_address_);
  if (nearest == nullptr) {
    if (fault_address_ < shared || fault_address_ >= shared + kSharedMax) return "";
    return ", past the end of " + std::to_string(block_->dynamic_bytes) +
           " bytes of dynamic shared memory";
  }
  std::string text;
  const auto storage = reinterpret_cast<unsigned long long>(nearest->storage);
  if (is_alias(fault_address_)) {
    text = ", an untranslated device address inside " + nearest->describe() +
           " (device pointers must be kernel parameters)";
  } else if (fault_address_ >= storage && fault_address_ < storage + nearest->size) {
    text = ", a jump into " + nearest->describe();
  } else if (fault_address_ >= storage) {
    text = ", " + std::to_string(fault_address_ - storage - nearest->size) +
           " bytes past the end of " + nearest->describe();
  } else {
    text = ", " + std::to_string(storage - fault_address_) + " bytes before " + nearest->describe();
  }
  if (work == nullptr) return text;
  for (auto& pointer : work->pointers) {
    if (pointer.second == nearest) return text + ", parameter " + std::to_string(pointer.first);
  }
  return text;
}

void Executor::report_fault(const std::string& operation, const KernelWork* work) {
  std::string text = operation;
  if (work != nullptr) {
    text += " block " + triple(block_->block_idx) + " thread " + triple(block_->thread_idx);
  }
  CUresult code = CUDA_ERROR_ILLEGAL_ADDRESS;
  if (fault_signal_ == SIGFPE) {
    code = CUDA_ERROR_LAUNCH_FAILED;
    text += ": integer division by zero, or of the smallest integer by -1";
  } else if (fault_signal_ == SIGILL) {
    const bool checked = work != nullptr && work->function->images[worker_]->checks_alignment != 0;
    code = checked ? CUDA_ERROR_MISALIGNED_ADDRESS : CUDA_ERROR_LAUNCH_FAILED;
    text += checked ? ": misaligned access" : ": illegal instruction";
  } else if (fibers_.in_guard(fault_address_)) {
    code = CUDA_ERROR_LAUNCH_FAILED;
    text += ": stack overflow (a thread's local arrays exceed 512 KiB)";
  } else if (!fault_known_) {
    text += ": illegal memory access at an address that the processor does not report";
  } else {
    text += std::string(": illegal ") + (fault_write_ ? "write" : "read") + " at " +
            hex(fault_address_) + describe_address(work);
  }
  failed_ = true;
  running_kernel_.store(nullptr, std::memory_order_relaxed);
  fault(code, text);
}

// ---- hooks ------------------------------------------------------------------------------------
namespace {
Executor& executor_of(softcuda_block* block) { return *static_cast<Executor*>(block->executor); }

int hook_barrier(softcuda_block* block, unsigned op, int predicate) {
  return executor_of(block).barrier(op, predicate);
}
// Implements __activemask. The mask contains only the calling lane, because the threads of a block
// run one after another.
unsigned hook_active(softcuda_block* block) { return 1u << (block->current % 32); }
void hook_exit(softcuda_block* block) { executor_of(block).thread_exit(); }
void hook_trap(softcuda_block* block, int code, const char* text) {
  executor_of(block).fail(code, text);
}
unsigned long long hook_timer() {
  t_executor->note_clock();
  return now_ns();
}
}  // namespace

const softcuda_hooks kHooks = {hook_barrier, hook_warp, hook_active,
                               hook_exit,    hook_trap, hook_timer};

}  // namespace softcuda

// printf of kernels. It runs on the kernel's stack and writes to stdout, which is flushed when the
// host waits for the device.
SC_EXPORT int softcuda_printf(const char* format, ...) {
  char text[1024];
  va_list values;
  va_start(values, format);
  const int n = std::vsnprintf(text, sizeof text, format, values);
  va_end(values);
  std::fputs(text, stdout);
  return n;
}
