// Barriers, warp operations, clocks, assert and printf. A barrier or warp operation may suspend the
// running thread and run another thread of the block, which may write memory. SOFTCUDA_FENCE
// therefore prevents the compiler from keeping values of memory in registers across the operation.
#pragma once

#define SOFTCUDA_FENCE() asm volatile("" ::: "memory")

static inline int softcuda_barrier(unsigned op, int predicate) {
  SOFTCUDA_FENCE();
  const int result = softcuda_hook->barrier(&softcuda_self, op, predicate);
  SOFTCUDA_FENCE();
  return result;
}
static inline void __syncthreads() { softcuda_barrier(SOFTCUDA_BARRIER, 0); }
static inline int __syncthreads_count(int p) { return softcuda_barrier(SOFTCUDA_BARRIER_COUNT, p); }
static inline int __syncthreads_and(int p) { return softcuda_barrier(SOFTCUDA_BARRIER_AND, p); }
static inline int __syncthreads_or(int p) { return softcuda_barrier(SOFTCUDA_BARRIER_OR, p); }

static inline unsigned long long softcuda_warp(unsigned op, unsigned mask, unsigned long long value,
                                               unsigned arg, unsigned width) {
  SOFTCUDA_FENCE();
  const unsigned long long result =
      softcuda_hook->warp(&softcuda_self, op, mask, value, arg, width);
  SOFTCUDA_FENCE();
  return result;
}

static inline void __syncwarp(unsigned mask = 0xffffffffu) {
  softcuda_warp(SOFTCUDA_SYNCWARP, mask, 0, 0, 32);
}
static inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return static_cast<unsigned>(softcuda_warp(SOFTCUDA_BALLOT, mask, predicate != 0, 0, 32));
}
static inline int __any_sync(unsigned mask, int predicate) {
  return static_cast<int>(softcuda_warp(SOFTCUDA_ANY, mask, predicate != 0, 0, 32));
}
static inline int __all_sync(unsigned mask, int predicate) {
  return static_cast<int>(softcuda_warp(SOFTCUDA_ALL, mask, predicate != 0, 0, 32));
}
static inline unsigned __activemask() { return softcuda_hook->active_mask(&softcuda_self); }

template <class T>
static inline unsigned long long softcuda_to_word(T value) {
  static_assert(sizeof(T) <= 8, "warp operations exchange at most 8 bytes");
  unsigned long long word = 0;
  __builtin_memcpy(&word, &value, sizeof value);
  return word;
}
template <class T>
static inline T softcuda_from_word(unsigned long long word) {
  T value;
  __builtin_memcpy(&value, &word, sizeof value);
  return value;
}

template <class T>
static inline unsigned __match_any_sync(unsigned mask, T value) {
  return static_cast<unsigned>(
      softcuda_warp(SOFTCUDA_MATCH_ANY, mask, softcuda_to_word(value), 0, 32));
}
template <class T>
static inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
  return softcuda_from_word<T>(softcuda_warp(SOFTCUDA_SHFL_IDX, mask, softcuda_to_word(value),
                                             static_cast<unsigned>(lane), width));
}
template <class T>
static inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  return softcuda_from_word<T>(
      softcuda_warp(SOFTCUDA_SHFL_UP, mask, softcuda_to_word(value), delta, width));
}
template <class T>
static inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  return softcuda_from_word<T>(
      softcuda_warp(SOFTCUDA_SHFL_DOWN, mask, softcuda_to_word(value), delta, width));
}
template <class T>
static inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32) {
  return softcuda_from_word<T>(softcuda_warp(SOFTCUDA_SHFL_XOR, mask, softcuda_to_word(value),
                                             static_cast<unsigned>(lane_mask), width));
}

// Extensions of the soft device, which graft's kernels use: the butterfly reduction of a full warp
// as one operation. The result has the same bits as five __shfl_xor_sync steps with lane masks 16,
// 8, 4, 2 and 1.
static inline float softcuda_warp_sum(float x) {
  return softcuda_from_word<float>(
      softcuda_warp(SOFTCUDA_WARP_SUM, 0xffffffffu, softcuda_to_word(x), 0, 32));
}
static inline float softcuda_warp_max(float x) {
  return softcuda_from_word<float>(
      softcuda_warp(SOFTCUDA_WARP_MAX, 0xffffffffu, softcuda_to_word(x), 0, 32));
}

static inline unsigned long long softcuda_globaltimer() { return softcuda_hook->globaltimer(); }
static inline long long clock64() { return static_cast<long long>(softcuda_hook->globaltimer()); }
static inline int clock() { return static_cast<int>(clock64()); }
static inline void __nanosleep(unsigned ns) {
  const unsigned long long end = softcuda_hook->globaltimer() + ns;
  while (softcuda_hook->globaltimer() < end) SOFTCUDA_FENCE();
}
static inline void __trap() { softcuda_hook->trap(&softcuda_self, 719, "__trap() was called"); }
#ifndef NDEBUG
#define assert(condition) \
  ((condition) ? (void)0  \
               : softcuda_hook->trap(&softcuda_self, 710, "assertion failed: " #condition))
#endif
// The assembler name selects the device's function even if a kernel also includes <stdio.h>.
extern "C" int printf(const char* format, ...) __asm__("softcuda_printf");
