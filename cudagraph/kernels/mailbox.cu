// The device's side of a mailbox: post a request, and wait for its answer by spinning.
//
// The words are pinned host memory, a cache line each. Requests number themselves in every replay
// by a counter that only the device writes: 1, 2, ... (0 means "none").
#include "graft.cuh"

__device__ __forceinline__ int load_acquire_system(const int* word) {
#ifdef __CUDA_ARCH__
  int value;
  asm volatile("ld.acquire.sys.global.s32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
#else
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
#endif
}

// Leaves the memory system, or the core of the soft device, to whoever writes the answer.
#ifndef __CUDA_ARCH__
extern "C" int sched_yield(void) noexcept;
__device__ __forceinline__ void rest() { sched_yield(); }
#elif __CUDA_ARCH__ >= 700
__device__ __forceinline__ void rest() { __nanosleep(200); }
#else
__device__ __forceinline__ void rest() {}
#endif

__device__ __forceinline__ int next_number(unsigned int* counter) {
  unsigned int number = *counter + 1u;
  if (number == 0u) number = 1u;
  *counter = number;
  __threadfence_system();
  return static_cast<int>(number);
}

// False when deadline_ns have passed on the device's own clock before `ack` carries the number.
__device__ __forceinline__ bool wait_for(const int* ack, int number,
                                         unsigned long long deadline_ns) {
  const unsigned long long begin = global_timer_ns();
  while (load_acquire_system(ack) != number) {
    if (global_timer_ns() - begin > deadline_ns) return false;
    rest();
  }
  return true;
}

// One thread. Everything that earlier nodes wrote is visible to the host before the request is.
extern "C" __global__ void mailbox_request(unsigned int* counter, int* request) {
  store_release_system(request, next_number(counter));
}

// One thread. Waits until `ack` carries the number of the present request, at most deadline_ns;
// then says in `gave_up` that nobody waits for this answer any more.
extern "C" __global__ void mailbox_wait(const unsigned int* counter, const int* ack, int* gave_up,
                                        unsigned long long deadline_ns) {
  const int number = static_cast<int>(*counter);
  if (!wait_for(ack, number, deadline_ns)) store_release_system(gave_up, number);
}
