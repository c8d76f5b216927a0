// What happens at the entry of every call: the GIL record, refusals, the modelled context lock, and
// the list of calls in progress (invariants A1-A4). Also the counters.
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <thread>

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

struct RecordOwner {
  ThreadRecord* record = nullptr;
  ~RecordOwner() {
    if (record != nullptr) record->used.store(false);
  }
};

ThreadRecord& self() {
  thread_local RecordOwner owner;
  if (owner.record != nullptr) return *owner.record;
  for (ThreadRecord* r = g_threads.load(); r != nullptr; r = r->next) {
    bool free = false;
    if (r->used.compare_exchange_strong(free, true)) owner.record = r;
    if (owner.record != nullptr) break;
  }
  if (owner.record == nullptr) {
    owner.record = new ThreadRecord;
    owner.record->used = true;
    owner.record->next = g_threads.load();
    while (!g_threads.compare_exchange_weak(owner.record->next, owner.record)) {
    }
  }
  owner.record->tid = syscall(SYS_gettid);
  owner.record->pthread = static_cast<uint64_t>(pthread_self());
  owner.record->owes = false;
  owner.record->site = nullptr;
  owner.record->waiting = nullptr;
  return *owner.record;
}

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
ThreadRecord& this_thread() { return self(); }
RunningHost& running_host() {
  static RunningHost& host = *new RunningHost;
  return host;
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

ApiSite::ApiSite(const char* api, unsigned f) : name(api), flags(f), next(g_sites.load()) {
  while (!g_sites.compare_exchange_weak(next, this)) {
  }
}

namespace {
// SOFTCUDA_FAIL=function:n[:code],...: calls that fail on demand.
struct Planned {
  std::string function;
  long nth = 0;
  CUresult code = CUDA_ERROR_OUT_OF_MEMORY;
  std::atomic<long> seen{0};
};
std::vector<std::unique_ptr<Planned>>& planned() {
  static auto& all = *[] {
    auto* out = new std::vector<std::unique_ptr<Planned>>;
    const char* text = std::getenv("SOFTCUDA_FAIL");
    std::istringstream items(text == nullptr ? "" : text);
    for (std::string item; std::getline(items, item, ',');) {
      auto plan = std::make_unique<Planned>();
      char function[64] = "";
      if (std::sscanf(item.c_str(), "%63[^:]:%ld:%d", function, &plan->nth, &plan->code) < 2) {
        log_line("softcuda: SOFTCUDA_FAIL: '" + item + "' is not function:n or function:n:code");
        continue;
      }
      plan->function = function;
      out->push_back(std::move(plan));
    }
    return out;
  }();
  return all;
}

CUresult planned_failure(const char* function) {
  for (auto& plan : planned()) {
    if (plan->function != function || ++plan->seen != plan->nth) continue;
    return refuse(plan->code, std::string(function) + " fails as SOFTCUDA_FAIL says");
  }
  return CUDA_SUCCESS;
}
}  // namespace

ApiCall::ApiCall(ApiSite& site) {
  ThreadRecord& me = self();
  const bool gil = gil_held();
  site.calls.fetch_add(1, std::memory_order_relaxed);
  if (gil) site.gil_held.fetch_add(1, std::memory_order_relaxed);
  outer_ = me.site.load(std::memory_order_relaxed);
  if (outer_ == nullptr) {
    me.gil = gil;
    me.since.store(now_ns(), std::memory_order_relaxed);
  }
  me.site.store(&site, std::memory_order_release);
  if ((site.flags & kAlways) != 0) return;
  if (t_forbidden != nullptr && settings().strict) {
    refused_ = refuse(CUDA_ERROR_NOT_PERMITTED,
                      std::string(site.name) + " was called from a " + t_forbidden);
    return;
  }
  if (forked()) {  // its threads stayed behind, maybe with our locks (A6)
    refused_ = refuse(CUDA_ERROR_NOT_INITIALIZED,
                      "the process was forked from one that uses the "
                      "device");
    return;
  }
  if (!planned().empty()) {
    refused_ = planned_failure(site.name);
    if (refused_ != CUDA_SUCCESS) return;
  }
  if ((site.flags & kNoInit) == 0 && !initialised()) {
    refused_ = CUDA_ERROR_NOT_INITIALIZED;
    return;
  }
  if ((site.flags & kAfterFault) == 0 && sticky() != CUDA_SUCCESS) {
    refused_ = sticky();
    return;
  }
  if ((site.flags & kContext) != 0 && current_context() == nullptr) {
    refused_ = refuse(CUDA_ERROR_INVALID_CONTEXT,
                      std::string(site.name) + ": no context is current on this thread");
    return;
  }
  if ((site.flags & kUnsafe) != 0) {
    refused_ = capture_forbids_unsafe(site.name);
    if (refused_ != CUDA_SUCCESS) return;
  }
  if ((site.flags & kNoLock) != 0) return;
  if (gil && watching()) {
    note_held_gil(site.name, Wanted::driver_lock, "it may take a lock of the driver");
  }
  if ((settings().lock_model & 1) != 0) {
    Waiting waiting("the context lock, held while a host function runs (lock model 1)");
    std::lock_guard<std::mutex> lock(g_context_lock);
  }
}

ApiCall::~ApiCall() { self().site.store(outer_, std::memory_order_release); }

Waiting::Waiting(const char* what) : outer_(self().waiting.exchange(what)) {}
Waiting::~Waiting() { self().waiting.store(outer_); }

void may_wait_for_device(const char* why) {
  const ThreadRecord& me = self();
  const ApiSite* site = me.site.load(std::memory_order_relaxed);
  if (!watching() || site == nullptr || !me.gil) return;
  note_held_gil(site->name, Wanted::device_work, why);
}

void run_host_function(CUhostFn fn, void* data) {
  std::unique_lock<std::mutex> lock(g_context_lock, std::defer_lock);
  if ((settings().lock_model & 1) != 0) lock.lock();
  RunningHost& host = running_host();
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

SC_EXPORT int64_t softcuda_leaked(const char* kind) {
  const int i = index_of(kKindNames, kind);
  return i < 0 ? -1 : g_leaked[i].load();
}

SC_EXPORT int64_t softcuda_count(const char* what) {
  const int i = index_of(kWhatNames, what);
  return i < 0 ? -1 : g_count[i].load();
}

// Names by index, null after the last: resource kinds, counts, and APIs called so far.
SC_EXPORT const char* softcuda_kind_name(unsigned i) {
  return i < kKinds ? kKindNames[i] : nullptr;
}
SC_EXPORT const char* softcuda_count_name(unsigned i) {
  return i < kWhats ? kWhatNames[i] : nullptr;
}
SC_EXPORT const char* softcuda_api_name(unsigned i) {
  const ApiSite* site = g_sites.load();
  for (; site != nullptr && i > 0; --i) site = site->next;
  return site != nullptr ? site->name : nullptr;
}

static int64_t sum_sites(const char* api, std::atomic<long> ApiSite::* field) {
  int64_t total = 0;
  for (ApiSite* site = g_sites.load(); site != nullptr; site = site->next) {
    if (api == nullptr || std::strcmp(api, site->name) == 0) total += (site->*field).load();
  }
  return total;
}
SC_EXPORT int64_t softcuda_calls(const char* api) { return sum_sites(api, &ApiSite::calls); }
SC_EXPORT int64_t softcuda_gil_held(const char* api) { return sum_sites(api, &ApiSite::gil_held); }

// Calls in progress, the running host function and the running kernels, one line each.
SC_EXPORT size_t softcuda_describe(char* buffer, size_t size) {
  return give(describe(), buffer, size);
}
