// What happens at the entry of every call: the GIL record, refusals, the modelled context lock, and
// the list of calls in progress (invariants A1-A4). Also the counters.
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
thread_local const char* t_forbidden = nullptr;
static const char* const kOwes = "worker that owes the device an answer";

namespace {

constexpr size_t kKinds = static_cast<size_t>(Kind::count_);
constexpr size_t kWhats = static_cast<size_t>(What::count_);
const char* const kKindNames[kKinds] = {"device_memory", "pinned_memory", "stream",
                                        "event",         "module",        "graph",
                                        "graph_exec",    "user_object",   "context"};
const char* const kWhatNames[kWhats] = {"graph_launch", "kernel_launch", "host_func", "node"};
std::atomic<long> g_live[kKinds], g_leaked[kKinds], g_count[kWhats];
std::atomic<bool> g_frozen{false};
std::atomic<ApiSite*> g_sites{nullptr};

std::atomic<ThreadRecord*> g_threads{nullptr};

ThreadRecord* free_record() {
  for (ThreadRecord* r = g_threads.load(); r != nullptr; r = r->next) {
    bool free = false;
    if (r->used.compare_exchange_strong(free, true)) return r;
  }
  auto* made = new ThreadRecord;
  made->used = true;
  made->next = g_threads.load();
  while (!g_threads.compare_exchange_weak(made->next, made)) {
  }
  return made;
}

struct RecordOwner {
  RecordOwner() {
    record.tid = syscall(SYS_gettid);
    record.pthread = static_cast<uint64_t>(pthread_self());
    record.owes = false;
    record.site = nullptr;
    record.waiting = nullptr;
  }
  ~RecordOwner() { record.used.store(false); }
  ThreadRecord& record = *free_record();
};

// Lock model bit 1: a lock that is held for as long as a host function runs.
std::mutex& g_context_lock = *new std::mutex;
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

void live_add(Kind kind, long delta) {
  // After a fault nothing is freed any more: it was counted as leaked (E3).
  if (!g_frozen.load(std::memory_order_acquire)) g_live[static_cast<size_t>(kind)] += delta;
}
void count_add(What what, long delta) {
  g_count[static_cast<size_t>(what)].fetch_add(delta, std::memory_order_relaxed);
}
void leak_everything() {
  g_frozen.store(true, std::memory_order_release);
  for (size_t i = 0; i < kKinds; ++i) g_leaked[i] += g_live[i].exchange(0);
}

ApiSite::ApiSite(const char* symbol, int version, unsigned given, void* function)
    : from(version), flags(given), address(function), next(g_sites.load()) {
  std::snprintf(name, sizeof name, "%s", symbol);
  char* suffix = name + std::strlen(name) - 3;
  if (std::strncmp(suffix, "_v", 2) == 0) *suffix = '\0';
  const char* planned = std::getenv("SOFTCUDA_FAIL");
  std::istringstream items(planned == nullptr ? "" : planned);
  for (std::string item; std::getline(items, item, ',');) {
    char function[64] = "";
    long nth = 0;
    int code = CUDA_ERROR_OUT_OF_MEMORY;
    if (std::sscanf(item.c_str(), "%63[^:]:%ld:%d", function, &nth, &code) < 2) continue;
    if (std::strcmp(function, name) == 0) fails_at = nth, fails_with = code;
  }
  while (!g_sites.compare_exchange_weak(next, this)) {
  }
}

ApiCall::ApiCall(ApiSite& site)
    : site_(site),
      number_(site.calls.fetch_add(1, std::memory_order_relaxed) + 1),
      gil_(gil_held()) {
  ThreadRecord& me = this_thread();
  if (gil_) site.gil_held.fetch_add(1, std::memory_order_relaxed);
  outer_ = me.site.load(std::memory_order_relaxed);
  if (outer_ == nullptr) {
    me.gil = gil_;
    me.since.store(now_ns(), std::memory_order_relaxed);
  }
  me.site.store(&site, std::memory_order_release);
}

void ApiCall::admit() {
  const unsigned flags = site_.flags;
  if ((flags & kAlways) != 0) return;
  if (t_forbidden != nullptr) {
    refuse(CUDA_ERROR_NOT_PERMITTED, std::string(site_.name) + " was called from a " + t_forbidden);
  }
  // A forked process's threads stayed behind, maybe with our locks (A6).
  need(!forked(), CUDA_ERROR_NOT_INITIALIZED,
       "the process was forked from one that uses the device");
  need((flags & kNoInit) != 0 || initialised(), CUDA_ERROR_NOT_INITIALIZED);
  if ((flags & kAfterFault) == 0) need(sticky() == CUDA_SUCCESS, sticky());
  if ((flags & kContext) != 0 && current_context() == nullptr) {
    refuse(CUDA_ERROR_INVALID_CONTEXT,
           std::string(site_.name) + ": no context is current on this thread");
  }
  if (number_ == site_.fails_at) {
    refuse(static_cast<CUresult>(site_.fails_with),
           std::string(site_.name) + " fails as SOFTCUDA_FAIL says");
  }
  if ((flags & kUnsafe) != 0) capture_forbids_unsafe(site_.name);
  if ((flags & kNoLock) != 0) return;
  if (gil_ && watching()) {
    note_held_gil(site_.name, Wanted::driver_lock, "it may take a lock of the driver");
  }
  if ((settings().lock_model & 1) != 0) {
    Waiting waiting("the context lock, held while a host function runs (lock model 1)");
    std::lock_guard<std::mutex> lock(g_context_lock);
  }
}

ApiCall::~ApiCall() { this_thread().site.store(outer_, std::memory_order_release); }

Waiting::Waiting(const char* what) : outer_(this_thread().waiting.exchange(what)) {}
Waiting::~Waiting() { this_thread().waiting.store(outer_); }

void may_wait_for_device(const char* why) {
  const ThreadRecord& me = this_thread();
  const ApiSite* site = me.site.load(std::memory_order_relaxed);
  if (!watching() || site == nullptr || !me.gil) return;
  note_held_gil(site->name, Wanted::device_work, why);
}

// When the last host functions were entered and when they returned, for softcuda_hops.
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
  watch_scope_begins(reinterpret_cast<void*>(fn));
  t_forbidden = "host function";
  const uint64_t entered = now_ns();
  fn(data);
  record_hop(entered, now_ns());
  t_forbidden = nullptr;
  host.fn = nullptr;
}

namespace {
// What is still alive when the process ends was left on purpose (or forgotten): counted as leaked,
// and named where the log is on.
__attribute__((destructor)) void report_rest() {
  std::string rest;
  for (size_t i = 0; i < kKinds; ++i) {
    const long n = g_live[i].exchange(0);
    g_leaked[i] += n;
    if (n != 0 && i != static_cast<size_t>(Kind::context)) {
      rest += std::string(rest.empty() ? "" : ", ") + kKindNames[i] + " " + std::to_string(n);
    }
  }
  if (settings().log && !rest.empty()) log_line("softcuda: left at exit: " + rest);
}
}  // namespace

}  // namespace softcuda

using namespace softcuda;

// A worker that owes the device an answer must not call the driver: it says so while it does (W6).
SC_EXPORT void softcuda_owe_answer(int owes) {
  if (t_forbidden != nullptr && t_forbidden != kOwes) return;
  t_forbidden = owes != 0 ? kOwes : nullptr;
  ThreadRecord& me = this_thread();
  me.since.store(now_ns(), std::memory_order_relaxed);
  me.owes = owes != 0;
  if (owes != 0) watch_scope_begins(nullptr);
}

SC_EXPORT int64_t softcuda_live(const char* kind) {
  const int i = index_of(kKindNames, kind);
  return i < 0 ? -1 : g_live[i].load();
}

SC_EXPORT int64_t softcuda_count(const char* what) {
  const int i = index_of(kWhatNames, what);
  return i < 0 ? -1 : g_count[i].load();
}

// All counters, a line "which name number" each; of calls by function, and of those that had the
// GIL.
SC_EXPORT size_t softcuda_counters(char* buffer, size_t size) {
  std::string out;
  const auto add = [&](const char* which, const char* name, long n) {
    out += std::string(which) + " " + name + " " + std::to_string(n) + "\n";
  };
  for (size_t i = 0; i < kKinds; ++i) {
    add("live", kKindNames[i], g_live[i]);
    add("leaked", kKindNames[i], g_leaked[i]);
  }
  for (size_t i = 0; i < kWhats; ++i) add("count", kWhatNames[i], g_count[i]);
  for (const ApiSite* site = g_sites.load(); site != nullptr; site = site->next) {
    add("calls", site->name, site->calls);
    add("gil_held", site->name, site->gil_held);
  }
  return give(out, buffer, size);
}

// Calls in progress, the running host function and the running kernels, one line each.
SC_EXPORT size_t softcuda_describe(char* buffer, size_t size) {
  return give(describe(), buffer, size);
}

// Copies (entered, returned) of the last `n` host functions, oldest first, in nanoseconds of
// CLOCK_MONOTONIC; returns how many there were. At most 128 are kept.
SC_EXPORT size_t softcuda_hops(uint64_t* out, size_t n) {
  std::lock_guard<std::mutex> lock(g_hops_mutex);
  n = std::min({n, g_recorded, kHops});
  for (size_t i = 0; i < n; ++i) {
    std::copy_n(g_hops[(g_recorded - n + i) % kHops], 2, out + 2 * i);
  }
  return n;
}

// A host function: writes the time to the uint64 that `data` points at.
SC_EXPORT void softcuda_stamp(void* data) { *static_cast<uint64_t*>(data) = now_ns(); }

SC_API(cuGetProcAddress_v2, 12000, kAlways, const char*, name, void**, out, int, version, uint64_t,
       flags, int*, status) {
  need(name != nullptr && out != nullptr);
  const ApiSite* newest = nullptr;
  bool known = false;
  // The only symbol whose name is not that of the function.
  if (std::strcmp(name, "cuGraphInstantiate") == 0) name = "cuGraphInstantiateWithFlags";
  for (const ApiSite* site = g_sites.load(); site != nullptr; site = site->next) {
    if (std::strcmp(site->name, name) != 0) continue;
    known = true;
    if (site->from > version || (newest != nullptr && newest->from > site->from)) continue;
    newest = site;
  }
  *out = newest != nullptr ? newest->address : nullptr;
  // SUCCESS, VERSION_NOT_SUFFICIENT, SYMBOL_NOT_FOUND
  if (status != nullptr) *status = newest != nullptr ? 0 : known ? 2 : 1;
  need(newest != nullptr, CUDA_ERROR_NOT_FOUND);
}

SC_API_CODE(cuGetProcAddress, 11030, kAlways, const char*, name, void**, out, int, version,
            uint64_t, flags) {
  return cuGetProcAddress_v2(name, out, version, flags, nullptr);
}

// Undocumented tables: there are none.
SC_API(cuGetExportTable, 3000, kAlways, const void**, out, const void*, id) {
  need(false, CUDA_ERROR_NOT_FOUND);
}
