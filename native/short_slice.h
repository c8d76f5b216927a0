// A short time slice for threads that somebody waits for.
//
// Linux (6.12 and later) lets a waking thread that asked for a shorter slice than the running one
// go first. Without it, such a thread can wait for a busy thread's whole slice of about 3 ms on a
// machine with more runnable threads than cores. The thread's share of the processor is unchanged.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace graft {

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

// Asks for the shortest slice there is, for the calling thread. It is a wish: kernels that know no
// slices ignore it, and a thread with a policy of its own keeps that.
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
