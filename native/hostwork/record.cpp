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

struct HostThread;

// The threads that run host steps. The only object of this type is leaked on purpose, because
// driver threads may use it while static objects are being destroyed.
struct Registry {
  std::mutex mutex;
  std::set<HostThread*> threads;
};
Registry& registry = *new Registry;

// The host step that a thread is running, for deadline reports and for current_replay().
struct HostThread {
  std::mutex mutex;
  HostRecord* record = nullptr;
  std::int64_t replay = 0;
  Clock::time_point start;
  const std::uint64_t thread = static_cast<std::uint64_t>(pthread_self());
  const int tid = static_cast<int>(syscall(SYS_gettid));

  HostThread() {
    const std::lock_guard<std::mutex> lock(registry.mutex);
    registry.threads.insert(this);
  }
  ~HostThread() {
    const std::lock_guard<std::mutex> lock(registry.mutex);
    registry.threads.erase(this);
  }
  void set(HostRecord* r, std::int64_t n) {
    const std::lock_guard<std::mutex> lock(mutex);
    record = r;
    replay = n;
    if (r != nullptr) start = Clock::now();
  }
};
thread_local HostThread this_thread;

struct RunningScope {
  RunningScope(HostRecord* record, std::int64_t replay) { this_thread.set(record, replay); }
  ~RunningScope() { this_thread.set(nullptr, 0); }
};

PyObject* new_reference(PyObject* object) {
  Py_XINCREF(object);
  return object;
}

// Destructor of the CUDA user object. Runs on a driver thread or inside a driver call that destroys
// a graph.
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
  if (state_ && state_->failed()) return;  // skipped after a failure (INVARIANTS.md E3)
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
    // Native work used Python while the interpreter exits, and CPython makes the thread exit. Let
    // it sleep instead, as park_forever() does (INVARIANTS.md P5).
    while (true) pause();
  } catch (const std::exception& error) {
    fail(kStatusNative, replay, nullptr, error.what());
  } catch (...) {
    fail(kStatusNative, replay, nullptr, "an unknown C++ exception");
  }
}

void run_host_record(void* data) { static_cast<HostRecord*>(data)->run(); }

std::int64_t current_replay() { return this_thread.replay; }

void fail_current(const char* message) {
  if (this_thread.record != nullptr)
    this_thread.record->fail(kStatusNative, this_thread.replay, nullptr, message);
}

Attached attach(Handle graph, Record* record) {
  constexpr unsigned int kMove = 1;              // CU_GRAPH_USER_OBJECT_MOVE
  constexpr unsigned int kNoDestructorSync = 1;  // CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
  const Driver& d = driver();
  Handle object = nullptr;
  // The driver passes this pointer to retire_record(), which casts it from void* to Record*. It
  // must therefore be a Record* here and not a pointer to a derived class.
  Result result = d.user_object_create(&object, record, retire_record, 1, kNoDestructorSync);
  if (result != kSuccess) {
    retire(record);
    return {result, "cuUserObjectCreate", nullptr};
  }
  result = d.graph_retain_user_object(graph, object, 1, kMove);
  if (result != kSuccess) {
    // The reference was not moved to the graph. Releasing it retires the record.
    d.user_object_release(object, 1);
    return {result, "cuGraphRetainUserObject", nullptr};
  }
  return {kSuccess, "", object};
}

Result detach(Handle graph, Handle object) {
  return driver().graph_release_user_object(graph, object, 1);
}

std::int64_t live_records() { return records_alive.load(); }
std::int64_t released_records() { return released.load(); }

std::vector<RunningHostWork> running_host_work() {
  std::vector<RunningHostWork> out;
  const std::lock_guard<std::mutex> lock(registry.mutex);
  for (HostThread* s : registry.threads) {
    const std::lock_guard<std::mutex> thread_lock(s->mutex);
    if (s->record == nullptr) continue;
    const std::chrono::duration<double> seconds = Clock::now() - s->start;
    out.push_back({s->record, s->record->name(), s->replay, seconds.count(), s->thread, s->tid});
  }
  return out;
}

}  // namespace graft::hostwork
