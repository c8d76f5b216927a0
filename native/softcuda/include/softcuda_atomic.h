// Atomic functions and memory fences. Blocks run concurrently on the workers, while the threads of
// one block run one after another. The variants for block, device and system scope behave the same.
#pragma once

#define SOFTCUDA_SCOPES(name, ret, params, args)              \
  static inline ret name##_block params { return name args; } \
  static inline ret name##_system params { return name args; }

#define SOFTCUDA_ATOMIC_INT(T)                                                                   \
  static inline T atomicAdd(T* p, T v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }    \
  static inline T atomicExch(T* p, T v) { return __atomic_exchange_n(p, v, __ATOMIC_RELAXED); }  \
  static inline T atomicAnd(T* p, T v) { return __atomic_fetch_and(p, v, __ATOMIC_RELAXED); }    \
  static inline T atomicOr(T* p, T v) { return __atomic_fetch_or(p, v, __ATOMIC_RELAXED); }      \
  static inline T atomicXor(T* p, T v) { return __atomic_fetch_xor(p, v, __ATOMIC_RELAXED); }    \
  static inline T atomicCAS(T* p, T expected, T v) {                                             \
    __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);     \
    return expected;                                                                             \
  }                                                                                              \
  static inline T atomicMin(T* p, T v) {                                                         \
    T old = __atomic_load_n(p, __ATOMIC_RELAXED);                                                \
    while (v < old &&                                                                            \
           !__atomic_compare_exchange_n(p, &old, v, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) { \
    }                                                                                            \
    return old;                                                                                  \
  }                                                                                              \
  static inline T atomicMax(T* p, T v) {                                                         \
    T old = __atomic_load_n(p, __ATOMIC_RELAXED);                                                \
    while (old < v &&                                                                            \
           !__atomic_compare_exchange_n(p, &old, v, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) { \
    }                                                                                            \
    return old;                                                                                  \
  }                                                                                              \
  SOFTCUDA_SCOPES(atomicAdd, T, (T * p, T v), (p, v))                                            \
  SOFTCUDA_SCOPES(atomicExch, T, (T * p, T v), (p, v))                                           \
  SOFTCUDA_SCOPES(atomicAnd, T, (T * p, T v), (p, v))                                            \
  SOFTCUDA_SCOPES(atomicOr, T, (T * p, T v), (p, v))                                             \
  SOFTCUDA_SCOPES(atomicXor, T, (T * p, T v), (p, v))                                            \
  SOFTCUDA_SCOPES(atomicMin, T, (T * p, T v), (p, v))                                            \
  SOFTCUDA_SCOPES(atomicMax, T, (T * p, T v), (p, v))                                            \
  SOFTCUDA_SCOPES(atomicCAS, T, (T * p, T expected, T v), (p, expected, v))

SOFTCUDA_ATOMIC_INT(int)
SOFTCUDA_ATOMIC_INT(unsigned int)
SOFTCUDA_ATOMIC_INT(long long)
SOFTCUDA_ATOMIC_INT(unsigned long long)
#undef SOFTCUDA_ATOMIC_INT

template <class T>
static inline T softcuda_atomic_sub(T* p, T v) {
  return __atomic_fetch_sub(p, v, __ATOMIC_RELAXED);
}
static inline int atomicSub(int* p, int v) { return softcuda_atomic_sub(p, v); }
static inline unsigned atomicSub(unsigned* p, unsigned v) { return softcuda_atomic_sub(p, v); }
static inline unsigned atomicInc(unsigned* p, unsigned limit) {
  unsigned old = __atomic_load_n(p, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(p, &old, old >= limit ? 0u : old + 1u, true, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED)) {
  }
  return old;
}

// Floating-point addition by compare-and-swap on the bits.
template <class F, class Bits>
static inline F softcuda_atomic_add_bits(F* p, F v) {
  Bits* word = reinterpret_cast<Bits*>(p);
  Bits old = __atomic_load_n(word, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(word, &old,
                                      softcuda_bit_cast<Bits>(softcuda_bit_cast<F>(old) + v), true,
                                      __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return softcuda_bit_cast<F>(old);
}
static inline float atomicAdd(float* p, float v) {
  return softcuda_atomic_add_bits<float, unsigned>(p, v);
}
static inline double atomicAdd(double* p, double v) {
  return softcuda_atomic_add_bits<double, unsigned long long>(p, v);
}
static inline float atomicExch(float* p, float v) {
  return __uint_as_float(
      __atomic_exchange_n(reinterpret_cast<unsigned*>(p), __float_as_uint(v), __ATOMIC_RELAXED));
}
SOFTCUDA_SCOPES(atomicAdd, float, (float* p, float v), (p, v))
SOFTCUDA_SCOPES(atomicAdd, double, (double* p, double v), (p, v))
SOFTCUDA_SCOPES(atomicExch, float, (float* p, float v), (p, v))
#undef SOFTCUDA_SCOPES

static inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
