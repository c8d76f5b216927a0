// Kernels that read the device's clock and block a stream, for latency measurements and timelines.
#include "graft.cuh"

// Writes the device time in ns to stamps[index]. Launch with one thread.
extern "C" __global__ void stamp_ns(unsigned long long* stamps, int index) {
  stamps[index] = global_timer_ns();
}

// Runs until the host sets a pinned word, but at most `limit` ns. Launch with one thread.
extern "C" __global__ void hold(const int* word, unsigned long long limit) {
  const unsigned long long begin = global_timer_ns();
  while (*static_cast<const volatile int*>(word) == 0 && global_timer_ns() - begin < limit) {
  }
}
