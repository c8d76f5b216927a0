// A short time slice of the operating system's scheduler for the threads of the device.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace softcuda {

// Version 0 of Linux's struct sched_attr, which the C library does not declare.
struct SchedAttributes {
  uint32_t size;
  uint32_t policy;
  uint64_t flags;
  int32_t nice;
  uint32_t priority;
  uint64_t runtime_ns;  // time slice of a SCHED_OTHER thread
  uint64_t deadline_ns;
  uint64_t period_ns;
};

// Requests the shortest time slice for the calling thread. Its share of the processor stays the
// same. Linux 6.12 and later then runs the thread soon after it wakes up. With the default time
// slice, the thread may have to wait until another busy thread has used up its slice of about 3 ms.
// Older kernels ignore the request. Threads with a policy other than SCHED_OTHER are left
// unchanged.
inline void request_short_time_slice() {
  constexpr uint64_t kShortestSliceNs = 100000;
  constexpr uint32_t kSchedOther = 0;
  SchedAttributes attributes{};
  if (syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0) != 0) return;
  if (attributes.policy != kSchedOther) return;
  attributes.size = sizeof attributes;
  attributes.runtime_ns = kShortestSliceNs;
  syscall(SYS_sched_setattr, 0, &attributes, 0);
}

}  // namespace softcuda
