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

// The smallest step of the device's clock that was seen in `count` steps, in ns; one thread.
extern "C" __global__ void clock_tick_ns(unsigned long long* smallest, int count) {
  unsigned long long least = ~0ull, last = global_timer_ns();
  for (int i = 0; i < count; ++i) {
    unsigned long long now = last;
    while (now == last) now = global_timer_ns();
    if (now - last < least) least = now - last;
    last = now;
  }
  smallest[0] = least;
}

// Work that takes the longer the less of the device it gets; `out` has gridDim * blockDim floats.
extern "C" __global__ void churn(float* out, int rounds) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  float x = 0.5f + 1e-6f * static_cast<float>(i);
  for (int k = 0; k < rounds; ++k) x = fmaf(x, 1.0f - x, 0.25f);
  out[i] = x;
}

// Occupies the device until the host has set a pinned word, or for `limit` ns; one thread.
extern "C" __global__ void hold(const int* word, unsigned long long limit) {
  const unsigned long long begin = global_timer_ns();
  while (*static_cast<const volatile int*>(word) == 0 && global_timer_ns() - begin < limit) {
  }
}
