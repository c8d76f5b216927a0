// The code that runs before and after the body of every entry point. It checks the entry point's
// preconditions, takes the simulated context lock (SOFTCUDA_LOCK_MODEL), and records the call in
// progress and whether its thread holds the GIL (INVARIANTS.md A1 to A4). This file also contains
// the resource counters and cuGetProcAddress.
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>

#include "calls.h"
#include "gil.h"
#include "scheduler.h"
#include "watch.h"

namespace softcuda {

bool initialised();
bool forked();
CUcontext current_context();
thread_local const char* t_restricted_scope = nullptr;
static const char* const kDeviceWaits = "worker thread that the device waits for";

namespace {

constexpr size_t kResources = static_cast<size_t>(Resource::count_);
constexpr size_t kCounters = static_cast<size_t>(Counter::count_);
const char* const kResourceNames[kResources] = {"device_memory", "pinned_memory", "stream",
                                                "event",         "module",        "graph",
                                                "graph_exec",    "user_object",   "context"};
const char* const kCounterNames[kCounters] = {"graph_launch", "kernel_launch", "host_func", "node"};
std::atomic<long> g_live[kResources], g_leaked[kResources], g_count[kCounters];
std::atomic<bool> g_frozen{false};
std::atomic<EntryPoint*> g_entry_points{nullptr};

std::atomic<ThreadRecord*> g_threads{nullptr};

// Returns the calling thread's new ThreadRecord: the record of a thread that has exited, or a newly
// allocated one.
ThreadRecord* acquire_record() {
  for (ThreadRecord* record = g_threads.load(); record != nullptr; record = record->next) {
    bool used = false;
    if (record->used.compare_exchange_strong(used, true)) return record;
  }
  auto* record = new ThreadRecord;
  record->used = true;
  record->next = g_threads.load();
  while (!g_threads.compare_exchange_weak(record->next, record)) {
  }
  return record;
}

// Holds the calling thread's ThreadRecord. The destructor, which runs when the thread exits, makes
// the record available to other threads.
struct RecordOwner {
  RecordOwner() {
    record.tid = syscall(SYS_gettid);
    record.pthread = static_cast<uint64_t>(pthread_self());
    record.device_waits = false;
    record.entry_point = nullptr;
    record.waiting = nullptr;
  }
  ~RecordOwner() { record.used.store(false); }
  ThreadRecord& record = *acquire_record();
};

// The simulated lock of the CUDA context. With SOFTCUDA_LOCK_MODEL=1, it is held while a host
// function runs; with SOFTCUDA_LOCK_MODEL=8, while a call that frees memory waits for the device.
std::mutex& g_context_lock = *new std::mutex;

// Returns the index of a name, or -1.
template <size_t N>
int index_of(const char* const (&names)[N], const char* name) {
  for (size_t i = 0; name != nullptr && i < N; ++i) {
    if (std::strcmp(names[i], name) == 0) return static_cast<int>(i);
  }
  return -1;
}

}  // namespace

ThreadRecord* first_thread() { return g_threads.load(); }
ThreadRecord& this_thread() {
  thread_local RecordOwner owner;
  return owner.record;
}

void live_add(Resource kind, long delta) {
  // A fault has counted all live resources as leaked and has set the live counters to zero, where
  // they stay (INVARIANTS.md E3).
  if (!g_frozen.load(std::memory_order_acquire)) g_live[static_cast<size_t>(kind)] += delta;
}
void count_add(Counter what, long delta) {
  g_count[static_cast<size_t>(what)].fetch_add(delta, std::memory_order_relaxed);
}
void count_live_as_leaked() {
  g_frozen.store(true, std::memory_order_release);
  for (size_t i = 0; i < kResources; ++i) g_leaked[i] += g_live[i].exchange(0);
}

// One item of the setting SOFTCUDA_FAIL: call `nth` of `function` returns `code`.
struct Failure {
  std::string item;      // the text of the item
  std::string function;  // "" if the item is malformed
  long nth = 0;
  int code = CUDA_ERROR_OUT_OF_MEMORY;
};

static bool parse_number(const std::string& text, long* value) {
  char* end = nullptr;
  *value = std::strtol(text.c_str(), &end, 10);
  return !text.empty() && *end == '\0';
}

static Failure parse_failure(const std::string& item) {
  Failure failure;
  failure.item = item;
  std::istringstream stream(item);
  std::string function, nth, code;
  std::getline(stream, function, ':');
  std::getline(stream, nth, ':');
  const bool has_code = static_cast<bool>(std::getline(stream, code));
  long number = failure.code;
  const bool valid = parse_number(nth, &failure.nth) && failure.nth >= 1 &&
                     (!has_code || parse_number(code, &number));
  failure.code = static_cast<int>(number);
  if (valid) failure.function = function;
  return failure;
}

static std::vector<Failure> failure_setting() {
  const char* setting = std::getenv("SOFTCUDA_FAIL");
  std::istringstream items(setting == nullptr ? "" : setting);
  std::vector<Failure> failures;
  for (std::string item; std::getline(items, item, ',');) failures.push_back(parse_failure(item));
  return failures;
}

void check_failure_setting() {
  for (const Failure& failure : failure_setting()) {
    bool found = false;
    for (EntryPoint* e = g_entry_points.load(); e != nullptr; e = e->next) {
      found = found || (failure.function == e->name && (e->flags & kAlways) == 0);
    }
    if (found) continue;
    refuse(CUDA_ERROR_INVALID_VALUE,
           "SOFTCUDA_FAIL: '" + failure.item +
               (failure.function.empty() ? "' is not of the form function:n or function:n:code"
                                         : "' does not name a function that can fail"));
  }
}

EntryPoint::EntryPoint(const char* symbol, int abi_version, unsigned call_flags, void* function)
    : version(abi_version), flags(call_flags), address(function), next(g_entry_points.load()) {
  std::snprintf(name, sizeof name, "%s", symbol);
  char* suffix = name + std::strlen(name) - 3;
  if (std::strncmp(suffix, "_v", 2) == 0) *suffix = '\0';
  for (const Failure& failure : failure_setting()) {
    if (failure.function != name) continue;
    fails_at = failure.nth;
    fails_with = failure.code;
  }
  while (!g_entry_points.compare_exchange_weak(next, this)) {
  }
}

ApiCall::ApiCall(EntryPoint& entry_point)
    : entry_point_(entry_point),
      number_(entry_point.calls.fetch_add(1, std::memory_order_relaxed) + 1),
      gil_(gil_held()) {
  ThreadRecord& thread = this_thread();
  if (gil_) entry_point.gil_held.fetch_add(1, std::memory_order_relaxed);
  outer_ = thread.entry_point.load(std::memory_order_relaxed);
  if (outer_ == nullptr) {
    thread.gil = gil_;
    thread.since.store(now_ns(), std::memory_order_relaxed);
  }
  thread.entry_point.store(&entry_point, std::memory_order_release);
}

void ApiCall::check_preconditions() {
  const unsigned flags = entry_point_.flags;
  if ((flags & kAlways) != 0) return;
  if (t_restricted_scope != nullptr) {
    refuse(CUDA_ERROR_NOT_PERMITTED, std::string(entry_point_.name) + " was called from a " +
                                         t_restricted_scope + ", which may not call the driver");
  }
  // A forked child has none of the device's threads, and a mutex may be locked in its copy of the
  // memory although no thread of the child holds it (INVARIANTS.md A6).
  require(!forked(), CUDA_ERROR_NOT_INITIALIZED,
          "this process was forked after cuInit; use the spawn start method for processes that use "
          "the device");
  require((flags & kNoInit) != 0 || initialised(), CUDA_ERROR_NOT_INITIALIZED);
  if ((flags & kAfterFault) == 0) require(sticky() == CUDA_SUCCESS, sticky());
  if ((flags & kContext) != 0 && current_context() == nullptr) {
    refuse(CUDA_ERROR_INVALID_CONTEXT,
           std::string(entry_point_.name) + ": no context is current on this thread");
  }
  if (number_ == entry_point_.fails_at) {
    refuse(static_cast<CUresult>(entry_point_.fails_with),
           std::string(entry_point_.name) + " fails because SOFTCUDA_FAIL is set to fail call " +
               std::to_string(number_));
  }
  if ((flags & kUnsafe) != 0) capture_reject_unsafe(entry_point_.name);
  if ((flags & kNoLock) != 0) return;
  if (gil_ && watching()) {
    record_held_gil(entry_point_.name, WaitsFor::driver_lock, "it may take a lock of the driver");
  }
  if ((settings().lock_model & (1 | 8)) != 0) {
    WaitScope waiting("the context lock (lock model 1 or 8)");
    std::lock_guard<std::mutex> lock(g_context_lock);
  }
}

void wait_to_free(const char* description) {
  if (!settings().free_waits) return;
  std::unique_lock<std::mutex> lock(g_context_lock, std::defer_lock);
  if ((settings().lock_model & 8) != 0) lock.lock();
  wait_idle(description);
}

void wait_to_allocate() {
  if ((settings().lock_model & 16) != 0) wait_idle("an allocation waits for all work");
}

ApiCall::~ApiCall() { this_thread().entry_point.store(outer_, std::memory_order_release); }

WaitScope::WaitScope(const char* description)
    : outer_(this_thread().waiting.exchange(description)) {}
WaitScope::~WaitScope() { this_thread().waiting.store(outer_); }

void may_wait_for_device(const char* reason) {
  const ThreadRecord& thread = this_thread();
  const EntryPoint* entry_point = thread.entry_point.load(std::memory_order_relaxed);
  if (!watching() || entry_point == nullptr || !thread.gil) return;
  record_held_gil(entry_point->name, WaitsFor::device_work, reason);
}

// Start and return times of the most recent host functions, which softcuda_hops() returns.
constexpr size_t kHops = 128;
static std::mutex& g_hops_mutex = *new std::mutex;
static uint64_t g_hops[kHops][2];
static size_t g_recorded = 0;

static void record_hop(uint64_t entered, uint64_t returned) {
  std::lock_guard<std::mutex> lock(g_hops_mutex);
  uint64_t* hop = g_hops[g_recorded++ % kHops];
  hop[0] = entered;
  hop[1] = returned;
}

void run_host_function(CUhostFn fn, void* data) {
  std::unique_lock<std::mutex> lock(g_context_lock, std::defer_lock);
  if ((settings().lock_model & 1) != 0) lock.lock();
  RunningHost& host = g_running_host;
  host.tid = syscall(SYS_gettid);
  host.pthread = static_cast<uint64_t>(pthread_self());
  host.since = now_ns();
  host.fn = reinterpret_cast<void*>(fn);
  watch_restricted_scope(reinterpret_cast<void*>(fn));
  t_restricted_scope = "host function";
  const uint64_t entered = now_ns();
  fn(data);
  record_hop(entered, now_ns());
  t_restricted_scope = nullptr;
  host.fn = nullptr;
}

namespace {
// Called at process exit. Counts all live resources as leaked and logs them.
__attribute__((destructor)) void report_leaks() {
  std::string leaks;
  for (size_t i = 0; i < kResources; ++i) {
    const long n = g_live[i].exchange(0);
    g_leaked[i] += n;
    if (n != 0 && i != static_cast<size_t>(Resource::context)) {
      leaks += std::string(leaks.empty() ? "" : ", ") + kResourceNames[i] + " " + std::to_string(n);
    }
  }
  if (settings().log && !leaks.empty()) log_line("softcuda: not freed at exit: " + leaks);
}
}  // namespace

}  // namespace softcuda

using namespace softcuda;

// Called with 1, declares that a pending stream wait depends on the calling thread: the device
// cannot continue before this thread stores the awaited value. From then on, all driver calls of
// the thread return NOT_PERMITTED, until it calls this function with 0 (INVARIANTS.md W6).
SC_EXPORT void softcuda_set_device_waits(int waits) {
  if (t_restricted_scope != nullptr && t_restricted_scope != kDeviceWaits) return;
  t_restricted_scope = waits != 0 ? kDeviceWaits : nullptr;
  ThreadRecord& thread = this_thread();
  thread.since.store(now_ns(), std::memory_order_relaxed);
  thread.device_waits = waits != 0;
  if (waits != 0) watch_restricted_scope(nullptr);
}

// Returns the number of live resources of a kind ("stream", "graph_exec", ...); -1 for an unknown
// kind.
SC_EXPORT int64_t softcuda_live(const char* kind) {
  const int i = index_of(kResourceNames, kind);
  return i < 0 ? -1 : g_live[i].load();
}

// Returns the number of events of a kind ("kernel_launch", "node", ...); -1 for an unknown kind.
SC_EXPORT int64_t softcuda_count(const char* what) {
  const int i = index_of(kCounterNames, what);
  return i < 0 ? -1 : g_count[i].load();
}

// Writes all counters to `buffer`, one line "GROUP NAME NUMBER" each, and returns the length of the
// text. The groups are: live (live resources), leaked (leaked resources), count (events such as
// kernel launches), calls (calls of each driver function), and gil_held (calls of each driver
// function that were made by a thread holding the GIL).
SC_EXPORT size_t softcuda_counters(char* buffer, size_t size) {
  std::string out;
  const auto add = [&](const char* group, const char* name, long n) {
    out += std::string(group) + " " + name + " " + std::to_string(n) + "\n";
  };
  for (size_t i = 0; i < kResources; ++i) {
    add("live", kResourceNames[i], g_live[i]);
    add("leaked", kResourceNames[i], g_leaked[i]);
  }
  for (size_t i = 0; i < kCounters; ++i) add("count", kCounterNames[i], g_count[i]);
  for (const EntryPoint* entry = g_entry_points.load(); entry != nullptr; entry = entry->next) {
    add("calls", entry->name, entry->calls);
    add("gil_held", entry->name, entry->gil_held);
  }
  return copy_text(out, buffer, size);
}

// Writes a report of the current activity to `buffer` and returns its length. The report has one
// line for each driver call in progress, for the running host function, for each thread on which a
// pending stream wait depends, and for each running kernel.
SC_EXPORT size_t softcuda_describe(char* buffer, size_t size) {
  return copy_text(describe(), buffer, size);
}

// Copies the start and return times of the last `n` host functions, oldest first, in nanoseconds of
// CLOCK_MONOTONIC. At most 128 host functions are kept. Returns the number of host functions whose
// times were copied.
SC_EXPORT size_t softcuda_hops(uint64_t* out, size_t n) {
  std::lock_guard<std::mutex> lock(g_hops_mutex);
  n = std::min({n, g_recorded, kHops});
  for (size_t i = 0; i < n; ++i) {
    std::copy_n(g_hops[(g_recorded - n + i) % kHops], 2, out + 2 * i);
  }
  return n;
}

// A host function that writes the current time to the uint64 at `data`.
SC_EXPORT void softcuda_stamp(void* data) { *static_cast<uint64_t*>(data) = now_ns(); }

SC_API(cuGetProcAddress_v2, 12000, kAlways, const char*, name, void**, out, int, version, uint64_t,
       flags, int*, status) {
  require(name != nullptr && out != nullptr);
  const EntryPoint* newest = nullptr;
  bool known = false;
  // Since CUDA 12, the name cuGraphInstantiate means cuGraphInstantiateWithFlags. Every other name
  // is the exported symbol without its version suffix.
  if (version >= 12000 && std::strcmp(name, "cuGraphInstantiate") == 0) {
    name = "cuGraphInstantiateWithFlags";
  }
  for (const EntryPoint* entry = g_entry_points.load(); entry != nullptr; entry = entry->next) {
    if (std::strcmp(entry->name, name) != 0) continue;
    known = true;
    if (entry->version > version) continue;
    if (newest == nullptr || newest->version <= entry->version) newest = entry;
  }
  *out = newest != nullptr ? newest->address : nullptr;
  if (status != nullptr) {
    constexpr int kFound = 0;
    constexpr int kSymbolNotFound = 1;
    constexpr int kVersionNotSufficient = 2;
    *status = known ? kVersionNotSufficient : kSymbolNotFound;
    if (newest != nullptr) *status = kFound;
  }
  require(newest != nullptr, CUDA_ERROR_NOT_FOUND);
}

SC_API_CODE(cuGetProcAddress, 11030, kAlways, const char*, name, void**, out, int, version,
            uint64_t, flags) {
  return cuGetProcAddress_v2(name, out, version, flags, nullptr);
}

// Real drivers return tables of undocumented functions here. The soft device has no such tables.
SC_API(cuGetExportTable, 3000, kAlways, const void**, out, const void*, id) {
  refuse(
      CUDA_ERROR_NOT_FOUND,
      "the soft device has no tables of undocumented functions, which the CUDA runtime requires; "
      "use the driver API");
}
