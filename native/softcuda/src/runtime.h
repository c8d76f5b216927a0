// Declarations that all files of the soft device share: settings, errors, counters, the frame of an
// entry point, and handles. Invariants are numbered in INVARIANTS.md and cited by letter and
// number.
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

// ---- settings --------------------------------------------------------------------------------
// Values of the environment variables that README.md lists, read once.
struct Settings {
  unsigned workers;
  bool inline_destructors;
  bool log;
  unsigned lock_model;
  unsigned watchdog_seconds;
  bool poison;
  size_t memory;  // bytes of device memory; 0 means the physical memory of the machine
  bool memops;    // false: every stream memory operation returns NOT_SUPPORTED
  bool lazy_loading;
  unsigned queues;  // 1 models a single hardware queue; any other value means unlimited queues
};
const Settings& settings();
// Value of a device attribute as cuDeviceGetAttribute returns it; 0 for unknown attributes.
int device_attribute(int attribute);

// ---- errors ----------------------------------------------------------------------------------
// The sticky error, which every later call returns; CUDA_SUCCESS before the first fault.
CUresult sticky();
// Records a fault of device code. Only the first one becomes the sticky error and keeps its text.
void fault(CUresult code, const std::string& text);
// Thrown by an entry point to return an error code. enter() catches it.
struct Refused {
  CUresult code;
};
// Ends the call with `code`. softcuda_last_refusal() returns `text`, and the log prints it.
[[noreturn]] void refuse(CUresult code, const std::string& text);
inline void require(bool condition, CUresult code = CUDA_ERROR_INVALID_VALUE) {
  if (!condition) throw Refused{code};
}
inline void require(bool condition, CUresult code, const char* text) {
  if (!condition) refuse(code, text);
}
// Copies as much of `text` as fits and terminates it with a null byte. Returns the full length.
size_t copy_text(const std::string& text, char* buffer, size_t size);
void log_line(const std::string& text);
std::string hex(unsigned long long value);

// ---- counters --------------------------------------------------------------------------------
enum class Resource {
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
enum class Counter { graph_launch, kernel_launch, host_func, node, count_ };
void live_add(Resource resource, long delta);
void count_add(Counter counter, long delta = 1);
// Moves the counts of live resources to the counts of leaked ones and freezes them at zero (E3).
void count_live_as_leaked();

// ---- entry points ----------------------------------------------------------------------------
// One per exported function of the driver API, in a linked list that cuGetProcAddress searches.
// Also holds the function's call counters. Never destroyed.
struct EntryPoint {
  EntryPoint(const char* symbol, int version, unsigned flags, void* address);
  char name[40];  // the symbol without its version suffix
  int version;    // CUDA version that introduced this ABI of the function
  unsigned flags;
  void* address;
  long fails_at = 0;  // number of the call that fails, from SOFTCUDA_FAIL; 0 if none does
  int fails_with = CUDA_ERROR_OUT_OF_MEMORY;
  std::atomic<long> calls{0};
  std::atomic<long> gil_held{0};
  EntryPoint* next;
};
enum : unsigned {
  kAlways = 1,      // allowed after a fault, before cuInit and in host functions
  kNoInit = 2,      // allowed before cuInit
  kNoLock = 4,      // never waits for the modelled context lock
  kAfterFault = 8,  // allowed after a fault
  kContext = 16,    // requires a current context on the calling thread
  kUnsafe = 32,     // potentially unsafe during capture (cuThreadExchangeStreamCaptureMode)
};
void capture_reject_unsafe(const char* api);

// Bookkeeping of one driver call: the counters and the calling thread's ThreadRecord.
class ApiCall {
 public:
  explicit ApiCall(EntryPoint& entry_point);
  ~ApiCall();
  ApiCall(const ApiCall&) = delete;
  ApiCall& operator=(const ApiCall&) = delete;
  // Applies the checks of the entry point's flags and waits for the modelled context lock.
  void check_preconditions();

 private:
  EntryPoint& entry_point_;
  const long number_;
  const bool gil_;
  const EntryPoint* outer_;
};
template <class Body>
CUresult enter(EntryPoint& entry_point, const Body& body) {
  ApiCall call(entry_point);
  try {
    call.check_preconditions();
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
// Sets what the calling thread waits for in the output of softcuda_describe().
class WaitScope {
 public:
  explicit WaitScope(const char* description);
  ~WaitScope();

 private:
  const char* outer_;
};
// Records for the lock-order watch that the current call may wait for device work. Does nothing
// unless the caller holds the GIL.
void may_wait_for_device(const char* reason);
// Description of the scope in which the thread may not call the driver: a host function, a
// user-object destructor, or a worker thread that the device waits for. Null outside of them.
extern thread_local const char* t_restricted_scope;
// Runs a host function, so that softcuda_describe() lists it. Implements lock model 1.
void run_host_function(CUhostFn fn, void* data);
void describe_workers(std::string* out);

// Defines an entry point: SC_API(symbol, CUDA version of its ABI, flags, type, parameter, ...) {}.
// The body reports errors by refuse() and require(). That of SC_API_CODE returns a CUresult.
#define SC_API(symbol, version, ...) SC_DEFINE(void, symbol, version, __VA_ARGS__)
#define SC_API_CODE(symbol, version, ...) SC_DEFINE(CUresult, symbol, version, __VA_ARGS__)
#define SC_DEFINE(Result, symbol, version, ...)                                           \
  static Result symbol##_body(SC_EACH(SC_DECLARE, __VA_ARGS__));                          \
  SC_EXPORT CUresult symbol(SC_EACH(SC_DECLARE, __VA_ARGS__));                            \
  static softcuda::EntryPoint symbol##_entry{#symbol, version, SC_FIRST(__VA_ARGS__, 0),  \
                                             reinterpret_cast<void*>(symbol)};            \
  SC_EXPORT CUresult symbol(SC_EACH(SC_DECLARE, __VA_ARGS__)) {                           \
    return softcuda::enter(symbol##_entry,                                                \
                           [&] { return symbol##_body(SC_EACH(SC_PASS, __VA_ARGS__)); }); \
  }                                                                                       \
  static Result symbol##_body(SC_EACH(SC_DECLARE, __VA_ARGS__))
#define SC_FIRST(first, ...) first
#define SC_DECLARE(type, name) [[maybe_unused]] type name
#define SC_PASS(type, name) name
// Applies `f` to each (type, parameter) pair after the flags.
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
// Maps handles to objects. Handles are numbers that are never reused (A5).
template <class T>
class Handles {
 public:
  // `unknown_text` is the error text of find() and remove() for an unknown handle.
  Handles(uint64_t base, const char* unknown_text) : next_(base), unknown_text_(unknown_text) {}
  void* add(std::shared_ptr<T> object) {
    std::lock_guard<std::mutex> lock(mutex_);
    next_ += 16;
    map_.emplace(next_, std::move(object));
    return reinterpret_cast<void*>(next_);
  }
  // Returns the object, or null if the handle is unknown.
  std::shared_ptr<T> get(const void* handle) const {
    std::lock_guard<std::mutex> lock(mutex_);
    auto it = map_.find(reinterpret_cast<uint64_t>(handle));
    return it == map_.end() ? nullptr : it->second;
  }
  // Returns the object; an unknown handle ends the call with INVALID_HANDLE.
  std::shared_ptr<T> find(const void* handle) const {
    std::shared_ptr<T> object = get(handle);
    require(object != nullptr, CUDA_ERROR_INVALID_HANDLE, unknown_text_);
    return object;
  }
  // Removes the handle and returns the object, or null if the handle is unknown.
  std::shared_ptr<T> take(const void* handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto it = map_.find(reinterpret_cast<uint64_t>(handle));
    if (it == map_.end()) return nullptr;
    std::shared_ptr<T> object = std::move(it->second);
    map_.erase(it);
    return object;
  }
  // Removes the handle and returns the object; an unknown handle ends the call.
  std::shared_ptr<T> remove(const void* handle) {
    std::shared_ptr<T> object = take(handle);
    require(object != nullptr, CUDA_ERROR_INVALID_HANDLE, unknown_text_);
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
  const char* unknown_text_;
  std::unordered_map<uint64_t, std::shared_ptr<T>> map_;
};

}  // namespace softcuda
