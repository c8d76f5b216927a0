// The device's clock and a gate, for laboratories and timelines.
#include "graft.cuh"

// Writes the time to stamps[index]; one thread.
extern "C" __global__ void stamp_ns(unsigned long long* stamps, int index) {
  stamps[index] = global_timer_ns();
}

// Occupies the device until the host has set a pinned word, or for `limit` ns; one thread.
extern "C" __global__ void hold(const int* word, unsigned long long limit) {
  const unsigned long long begin = global_timer_ns();
  while (*static_cast<const volatile int*>(word) == 0 && global_timer_ns() - begin < limit) {
  }
}
