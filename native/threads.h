// What graft's own threads ask of the machine: the clocks, a pause, and a short time slice.
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

// The clock of Python's time.monotonic_ns.
inline std::int64_t monotonic_ns() { return clock_ns(CLOCK_MONOTONIC); }

// A short pause inside a spinning loop.
inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  __asm__ volatile("yield");
#endif
}

// The kernel's struct sched_attr, first version; the C library has no name for it.
struct SchedAttributes {
  std::uint32_t size;
  std::uint32_t policy;
  std::uint64_t flags;
  std::int32_t nice;
  std::uint32_t priority;
  std::uint64_t runtime_ns;  // of an ordinary thread: its slice
  std::uint64_t deadline_ns;
  std::uint64_t period_ns;
};

// Asks for the shortest slice there is, for the calling thread, whose share stays the same. Linux
// (6.12 and later) then lets it go first when it wakes up; without it, it can wait for a busy
// thread's whole slice of about 3 ms. It is a wish: kernels that know no slices ignore it, and a
// thread with a policy of its own keeps that.
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
