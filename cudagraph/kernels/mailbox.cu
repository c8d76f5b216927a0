// Kernels of a mailbox: one posts a request to a host worker thread, the other spins until the
// worker has answered the request.
//
// `request`, `ack` and `timed_out` are words in pinned host memory, on one cache line each. They
// contain the number of a request: the posted one, the answered one, and one that was not answered
// in time. Requests are numbered 1, 2, ... by `counter`, which only the device writes. 0 means "no
// request".
#include "graft.cuh"

// Pauses between two polls of a word. Without pauses, polling would slow down the thread that
// writes the answer: on a GPU it would load the memory system, and on the soft device it would
// occupy a core.
#ifndef __CUDA_ARCH__
extern "C" int sched_yield(void) noexcept;
__device__ __forceinline__ void pause_polling() { sched_yield(); }
#elif __CUDA_ARCH__ >= 700
__device__ __forceinline__ void pause_polling() { __nanosleep(200); }
#else
__device__ __forceinline__ void pause_polling() {}
#endif

__device__ __forceinline__ int next_number(unsigned int* counter) {
  unsigned int number = *counter + 1u;
  if (number == 0u) number = 1u;
  *counter = number;
  __threadfence_system();
  return static_cast<int>(number);
}

// Polls `ack` until the worker has stored `number`, the number of the awaited request, in it.
// Returns false if this takes more than `deadline_ns` nanoseconds of the device's global timer.
//
// The polls are relaxed, because each acquire load would invalidate the L1 cache, which concurrent
// kernels use. The fence after the last poll gives it acquire order.
__device__ __forceinline__ bool wait_for(const int* ack, int number,
                                         unsigned long long deadline_ns) {
  const unsigned long long begin = global_timer_ns();
  while (load_relaxed_system(ack) != number) {
    if (global_timer_ns() - begin > deadline_ns) return false;
    pause_polling();
  }
  __threadfence_system();
  return true;
}

// Clears the answer to the earlier request, then posts a new request. Launched with one thread. A
// host thread that sees the request also sees the cleared answer and everything that earlier nodes
// wrote.
extern "C" __global__ void mailbox_request(unsigned int* counter, int* request, int* ack) {
  *ack = 0;
  store_release_system(request, next_number(counter));
}

// Waits for the answer to the current request. Launched with one thread. After `deadline_ns` ns it
// stores the number of the request in `timed_out` and ends, so that the graph continues without the
// answer.
extern "C" __global__ void mailbox_wait(const unsigned int* counter, const int* ack, int* timed_out,
                                        unsigned long long deadline_ns) {
  const int number = static_cast<int>(*counter);
  if (!wait_for(ack, number, deadline_ns)) store_release_system(timed_out, number);
}

// Counts a completed launch in a word of pinned memory. Launched with one thread, after all
// mailboxes of the graph.
extern "C" __global__ void mailbox_completed(int* completed) {
  store_release_system(completed, *completed + 1);
}
