// Kernels that read the device's clock and block a stream, for latency measurements and timelines.
#include "graft.cuh"

// Writes the device time in nanoseconds to stamps[index]. Must be launched with one thread.
extern "C" __global__ void stamp_ns(unsigned long long* stamps, int index) {
  stamps[index] = global_timer_ns();
}

// Blocks the stream until the host sets `word`, which is in pinned memory, to a value other than 0,
// or until `limit` nanoseconds have passed. Must be launched with one thread.
extern "C" __global__ void hold(const int* word, unsigned long long limit) {
  const unsigned long long begin = global_timer_ns();
  while (*static_cast<const volatile int*>(word) == 0 && global_timer_ns() - begin < limit) {
  }
}
