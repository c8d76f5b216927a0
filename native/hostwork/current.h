// What a native host function may ask about the step it is running in. No GIL, no allocation.
#pragma once

#include <cstdint>

namespace graft::hostwork {

// Number of the replay that is running on this thread, from 1; 0 in eager work or outside of
// host work. A replay that stood down has a number too.
std::int64_t current_replay();

// Fails the current replay with a message: its later host steps stand down, and the host is told
// by the next launch(), check() or synchronize(). No effect outside of host work.
void fail_current(const char* message);

}  // namespace graft::hostwork
