// Records of what each thread is doing in the driver, for reports (INVARIANTS.md A1). They contain
// the driver call or host function that the thread executes, and whether the device waits for the
// thread.
#pragma once

#include "runtime.h"

namespace softcuda {

// Records what one thread is doing in the driver. The records of all threads form a linked list.
// The record of a thread that has exited is reused for a new thread.
struct ThreadRecord {
  std::atomic<bool> used{false};  // false after the thread has exited
  std::atomic<long> tid{0};
  std::atomic<uint64_t> pthread{0};
  // The entry point that the thread is executing; null if no driver call is in progress.
  std::atomic<const EntryPoint*> entry_point{nullptr};
  // Whether the thread held the GIL when it made this call.
  std::atomic<bool> gil{false};
  // Description of the object for which the call waits; null if it does not wait.
  std::atomic<const char*> waiting{nullptr};
  // Whether a pending stream wait ends only when the thread stores the awaited value
  // (softcuda_set_device_waits).
  std::atomic<bool> device_waits{false};
  // Start time of the call or, if `device_waits` is set, the time at which `device_waits` was set.
  std::atomic<uint64_t> since{0};
  ThreadRecord* next = nullptr;
};
ThreadRecord* first_thread();
ThreadRecord& this_thread();

// The host function that is running. `fn` is null if none is running.
struct RunningHost {
  std::atomic<void*> fn{nullptr};
  std::atomic<uint64_t> since{0};
  std::atomic<long> tid{0};
  std::atomic<uint64_t> pthread{0};
};
inline RunningHost g_running_host;

// Returns one line for each driver call in progress, the running host function, each thread that
// the device waits for, and each running kernel.
std::string describe();
// Returns the same lines with the native and Python stacks of their threads, followed by the stacks
// of all other Python threads.
std::string describe_with_stacks();
// Starts the watchdog thread if SOFTCUDA_WATCHDOG is set to a time limit in seconds. When one
// driver call or host function exceeds the limit, the watchdog prints describe_with_stacks() and
// terminates the process with status 86. The watchdog does not take the GIL. It therefore also
// works if a thread never releases the GIL.
void start_watchdog();

}  // namespace softcuda
