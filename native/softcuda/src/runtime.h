// Internal declarations of the soft device. The rules they keep are numbered in INVARIANTS.md.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "cuda_api.h"
#include "softcuda_abi.h"

#define SC_EXPORT extern "C" __attribute__((visibility("default")))

namespace softcuda {

// ---- settings (environment, read once) -------------------------------------------------------
struct Settings {
  unsigned workers;
  bool inline_destructors;
  bool log;
  unsigned lock_model;
  unsigned watchdog_seconds;
  bool poison;
  size_t memory;  // bytes of device memory; 0: what the machine has
  bool memops;    // false: every memory operation is NOT_SUPPORTED
  bool lazy_loading;
  unsigned queues;  // 1: one hardware queue; anything else: as many as are needed
};
const Settings& settings();
int device_attribute(int attribute);  // as cuDeviceGetAttribute answers; 0 for unknown ones

// ---- errors ----------------------------------------------------------------------------------
// A sticky error: every later call answers it. Set once; the first text stays.
CUresult sticky();
void fault(CUresult code, const std::string& text);
// What an entry point answers instead of doing its work; enter() makes it the call's code.
struct Refused {
  CUresult code;
};
// Ends the call; the reason is for softcuda_last_refusal (and the log).
[[noreturn]] void refuse(CUresult code, const std::string& text);
inline void need(bool good, CUresult code = CUDA_ERROR_INVALID_VALUE) {
  if (!good) throw Refused{code};
}
inline void need(bool good, CUresult code, const char* why) {
  if (!good) refuse(code, why);
}
// Copies as much as fits, with a 0 at the end; returns the whole length.
size_t give(const std::string& text, char* buffer, size_t size);
void log_line(const std::string& text);
std::string hex(unsigned long long value);

// ---- counters --------------------------------------------------------------------------------
enum class Kind {
  device_memory,
  pinned_memory,
  stream,
  event,
  module,
  graph,
  graph_exec,
  user_object,
  context,
  count_
};
enum class What { graph_launch, kernel_launch, host_func, node, count_ };
void live_add(Kind kind, long delta);
void count_add(What what, long delta = 1);
void leak_everything();  // after a fault: what lives now is counted as leaked from here on

// ---- API calls -------------------------------------------------------------------------------
// One per entry point, in a list: what cuGetProcAddress knows, and the counters. Never destroyed.
struct ApiSite {
  ApiSite(const char* symbol, int from, unsigned flags, void* address);
  char name[40];  // the symbol without its version
  int from;       // the CUDA version whose ABI the symbol has
  unsigned flags;
  void* address;
  long fails_at = 0;  // the call of that number fails, as SOFTCUDA_FAIL says
  int fails_with = CUDA_ERROR_OUT_OF_MEMORY;
  std::atomic<long> calls{0};
  std::atomic<long> gil_held{0};
  ApiSite* next;
};
enum : unsigned {
  kAlways = 1,      // answers after a fault and before cuInit, from every thread
  kNoInit = 2,      // needs no cuInit
  kNoLock = 4,      // never waits for the modelled context lock
  kAfterFault = 8,  // still works after a fault
  kContext = 16,    // needs a current context on the calling thread
  kUnsafe = 32,     // may be forbidden while a stream captures (cuThreadExchangeStreamCaptureMode)
};
void capture_forbids_unsafe(const char* api);

// Guards one call: bookkeeping of the GIL and of the calls in progress.
class ApiCall {
 public:
  explicit ApiCall(ApiSite& site);
  ~ApiCall();
  ApiCall(const ApiCall&) = delete;
  ApiCall& operator=(const ApiCall&) = delete;
  // Refuses calls from host functions and destructors and sticky errors; takes the modelled lock.
  void admit();

 private:
  ApiSite& site_;
  const long number_;
  const bool gil_;
  const ApiSite* outer_;
};
template <class Body>
CUresult enter(ApiSite& site, const Body& body) {
  ApiCall call(site);
  try {
    call.admit();
    if constexpr (std::is_void_v<decltype(body())>) {
      body();
      return CUDA_SUCCESS;
    } else {
      return body();
    }
  } catch (const Refused& refused) {
    return refused.code;
  }
}
// Marks what the calling thread waits for, for softcuda_describe.
class Waiting {
 public:
  explicit Waiting(const char* what);
  ~Waiting();

 private:
  const char* outer_;
};
// The call is going to wait for device work, or may: noted where the caller holds the GIL.
void may_wait_for_device(const char* why);
// Set while the thread runs a user's host function or destructor.
extern thread_local const char* t_forbidden;
// Runs a user's host function, visible to softcuda_describe; honours lock model bit 1.
void run_host_function(CUhostFn fn, void* data);
void describe_workers(std::string* out);

// An entry point: SC_API(symbol, CUDA version of its ABI, flags, type, parameter, ...) { body }.
// The body refuses by refuse() and need(); that of SC_API_CODE returns a code.
#define SC_API(symbol, from, ...) SC_DEFINE(void, symbol, from, __VA_ARGS__)
#define SC_API_CODE(symbol, from, ...) SC_DEFINE(CUresult, symbol, from, __VA_ARGS__)
#define SC_DEFINE(Result, symbol, from, ...)                                              \
  static Result symbol##_body(SC_EACH(SC_DECLARE, __VA_ARGS__));                          \
  SC_EXPORT CUresult symbol(SC_EACH(SC_DECLARE, __VA_ARGS__));                            \
  static softcuda::ApiSite symbol##_site{#symbol, from, SC_FIRST(__VA_ARGS__, 0),         \
                                         reinterpret_cast<void*>(symbol)};                \
  SC_EXPORT CUresult symbol(SC_EACH(SC_DECLARE, __VA_ARGS__)) {                           \
    return softcuda::enter(symbol##_site,                                                 \
                           [&] { return symbol##_body(SC_EACH(SC_PASS, __VA_ARGS__)); }); \
  }                                                                                       \
  static Result symbol##_body(SC_EACH(SC_DECLARE, __VA_ARGS__))
#define SC_FIRST(first, ...) first
#define SC_DECLARE(type, name) [[maybe_unused]] type name
#define SC_PASS(type, name) name
// Applies `f` to each pair behind the flags.
#define SC_EACH(f, ...)                                                                          \
  SC_PICK(__VA_ARGS__, SC_P11, , SC_P10, , SC_P9, , SC_P8, , SC_P7, , SC_P6, , SC_P5, , SC_P4, , \
          SC_P3, , SC_P2, , SC_P1, , SC_P0, )                                                    \
  (f, __VA_ARGS__)
#define SC_PICK(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t, u, v, w, picked, ...) \
  picked
#define SC_P0(f, flags)
#define SC_P1(f, flags, t, n) f(t, n)
#define SC_P2(f, flags, t, n, ...) f(t, n), SC_P1(f, flags, __VA_ARGS__)
#define SC_P3(f, flags, t, n, ...) f(t, n), SC_P2(f, flags, __VA_ARGS__)
#define SC_P4(f, flags, t, n, ...) f(t, n), SC_P3(f, flags, __VA_ARGS__)
#define SC_P5(f, flags, t, n, ...) f(t, n), SC_P4(f, flags, __VA_ARGS__)
#define SC_P6(f, flags, t, n, ...) f(t, n), SC_P5(f, flags, __VA_ARGS__)
#define SC_P7(f, flags, t, n, ...) f(t, n), SC_P6(f, flags, __VA_ARGS__)
#define SC_P8(f, flags, t, n, ...) f(t, n), SC_P7(f, flags, __VA_ARGS__)
#define SC_P9(f, flags, t, n, ...) f(t, n), SC_P8(f, flags, __VA_ARGS__)
#define SC_P10(f, flags, t, n, ...) f(t, n), SC_P9(f, flags, __VA_ARGS__)
#define SC_P11(f, flags, t, n, ...) f(t, n), SC_P10(f, flags, __VA_ARGS__)

// ---- handles ---------------------------------------------------------------------------------
// Handles are numbers that are never reused, so a stale one is always INVALID_HANDLE.
template <class T>
class Handles {
 public:
  // `unknown` is the reason when find() knows no such handle.
  Handles(uint64_t base, const char* unknown) : next_(base), unknown_(unknown) {}
  void* add(std::shared_ptr<T> object) {
    std::lock_guard<std::mutex> lock(mutex_);
    next_ += 16;
    map_.emplace(next_, std::move(object));
    return reinterpret_cast<void*>(next_);
  }
  std::shared_ptr<T> get(const void* handle) const {
    std::lock_guard<std::mutex> lock(mutex_);
    auto it = map_.find(reinterpret_cast<uint64_t>(handle));
    return it == map_.end() ? nullptr : it->second;
  }
  std::shared_ptr<T> find(const void* handle) const {
    std::shared_ptr<T> object = get(handle);
    need(object != nullptr, CUDA_ERROR_INVALID_HANDLE, unknown_);
    return object;
  }
  std::shared_ptr<T> take(const void* handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto it = map_.find(reinterpret_cast<uint64_t>(handle));
    if (it == map_.end()) return nullptr;
    std::shared_ptr<T> object = std::move(it->second);
    map_.erase(it);
    return object;
  }
  // The same of an object that must be there.
  std::shared_ptr<T> remove(const void* handle) {
    std::shared_ptr<T> object = take(handle);
    need(object != nullptr, CUDA_ERROR_INVALID_HANDLE, unknown_);
    return object;
  }
  std::vector<std::shared_ptr<T>> all() const {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::shared_ptr<T>> out;
    for (auto& item : map_) out.push_back(item.second);
    return out;
  }

 private:
  mutable std::mutex mutex_;
  uint64_t next_;
  const char* unknown_;
  std::unordered_map<uint64_t, std::shared_ptr<T>> map_;
};

}  // namespace softcuda
