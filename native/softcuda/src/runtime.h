// Internal declarations of the soft device. The rules they keep are numbered in INVARIANTS.md.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "cuda_api.h"
#include "softcuda_abi.h"

#define SC_EXPORT extern "C" __attribute__((visibility("default")))

namespace softcuda {

// ---- settings (environment, read once) -------------------------------------------------------
struct Settings {
  unsigned workers;
  bool strict;
  bool inline_destructors;
  bool log;
  unsigned lock_model;
  unsigned watchdog_seconds;
  bool poison;
  bool aliases_only;  // refuse pinned host pointers where device code would follow them
  size_t memory;      // bytes of device memory; 0: what the machine has
  bool memops;        // false: every memory operation is NOT_SUPPORTED
  bool lazy_loading;
  unsigned queues;  // 1: one hardware queue; anything else: as many as are needed
};
const Settings& settings();
int device_attribute(int attribute);  // as cuDeviceGetAttribute answers; 0 for unknown ones

// ---- errors ----------------------------------------------------------------------------------
// A sticky error: every later call answers it. Set once; the first text stays.
CUresult sticky();
void fault(CUresult code, const std::string& text);
// A refused call leaves its reason here (and in the log); returns `code`.
CUresult refuse(CUresult code, const std::string& text);
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
// One per entry point; registers itself in a list for the counters.
struct ApiSite {
  explicit ApiSite(const char* name, unsigned flags);
  const char* name;
  unsigned flags;
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
CUresult capture_forbids_unsafe(const char* api);

// Guards one call: bookkeeping of the GIL and of the calls in progress, refusal of calls from host
// functions and destructors, sticky errors, the modelled context lock.
class ApiCall {
 public:
  explicit ApiCall(ApiSite& site);
  ~ApiCall();
  ApiCall(const ApiCall&) = delete;
  ApiCall& operator=(const ApiCall&) = delete;
  CUresult refused() const { return refused_; }

 private:
  CUresult refused_ = CUDA_SUCCESS;
  const ApiSite* outer_ = nullptr;
};
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
// Keeps when a host function was entered and when it returned, for softcuda_hops.
void record_hop(uint64_t entered, uint64_t returned);
void describe_workers(std::string* out);

#define SC_API(api_name, api_flags)                       \
  static softcuda::ApiSite sc_site{#api_name, api_flags}; \
  softcuda::ApiCall sc_call(sc_site);                     \
  if (sc_call.refused() != CUDA_SUCCESS) return sc_call.refused()

// ---- handles ---------------------------------------------------------------------------------
// Handles are numbers that are never reused, so a stale one is always INVALID_HANDLE.
template <class T>
class Handles {
 public:
  explicit Handles(uint64_t base) : next_(base) {}
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
  std::shared_ptr<T> take(const void* handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto it = map_.find(reinterpret_cast<uint64_t>(handle));
    if (it == map_.end()) return nullptr;
    std::shared_ptr<T> object = std::move(it->second);
    map_.erase(it);
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
  std::unordered_map<uint64_t, std::shared_ptr<T>> map_;
};

}  // namespace softcuda
