// Declarations that all files of the soft device share: settings, errors, counters, entry points
// and handles. An entry point is an exported function of the CUDA driver API. Comments cite the
// rules of native/softcuda/INVARIANTS.md by letter and number, such as (INVARIANTS.md A1).
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "cuda_api.h"
#include "softcuda_abi.h"

#define SC_EXPORT extern "C" __attribute__((visibility("default")))

namespace softcuda {

// ---- settings --------------------------------------------------------------------------------
// The order in which the nodes of a conditional body run (SOFTCUDA_BODY): concurrently, as their
// dependencies allow, or one after another. Of the nodes that could run next, `serial` then chooses
// the one that was added first, `reverse` the one that was added last.
enum class BodyOrder { concurrent, serial, reverse };

// Values of the environment variables that README.md lists. They are read once, on first use.
struct Settings {
  unsigned workers;
  bool inline_destructors;
  bool log;
  unsigned lock_model;
  unsigned watchdog_seconds;
  bool poison;
  size_t memory;  // bytes of device memory; 0 means the physical memory of the machine
  // If false, every stream memory operation returns NOT_SUPPORTED.
  bool memops;
  bool lazy_loading;
  // Number of hardware queues to model. The value 1 models a single queue; any other value means
  // that queues are unlimited.
  unsigned queues;
  bool launch_blocking;  // whether launches of kernels and graphs return after completion
  bool free_waits;       // whether calls that free memory or unload a module wait for all work
  BodyOrder body_order;
  unsigned kernel_seconds;  // maximum run time of a kernel; 0: no limit
};
const Settings& settings();
// Returns the value of a device attribute as cuDeviceGetAttribute does; 0 for unknown attributes.
int device_attribute(int attribute);

// ---- errors ----------------------------------------------------------------------------------
// A fault is an error of device code, which makes the device unusable. A refused call returns an
// error code but leaves the device usable.
//
// Returns the sticky error, which is the error code of the first fault; CUDA_SUCCESS if there was
// no fault. After a fault, every driver call returns this code.
CUresult sticky();
// Records a fault. Only the first fault becomes the sticky error and keeps its text.
void fault(CUresult code, const std::string& text);
// Thrown by the body of an entry point to return an error code. enter() catches it.
struct Refused {
  CUresult code;
};
// Ends the current call with the error `code`. softcuda_last_refusal() returns `text`, and the
// device prints it if SOFTCUDA_LOG=1 is set.
[[noreturn]] void refuse(CUresult code, const std::string& text);
// Ends the current call with the error `code` if the condition is false.
inline void require(bool condition, CUresult code = CUDA_ERROR_INVALID_VALUE) {
  if (!condition) throw Refused{code};
}
inline void require(bool condition, CUresult code, const char* text) {
  if (!condition) refuse(code, text);
}
// Copies as much of `text` as fits into `buffer`, followed by a null byte. Returns the length of
// the whole `text`.
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
// Adds the counters of live resources to the counters of leaked resources. The counters of live
// resources are then zero for the rest of the process (INVARIANTS.md E3).
void count_live_as_leaked();

// ---- entry points ----------------------------------------------------------------------------
// Describes one entry point and counts its calls. All objects form a linked list, which
// cuGetProcAddress searches. They are never destroyed.
struct EntryPoint {
  EntryPoint(const char* symbol, int version, unsigned flags, void* address);
  // Name of the function: the exported symbol without its version suffix.
  char name[64];
  // CUDA version in which the function got this signature.
  int version;
  unsigned flags;
  void* address;
  // Number of the call that fails because of the setting SOFTCUDA_FAIL; 0 if none fails.
  long fails_at = 0;
  int fails_with = CUDA_ERROR_OUT_OF_MEMORY;
  std::atomic<long> calls{0};  // calls so far
  // Number of calls that were made by a thread holding the GIL.
  std::atomic<long> gil_held{0};
  EntryPoint* next;
};
enum : unsigned {
  kAlways = 1,      // allowed after a fault, before cuInit and in host functions
  kNoInit = 2,      // allowed before cuInit
  kNoLock = 4,      // never waits for the simulated context lock
  kAfterFault = 8,  // allowed after a fault
  kContext = 16,    // requires the calling thread to have a current context
  kUnsafe = 32,     // unsafe during a capture, see cuThreadExchangeStreamCaptureMode
};
// Refuses cuInit if an item of SOFTCUDA_FAIL is malformed or does not name an entry point.
void check_failure_setting();
// Refuses the driver function `api`, whose flags include kUnsafe, while a stream is capturing in a
// mode that forbids such calls (capture.cpp).
void capture_reject_unsafe(const char* api);

// Bookkeeping of one driver call: updates the counters and the calling thread's ThreadRecord.
class ApiCall {
 public:
  explicit ApiCall(EntryPoint& entry_point);
  ~ApiCall();
  ApiCall(const ApiCall&) = delete;
  ApiCall& operator=(const ApiCall&) = delete;
  // Applies the checks that the entry point's flags select, and waits for the simulated context
  // lock.
  void check_preconditions();

 private:
  EntryPoint& entry_point_;
  const long number_;
  const bool gil_;
  const EntryPoint* outer_;
};
// Runs the body of an entry point and returns its error code.
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
  } catch (const std::bad_alloc&) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  } catch (const std::exception&) {  // no exception may cross the C interface
    return CUDA_ERROR_UNKNOWN;
  }
}
// While an object of this class exists, softcuda_describe() reports that the calling thread waits
// for `description`.
class WaitScope {
 public:
  explicit WaitScope(const char* description);
  ~WaitScope();

 private:
  const char* outer_;
};
// Records for the lock-order watch (watch.h) that the current call may have to wait for device
// work. Does nothing if the calling thread does not hold the GIL.
void may_wait_for_device(const char* reason);
// Name of the restricted scope in which the calling thread runs; null outside of such a scope. A
// thread may not call the driver in a restricted scope. The scopes are host functions, user-object
// destructors, and the time in which a pending stream wait depends on the thread.
extern thread_local const char* t_restricted_scope;
// Runs a host function in a restricted scope. While it runs, softcuda_describe() lists it and, with
// SOFTCUDA_LOCK_MODEL=1, the context lock is held.
void run_host_function(CUhostFn fn, void* data);
// Appends one line for each running kernel to `out`.
void describe_workers(std::string* out);

// Define an entry point: SC_API(symbol, CUDA version of its ABI, flags, type, parameter, ...) {}.
// The body of SC_API returns nothing and reports errors by refuse() and require(). The body of
// SC_API_CODE returns a CUresult and may use both functions too.
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
// Expands SC_EACH(f, flags, type, parameter, ...) to f(type, parameter) for each pair of type and
// parameter, separated by commas.
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
// Maps handles to objects of one kind. Handles are numbers that are never reused
// (INVARIANTS.md A5).
template <class T>
class Handles {
 public:
  // Handles are greater than `base`; each kind of object has its own range. `unknown_text` is the
  // error text of find() and remove() for an unknown handle.
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
  // Returns the object. An unknown handle ends the call with INVALID_HANDLE.
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
  // Removes the handle and returns the object. An unknown handle ends the call with INVALID_HANDLE.
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
