// When host functions were entered and when they returned: the latency tool's clock on the driver's
// side of the function pointer.
#include <algorithm>

#include "scheduler.h"

namespace softcuda {
namespace {
constexpr size_t kHops = 128;
struct Hop {
  uint64_t entered, returned;
};
std::mutex g_mutex;
Hop g_hops[kHops];
size_t g_recorded = 0;
}  // namespace

void record_hop(uint64_t entered, uint64_t returned) {
  std::lock_guard<std::mutex> lock(g_mutex);
  g_hops[g_recorded++ % kHops] = {entered, returned};
}

}  // namespace softcuda

using namespace softcuda;

// Copies (entered, returned) of the last `n` host functions, oldest first, in nanoseconds of
// CLOCK_MONOTONIC; returns how many there were. At most 128 are kept.
SC_EXPORT size_t softcuda_hops(uint64_t* out, size_t n) {
  std::lock_guard<std::mutex> lock(g_mutex);
  n = std::min({n, g_recorded, kHops});
  for (size_t i = 0; i < n; ++i) {
    const Hop& hop = g_hops[(g_recorded - n + i) % kHops];
    out[2 * i] = hop.entered;
    out[2 * i + 1] = hop.returned;
  }
  return n;
}

// A host function: writes the time to the uint64 that `data` points at.
SC_EXPORT void softcuda_stamp(void* data) { *static_cast<uint64_t*>(data) = now_ns(); }
