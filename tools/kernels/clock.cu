// The device's clock, for the latency tool and the deadlock reproducer.
#include "graft.cuh"

// Writes the time to stamps[index]; one thread.
extern "C" __global__ void stamp_ns(unsigned long long* stamps, int index) {
  stamps[index] = global_timer_ns();
}

// Occupies the device for a while; one thread.
extern "C" __global__ void wait_ns(unsigned long long duration) {
  const unsigned long long begin = global_timer_ns();
  while (global_timer_ns() - begin < duration) {
  }
}
