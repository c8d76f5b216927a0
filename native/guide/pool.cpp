#include "pool.h"

#include <Python.h>
#include <pthread.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>

#include "hostwork/driver.h"
#include "hostwork/gate.h"
#include "hostwork/relax.h"
#include "short_slice.h"

namespace graft::guide {
namespace {

// On the soft device: from now on a driver call of this thread is refused. Without a device there
// is nobody to tell.
void owe_answer() {
  try {
    const auto tell = hostwork::driver().owe_answer;
    if (tell != nullptr) tell(1);
  } catch (const std::logic_error&) {
    return;
  }
}

}  // namespace

Pool::Pool(int threads, int capacity, Work work, void* context)
    : work_(work), context_(context), owner_(getpid()), ring_(static_cast<size_t>(capacity)) {
  threads_.reserve(static_cast<size_t>(threads));
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this, i] { run(i); });
}

Pool::~Pool() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_.store(true);
  }
  posted_more_.notify_all();
  // A thread that was in Python takes the GIL once more, to give its thread state back.
  const bool in_python = Py_IsInitialized() != 0 && PyGILState_Check() != 0;
  PyThreadState* const state = in_python ? PyEval_SaveThread() : nullptr;
  for (std::thread& thread : threads_) thread.join();
  if (state != nullptr) PyEval_RestoreThread(state);
}

void Pool::End::operator()(Pool* pool) const {
  if (getpid() == pool->owner_) delete pool;
}

void Pool::relax() noexcept { hostwork::cpu_relax(); }

void Pool::post(int job) noexcept {
  const uint64_t at = posted_.load(std::memory_order_relaxed);
  ring_[at % ring_.size()].store(job, std::memory_order_relaxed);
  posted_.store(at + 1);
}

void Pool::wake(int threads) noexcept {
  if (parked_.load() == 0) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
  }
  for (int i = 0; i < threads; ++i) posted_more_.notify_one();
}

int Pool::claim() noexcept {
  uint64_t at = claimed_.load();
  while (!stop_.load(std::memory_order_relaxed) && at < posted_.load()) {
    const int job = ring_[at % ring_.size()].load(std::memory_order_relaxed);
    // The cell is written again only once `claimed_` has passed it: then this fails.
    if (claimed_.compare_exchange_weak(at, at + 1)) return job;
  }
  return -1;
}

void Pool::run(int index) noexcept {
  const std::string name = "guide" + std::to_string(index);
  pthread_setname_np(pthread_self(), name.c_str());
  ask_for_short_slice();  // a step waits for what is done here
  owe_answer();
  const hostwork::HostWorkScope host_work;
  for (;;) {
    for (int spins = 0; spins < kSpins; ++spins) {
      const int job = claim();
      if (job < 0) {
        relax();
        continue;
      }
      work_(context_, job);
      spins = 0;
      if (!waiting_.load()) continue;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
      }
      served_one_.notify_all();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    parked_.fetch_add(1);
    posted_more_.wait(lock, [&] { return stop_.load() || !idle(); });
    parked_.fetch_sub(1);
    if (stop_.load()) return;
  }
}

void Pool::nap(std::unique_lock<std::mutex>& lock, int64_t ns) noexcept {
  // the system's clock: the thread sanitizer knows waits by no other
  served_one_.wait_until(lock, std::chrono::system_clock::now() + std::chrono::nanoseconds(ns));
}

}  // namespace graft::guide
