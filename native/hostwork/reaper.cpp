#include "hostwork/reaper.h"

#include <semaphore.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "hostwork/driver.h"
#include "hostwork/gate.h"

namespace graft::hostwork {

constexpr int kCaptureModeRelaxed = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED

class Reaper {
 public:
  Reaper() { sem_init(&wake_, 0, 0); }

  void push(Reapable* item) noexcept {
    pending_.fetch_add(1);
    item->next_ = head_.load(std::memory_order_relaxed);
    while (!head_.compare_exchange_weak(item->next_, item)) {
    }
    sem_post(&wake_);
  }

  void run() {
    // CUDA considers freeing potentially unsafe during a stream capture and would invalidate the
    // capture. Nothing that is freed here belongs to captured work, so this thread disables the
    // check.
    int mode = kCaptureModeRelaxed;
    driver().thread_exchange_capture_mode(&mode);
    while (true) {
      while (sem_wait(&wake_) != 0) {
      }
      // Make the context current each time, because it may have been released and retained again.
      // While it is released, no driver resource exists, so drain() needs no context.
      const Handle context = primary_context();
      if (context != nullptr) driver().ctx_set_current(context);
      drain();
    }
  }

  std::int64_t pending() const { return pending_.load(); }

 private:
  void drain() {
    Reapable* const items = reversed(head_.exchange(nullptr));
    std::int64_t count = 0;
    for (Reapable* item = items; item != nullptr; item = item->next_) ++count;
    if (gate_open()) free(items);  // otherwise the process is exiting (INVARIANTS.md L4)
    pending_.fetch_sub(count);
  }

  // Releases the resources of all items, then their Python references, and then deletes the items.
  // The items are deleted last, because released_records() counts a record as soon as it is
  // deleted.
  void free(Reapable* items) {
    std::vector<PyObject*> references;
    for (Reapable* item = items; item != nullptr; item = item->next_) item->reap(references);
    if (!references.empty()) {
      const PythonEntry python;
      for (std::size_t i = 0; python && i < references.size(); ++i) Py_DECREF(references[i]);
    }
    while (items != nullptr) {
      Reapable* next = items->next_;
      delete items;
      items = next;
    }
  }

  // Returns the list with the oldest item first.
  static Reapable* reversed(Reapable* head) {
    Reapable* out = nullptr;
    while (head != nullptr) {
      Reapable* next = head->next_;
      head->next_ = out;
      out = head;
      head = next;
    }
    return out;
  }

  std::atomic<Reapable*> head_{nullptr};
  std::atomic<std::int64_t> pending_{0};
  sem_t wake_;
};

namespace {

// The reaper is never destroyed, because its thread uses it until the process ends.
Reaper& reaper = *new Reaper;

}  // namespace

void retire(Reapable* item) noexcept { reaper.push(item); }

bool flush(double timeout_s) {
  if (in_host_work()) return false;
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
  while (reaper.pending() != 0) {
    if (!gate_open() || std::chrono::steady_clock::now() >= end) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

void start_reaper() {
  std::thread([] { reaper.run(); }).detach();
}

namespace {

std::atomic<std::int64_t> live{0};
std::atomic<std::int64_t> failed{0};

Result destroy(ResourceKind kind, std::uint64_t handle) {
  const Driver& d = driver();
  Result (*const frees[])(Handle) = {d.mem_free,       d.mem_free_host, d.event_destroy,
                                     d.stream_destroy, d.module_unload, d.graph_destroy};
  return frees[static_cast<int>(kind)](reinterpret_cast<Handle>(handle));
}

}  // namespace

class ResourceRelease final : public Reapable {
 public:
  ResourceRelease(ResourceKind kind, std::uint64_t handle) : kind_(kind), handle_(handle) {}

  void reap(std::vector<PyObject*>&) noexcept override {
    // After a context fault, this call fails, and the driver frees the handle together with the
    // context.
    if (owned && destroy(kind_, handle_) != kSuccess) failed.fetch_add(1);
    live.fetch_sub(1);
  }

  bool owned = true;  // changed only before the object is retired

 private:
  const ResourceKind kind_;
  const std::uint64_t handle_;
};

Resource::Resource(ResourceKind kind, std::uint64_t handle)
    : release_(new ResourceRelease(kind, handle)), handle_(handle) {
  live.fetch_add(1);
}

Resource::~Resource() = default;
void Resource::disown() noexcept { release_->owned = false; }

std::int64_t live_resources() { return live.load(); }
std::int64_t failed_frees() { return failed.load(); }

}  // namespace graft::hostwork
