// The lock-order watch (SOFTCUDA_WATCH=FILE): who held what and asked for what (invariants L1-L5).
#pragma once

#include <string>

namespace softcuda {

bool watching();
void start_watch();

// What a driver call is going to wait for, or may, while its thread holds the GIL.
enum class Wanted { driver_lock, device_work };
void note_held_gil(const char* api, Wanted wanted, const char* why);
// The calling thread begins to run a user's function for the driver, or to owe an answer.
void watch_scope_begins(void* function);
// The end of the watch's file: how often each edge was seen, and the report of a hang, if any.
void end_watch(const std::string& hang);

}  // namespace softcuda
