#include "hostwork/record.h"

#include <cxxabi.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <exception>
#include <mutex>
#include <set>
#include <utility>

namespace graft::hostwork {
namespace {

using Clock = std::chrono::steady_clock;

std::atomic<std::int64_t> records_alive{0};
std::atomic<std::int64_t> released{0};

struct ThreadSlot;

// Leaked on purpose: driver threads may still use it while static objects are being destroyed.
struct Registry {
  std::mutex mutex;
  std::set<ThreadSlot*> slots;
};
Registry& registry = *new Registry;

// Which host function a thread is in, so that a deadline can name it and native work ask for it.
struct ThreadSlot {
  std::mutex mutex;
  HostRecord* record = nullptr;
  std::int64_t replay = 0;
  Clock::time_point start;
  const std::uint64_t thread = static_cast<std::uint64_t>(pthread_self());
  const int tid = static_cast<int>(syscall(SYS_gettid));

  ThreadSlot() {
    const std::lock_guard<std::mutex> lock(registry.mutex);
    registry.slots.insert(this);
  }
  ~ThreadSlot() {
    const std::lock_guard<std::mutex> lock(registry.mutex);
    registry.slots.erase(this);
  }
  void set(HostRecord* r, std::int64_t n) {
    const std::lock_guard<std::mutex> lock(mutex);
    record = r;
    replay = n;
    if (r != nullptr) start = Clock::now();
  }
};
thread_local ThreadSlot slot;

struct RunningScope {
  RunningScope(HostRecord* record, std::int64_t replay) { slot.set(record, replay); }
  ~RunningScope() { slot.set(nullptr, 0); }
};

PyObject* new_reference(PyObject* object) {
  Py_XINCREF(object);
  return object;
}

// The destructor of the user object: runs on a driver thread or inside a destroy call.
void retire_record(void* data) { retire(static_cast<Record*>(data)); }

}  // namespace

Record::Record(PyObject* keep) : keep_(new_reference(keep)) { records_alive.fetch_add(1); }

Record::~Record() {
  records_alive.fetch_sub(1);
  released.fetch_add(1);
}

void Record::reap(std::vector<PyObject*>& references) noexcept {
  if (keep_ != nullptr) references.push_back(keep_);
}

HostRecord::HostRecord(std::string name, const Work& work, PyObject* keep)
    : Record(keep), name_(std::move(name)), work_(work) {
  Py_XINCREF(work.callable);
  Py_XINCREF(work.arguments);
}

void HostRecord::reap(std::vector<PyObject*>& references) noexcept {
  if (work_.callable != nullptr) references.push_back(work_.callable);
  if (work_.arguments != nullptr) references.push_back(work_.arguments);
  Record::reap(references);
}

void HostRecord::fail(StatusCode code, std::int64_t replay, PyObject* exception,
                      std::string message) {
  Failure failure{name_, replay, exception, std::move(message)};
  if (state_) {
    state_->fail(code, std::move(failure));
  } else {
    fail_eager(std::move(failure));
  }
}

void HostRecord::run() noexcept {
  const std::int64_t run = runs_.load(std::memory_order_relaxed) + 1;
  runs_.store(run, std::memory_order_relaxed);
  run_as(state_ ? state_->base() + run : 0);
}

void HostRecord::run_as(std::int64_t replay) noexcept {
  if (state_ && state_->failed()) return;  // stands down (E3)
  const HostWorkScope host_work;
  const RunningScope running(this, replay);
  try {
    if (work_.callable != nullptr) {
      run_python(replay);
    } else {
      const bool fixed = cell_ == nullptr;
      work_.function(fixed ? work_.data : reinterpret_cast<void*>(cell_->pick(replay).address));
    }
  } catch (abi::__forced_unwind&) {
    while (true) pause();  // as park_for_good(): work of somebody else's was in Python (P5)
  } catch (const std::exception& error) {
    fail(kStatusNative, replay, nullptr, error.what());
  } catch (...) {
    fail(kStatusNative, replay, nullptr, "an unknown C++ exception");
  }
}

void run_host_record(void* data) { static_cast<HostRecord*>(data)->run(); }

std::int64_t current_replay() { return slot.replay; }

void fail_current(const char* message) {
  if (slot.record != nullptr) slot.record->fail(kStatusNative, slot.replay, nullptr, message);
}

Attached attach(Handle graph, Record* record) {
  constexpr unsigned int kMove = 1;              // CU_GRAPH_USER_OBJECT_MOVE
  constexpr unsigned int kNoDestructorSync = 1;  // CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
  const Driver& d = driver();
  Handle object = nullptr;
  // The base pointer is what the destructor gets, whatever class the record is.
  Result result = d.user_object_create(&object, record, retire_record, 1, kNoDestructorSync);
  if (result != kSuccess) {
    retire(record);
    return {result, "cuUserObjectCreate", nullptr};
  }
  result = d.graph_retain_user_object(graph, object, 1, kMove);
  if (result != kSuccess) {
    d.user_object_release(object, 1);  // the reference is still ours; this retires the record
    return {result, "cuGraphRetainUserObject", nullptr};
  }
  return {kSuccess, "", object};
}

Result detach(Handle graph, Handle object) {
  return driver().graph_release_user_object(graph, object, 1);
}

std::int64_t live_records() { return records_alive.load(); }
std::int64_t released_records() { return released.load(); }

std::vector<Running> running_host_work() {
  std::vector<Running> out;
  const std::lock_guard<std::mutex> lock(registry.mutex);
  for (ThreadSlot* s : registry.slots) {
    const std::lock_guard<std::mutex> slot_lock(s->mutex);
    if (s->record == nullptr) continue;
    const std::chrono::duration<double> seconds = Clock::now() - s->start;
    out.push_back({s->record, s->record->name(), s->replay, seconds.count(), s->thread, s->tid});
  }
  return out;
}

}  // namespace graft::hostwork
