// Records of what each thread is doing in the driver, for reports (A1): the driver call or the host
// function that it is in, and whether the device waits for it.
#pragma once

#include "runtime.h"

namespace softcuda {

// One per thread that has called the driver, in a linked list. Reused after the thread has ended.
struct ThreadRecord {
  std::atomic<bool> used{false};
  std::atomic<long> tid{0};
  std::atomic<uint64_t> pthread{0};
  std::atomic<const EntryPoint*> entry_point{nullptr};
  std::atomic<bool> gil{false};
  std::atomic<const char*> waiting{nullptr};
  std::atomic<bool> device_waits{false};  // set by softcuda_set_device_waits
  std::atomic<uint64_t> since{0};
  ThreadRecord* next = nullptr;
};
ThreadRecord* first_thread();
ThreadRecord& this_thread();

// The host function that is running; `fn` is null if none is.
struct RunningHost {
  std::atomic<void*> fn{nullptr};
  std::atomic<uint64_t> since{0};
  std::atomic<long> tid{0};
  std::atomic<uint64_t> pthread{0};
};
inline RunningHost g_running_host;

// Returns one line for each call in progress, the running host function, each worker thread that
// the device waits for, and each running kernel.
std::string describe();
// Same, with the native and Python stacks of these threads, then the stacks of all other Python
// threads.
std::string describe_with_stacks();
// Starts the watchdog thread if SOFTCUDA_WATCHDOG is set. When one call or host function has lasted
// longer than that, it prints describe_with_stacks() and ends the process with status 86. It takes
// no GIL, so it also reports a process in which a thread never releases the GIL.
void start_watchdog();

}  // namespace softcuda
