// Which driver call, host function or owed answer each thread is in, for reports (invariant A1).
#pragma once

#include "runtime.h"

namespace softcuda {

// One per thread that ever called; kept in a list, reused after the thread's end.
struct ThreadRecord {
  std::atomic<bool> used{false};
  std::atomic<long> tid{0};
  std::atomic<uint64_t> pthread{0};
  std::atomic<const ApiSite*> site{nullptr};
  std::atomic<bool> gil{false};
  std::atomic<const char*> waiting{nullptr};
  std::atomic<bool> owes{false};  // a worker that owes the device an answer
  std::atomic<uint64_t> since{0};
  ThreadRecord* next = nullptr;
};
ThreadRecord* first_thread();
ThreadRecord& this_thread();

// The host-function thread; `fn` is null while it runs none.
struct RunningHost {
  std::atomic<void*> fn{nullptr};
  std::atomic<uint64_t> since{0};
  std::atomic<long> tid{0};
  std::atomic<uint64_t> pthread{0};
};
inline RunningHost g_running_host;

// Calls in progress, the running host function, workers that owe an answer, running kernels.
std::string describe();
// The same, with every such thread's native stack and, after it, Python's stacks of all threads.
std::string describe_with_stacks();
// Prints that and ends the process with 86 when one call or host function has been stuck for
// SOFTCUDA_WATCHDOG seconds; native, so it also sees a process whose GIL is stuck.
void start_watchdog();

}  // namespace softcuda
