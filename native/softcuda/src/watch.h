// The lock-order watch (SOFTCUDA_WATCH=FILE). When a thread holds a resource A while it requests a
// resource B, the watch records the edge A -> B (INVARIANTS.md L1 to L5). `graft doctor --watch`
// searches the edges for cycles, which are possible deadlocks. There are three resources:
//   - The GIL, Python's global interpreter lock.
//   - The driver lock, which represents all locks of a real driver.
//   - Device work, a pseudo-lock that represents the progress of the device. A thread holds it
//     while the device cannot continue without the thread. A driver call requests it if the call
//     may wait for the device.
#pragma once

#include <string>

namespace softcuda {

// Whether the watch is on.
bool watching();
// Turns the watch on if SOFTCUDA_WATCH is set.
void start_watch();

// What a driver call requests while its thread holds the GIL.
enum class WaitsFor { driver_lock, device_work };
// Records that the driver call `api`, whose thread holds the GIL, requests `resource`. `reason` is
// a text that `graft doctor` prints.
void record_held_gil(const char* api, WaitsFor resource, const char* reason);
// Must be called when the thread enters a restricted scope (t_restricted_scope in runtime.h).
// `function` is the host function or destructor that runs. It is null if the scope was entered
// because a pending stream wait depends on the thread.
void watch_restricted_scope(void* function);
// Ends the watch's report, the file SOFTCUDA_WATCH: writes how often each edge of the lock order
// was observed, and `hang`, the watchdog's report about a process that hangs ("" if it does not).
void end_watch(const std::string& hang);

}  // namespace softcuda
