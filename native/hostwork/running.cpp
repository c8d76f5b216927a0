#include "hostwork/running.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <mutex>
#include <set>

#include "hostwork/current.h"
#include "hostwork/record.h"
#include "stacks/stacks.h"

namespace graft::hostwork {
namespace {

using Clock = std::chrono::steady_clock;

struct ThreadSlot;

// Leaked on purpose: driver threads may still use it while static objects are being destroyed.
struct Registry {
  std::mutex mutex;
  std::set<ThreadSlot*> slots;
};
Registry& registry() {
  static Registry* const instance = new Registry;
  return *instance;
}

struct ThreadSlot {
  std::mutex mutex;
  HostRecord* record = nullptr;
  std::int64_t replay = 0;
  Clock::time_point start;
  const std::uint64_t thread = static_cast<std::uint64_t>(pthread_self());
  const int tid = static_cast<int>(syscall(SYS_gettid));

  ThreadSlot() {
    const std::lock_guard<std::mutex> lock(registry().mutex);
    registry().slots.insert(this);
  }
  ~ThreadSlot() {
    const std::lock_guard<std::mutex> lock(registry().mutex);
    registry().slots.erase(this);
  }
  void set(HostRecord* r, std::int64_t n) {
    const std::lock_guard<std::mutex> lock(mutex);
    record = r;
    replay = n;
    if (r != nullptr) start = Clock::now();
  }
};
thread_local ThreadSlot slot;

}  // namespace

RunningScope::RunningScope(HostRecord* record, std::int64_t replay) { slot.set(record, replay); }
RunningScope::~RunningScope() { slot.set(nullptr, 0); }

std::vector<Running> running_host_work() {
  std::vector<Running> out;
  const std::lock_guard<std::mutex> lock(registry().mutex);
  for (ThreadSlot* s : registry().slots) {
    const std::lock_guard<std::mutex> slot_lock(s->mutex);
    if (s->record == nullptr) continue;
    const std::chrono::duration<double> seconds = Clock::now() - s->start;
    out.push_back({s->record->name(), s->replay, seconds.count(), s->thread, s->tid});
  }
  return out;
}

std::string native_stacks_of(const HostRecord* wanted) {
  constexpr double kAnswerLimitS = 1.0;
  std::vector<int> threads;
  {
    const std::lock_guard<std::mutex> lock(registry().mutex);
    for (ThreadSlot* s : registry().slots) {
      const std::lock_guard<std::mutex> slot_lock(s->mutex);
      if (s->record == wanted) threads.push_back(s->tid);
    }
  }
  std::string out;
  for (const int tid : threads) {
    const stacks::Frames frames = stacks::of_thread(tid, kAnswerLimitS);
    if (frames.empty()) continue;
    out += "\nit ran in thread " + std::to_string(tid) + ", native stack, innermost first:\n" +
           stacks::format(frames, "  ");
    out.pop_back();
  }
  return out;
}

std::int64_t current_replay() { return slot.replay; }

void fail_current(const char* message) {
  if (slot.record != nullptr) slot.record->fail(kStatusNative, slot.replay, nullptr, message);
}

}  // namespace graft::hostwork
