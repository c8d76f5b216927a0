// What happens at the entry of every call: the GIL record, refusals, the modelled context lock, and
// the list of calls in progress (invariants A1-A4). Also the counters.
#include <dlfcn.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <thread>

#include "scheduler.h"

namespace softcuda {

bool initialised();
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

// One per thread that ever called; kept in a list, reused after the thread's end.
struct ThreadRecord {
  std::atomic<bool> used{false};
  std::atomic<long> tid{0};
  std::atomic<const ApiSite*> site{nullptr};
  std::atomic<bool> gil{false};
  std::atomic<const char*> waiting{nullptr};
  std::atomic<uint64_t> since{0};
  ThreadRecord* next = nullptr;
};
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
  owner.record->site = nullptr;
  owner.record->waiting = nullptr;
  return *owner.record;
}

bool gil_held() {
  static std::atomic<int (*)()> check{nullptr}, alive{nullptr};
  if (check.load(std::memory_order_relaxed) == nullptr) {
    static std::atomic<unsigned> attempts{0};
    // Looking the symbols up costs microseconds: give up looking, not checking, for most calls.
    if ((attempts++ & 63) != 0) return false;
    alive = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "Py_IsInitialized"));
    check = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
    if (check.load() == nullptr || alive.load() == nullptr) return false;
  }
  return alive.load(std::memory_order_relaxed)() != 0 &&
         check.load(std::memory_order_relaxed)() != 0;
}

// Lock model bit 1: a lock that is held for as long as a host function runs.
std::mutex& g_context_lock = *new std::mutex;
struct RunningHost {
  std::atomic<void*> fn{nullptr};
  std::atomic<void*> data{nullptr};
  std::atomic<uint64_t> since{0};
  std::atomic<long> tid{0};
};
RunningHost& g_host = *new RunningHost;

template <size_t N>
int index_of(const char* const (&names)[N], const char* name) {
  for (size_t i = 0; name != nullptr && i < N; ++i) {
    if (std::strcmp(names[i], name) == 0) return static_cast<int>(i);
  }
  return -1;
}

}  // namespace

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
  if ((site.flags & kNoLock) == 0 && (settings().lock_model & 1) != 0) {
    Waiting waiting("the context lock, held while a host function runs (lock model 1)");
    std::lock_guard<std::mutex> lock(g_context_lock);
  }
}

ApiCall::~ApiCall() { self().site.store(outer_, std::memory_order_release); }

Waiting::Waiting(const char* what) : outer_(self().waiting.exchange(what)) {}
Waiting::~Waiting() { self().waiting.store(outer_); }

void run_host_function(CUhostFn fn, void* data) {
  std::unique_lock<std::mutex> lock(g_context_lock, std::defer_lock);
  if ((settings().lock_model & 1) != 0) lock.lock();
  g_host.tid = syscall(SYS_gettid);
  g_host.data = data;
  g_host.since = now_ns();
  g_host.fn = reinterpret_cast<void*>(fn);
  t_forbidden = "host function";
  const uint64_t entered = now_ns();
  fn(data);
  record_hop(entered, now_ns());
  t_forbidden = nullptr;
  g_host.fn = nullptr;
}

namespace {
std::string describe() {
  std::string out;
  const uint64_t now = now_ns();
  for (ThreadRecord* r = g_threads.load(); r != nullptr; r = r->next) {
    const ApiSite* site = r->site.load();
    if (!r->used || site == nullptr) continue;
    const char* waiting = r->waiting.load();
    out += "thread " + std::to_string(r->tid) + " is in " + site->name + " for " +
           std::to_string((now - r->since) / 1000000) + " ms, GIL " +
           (r->gil ? "HELD" : "not held") +
           (waiting ? std::string(", waiting for ") + waiting : std::string()) + "\n";
  }
  if (void* fn = g_host.fn.load()) {
    Dl_info info{};
    const bool known = dladdr(fn, &info) != 0;
    out += "thread " + std::to_string(g_host.tid) + " runs host function " +
           hex(reinterpret_cast<unsigned long long>(fn)) + " (" +
           (known && info.dli_sname ? info.dli_sname : "?") + " in " +
           (known && info.dli_fname ? info.dli_fname : "?") + ") for " +
           std::to_string((now - g_host.since) / 1000000) + " ms" +
           ((settings().lock_model & 1) != 0 ? ", holding the context lock" : "") + "\n";
  }
  describe_workers(&out);
  return out;
}
}  // namespace

// Prints the description and ends the process with 86 when one call or host function has been
// stuck for SOFTCUDA_WATCHDOG seconds; native, so it also sees a process whose GIL is stuck.
void start_watchdog() {
  static std::once_flag once;
  if (settings().watchdog_seconds == 0) return;
  std::call_once(once, [] {
    std::thread([] {
      const uint64_t limit = uint64_t{settings().watchdog_seconds} * 1000000000u;
      for (;;) {
        usleep(50000);
        const uint64_t now = now_ns();
        bool stuck = g_host.fn.load() != nullptr && now - g_host.since > limit;
        for (ThreadRecord* r = g_threads.load(); r != nullptr; r = r->next) {
          stuck = stuck || (r->used && r->site.load() != nullptr && now - r->since > limit);
        }
        if (!stuck) continue;
        std::fprintf(stderr, "softcuda watchdog: no progress for %u s\n%s",
                     settings().watchdog_seconds, describe().c_str());
        std::fflush(stderr);
        _exit(86);
      }
    }).detach();
  });
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
  if (t_forbidden == nullptr || t_forbidden == kOwes) t_forbidden = owes != 0 ? kOwes : nullptr;
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

// Zeroes counts and the call and GIL records; live and leaked resources stay what they are.
SC_EXPORT void softcuda_reset_counters() {
  for (auto& count : g_count) count = 0;
  for (ApiSite* site = g_sites.load(); site != nullptr; site = site->next) {
    site->calls = 0;
    site->gil_held = 0;
  }
}

// Calls in progress, the running host function and the running kernels, one line each.
SC_EXPORT size_t softcuda_describe(char* buffer, size_t size) {
  const std::string text = describe();
  if (buffer != nullptr && size > 0) {
    const size_t n = std::min(text.size(), size - 1);
    std::memcpy(buffer, text.data(), n);
    buffer[n] = '\0';
  }
  return text.size();
}
