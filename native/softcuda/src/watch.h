// Lock-order watch (SOFTCUDA_WATCH=FILE): records which locks each thread holds while it requests
// another one (invariants L1-L5). `graft doctor --watch` searches the record for cycles.
#pragma once

#include <string>

namespace softcuda {

bool watching();
void start_watch();

// What a driver call waits for, or may wait for, while its thread holds the GIL.
enum class WaitsFor { driver_lock, device_work };
void record_held_gil(const char* api, WaitsFor resource, const char* reason);
// Call when the thread enters a restricted scope: a host function or destructor (`function`), or a
// worker that the device waits for (null).
void watch_restricted_scope(void* function);
// Ends the record: writes the count of each edge and the watchdog's report, "" if there is none.
void end_watch(const std::string& hang);

}  // namespace softcuda
