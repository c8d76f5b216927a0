// Time stamps of a round's timeline.
#pragma once

#include "graft.cuh"

// Writes the device time in nanoseconds to column `part` of the timeline entry of a replay. Column
// 0 is the beginning of the round, column i the end of its i-th part.
__device__ __forceinline__ void stamp(long long* timeline, int stride, int entries, int replay,
                                      int part) {
  const int entry = static_cast<int>(static_cast<unsigned int>(replay) % entries);
  timeline[entry * stride + part] = static_cast<long long>(global_timer_ns());
}
