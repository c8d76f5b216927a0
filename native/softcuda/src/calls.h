// Records of what each thread is doing in the driver, for reports (A1). They contain the driver
// call or host function that the thread executes, and whether the device waits for the thread.
#pragma once

#include "runtime.h"

namespace softcuda {

// State of one thread that has called the driver. All records form a linked list; the record of an
// exited thread is reused.
struct ThreadRecord {
  std::atomic<bool> used{false};  // false after the thread has exited
  std::atomic<long> tid{0};
  std::atomic<uint64_t> pthread{0};
  std::atomic<const EntryPoint*> entry_point{nullptr};  // of the call in progress; null if none is
  std::atomic<bool> gil{false};                         // whether the call's thread held the GIL
  std::atomic<const char*> waiting{nullptr};            // what the call waits for; null if nothing
  std::atomic<bool> device_waits{false};                // set by softcuda_set_device_waits
  std::atomic<uint64_t> since{0};  // start of the call, or of the time that the device waits
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
// Starts the watchdog thread if SOFTCUDA_WATCHDOG is set. When one call or host function takes
// longer than this number of seconds, the watchdog prints describe_with_stacks() and terminates the
// process with status 86. The watchdog does not take the GIL, so it also reports a process in which
// a thread never releases the GIL.
void start_watchdog();

}  // namespace softcuda
