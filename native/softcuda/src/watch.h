// The lock-order watch (SOFTCUDA_WATCH=FILE). It records which of three resources a thread holds
// while it requests another one: the GIL, the driver lock, and device work (invariants L1-L5). The
// driver lock represents all locks of a real driver. Device work is a pseudo-lock that represents
// the progress of the device: a thread holds it if the device needs the thread in order to
// continue, and a call requests it if the call may wait for the device. `graft doctor --watch`
// searches the record for cycles, which are possible deadlocks.
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
// Must be called when the thread enters a restricted scope. `function` is the host function or
// destructor that runs. It is null if the scope was entered because a pending stream wait depends
// on the thread.
void watch_restricted_scope(void* function);
// Ends the record. Writes how often each edge was observed. Also writes `hang`, the watchdog's
// report about a process that hangs, or "" if there is none.
void end_watch(const std::string& hang);

}  // namespace softcuda
