// Helpers of graft's threads: clocks, a spin pause, and short scheduler time slices.
#pragma once

#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cstdint>

namespace graft {

inline std::int64_t clock_ns(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1000000000 + now.tv_nsec;
}

// Returns the time of the clock that Python's time.monotonic_ns() reads.
inline std::int64_t monotonic_ns() { return clock_ns(CLOCK_MONOTONIC); }

// Pauses the core briefly. Called in loops that spin.
inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  __asm__ volatile("yield");
#endif
}

// The Linux kernel's struct sched_attr in its first version. The C library does not declare it.
struct SchedAttributes {
  std::uint32_t size;
  std::uint32_t policy;
  std::uint64_t flags;
  std::int32_t nice;
  std::uint32_t priority;
  std::uint64_t runtime_ns;  // time slice, if the thread has the default policy
  std::uint64_t deadline_ns;
  std::uint64_t period_ns;
};

// Requests the shortest time slice for the calling thread; its share of the core is unchanged.
// Linux 6.12 and later then runs the thread as soon as it wakes up. Without the request, the thread
// may wait until the slice of a busy thread ends, about 3 ms. Older kernels ignore the request.
// Threads with another scheduling policy than the default are not changed.
inline void ask_for_short_slice() {
  constexpr std::uint64_t kShortestNs = 100000;
  constexpr std::uint32_t kOrdinary = 0;
  SchedAttributes attributes{};
  if (syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0) != 0) return;
  if (attributes.policy != kOrdinary) return;
  attributes.size = sizeof attributes;
  attributes.runtime_ns = kShortestNs;
  syscall(SYS_sched_setattr, 0, &attributes, 0);
}

}  // namespace graft
