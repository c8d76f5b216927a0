#include "timing.cuh"

// Writes the device time to column `part` of the replay's timeline entry: the end of part `part` of
// the round (from 1) and the beginning of the next one.
extern "C" __global__ void stamp_time(const int* replay, long long* timeline, int stride,
                                      int entries, int part) {
  stamp(timeline, stride, entries, *replay, part);
}
