// The device's clock, in nanoseconds.
#include "graft.cuh"

extern "C" __global__ void read_clock(long long* out) {
  *out = static_cast<long long>(global_timer_ns());
}
