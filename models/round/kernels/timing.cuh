// Time stamps of a round's timeline.
#pragma once

#include "graft.cuh"

// Writes the device clock to column `part` of the timeline entry of a replay.
__device__ __forceinline__ void stamp(long long* timeline, int stride, int entries, int replay,
                                      int part) {
  const int entry = static_cast<int>(static_cast<unsigned int>(replay) % entries);
  timeline[entry * stride + part] = static_cast<long long>(global_timer_ns());
}
