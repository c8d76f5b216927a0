// Loops over the lanes of a warp. The handlers, the functions that execute PTX instructions, use
// them to compute (INVARIANTS.md P2, P3).
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "builder.h"

// A loop over the lanes. The pragma lets the compiler vectorize it. This is safe because two
// operands are the same register or do not overlap (INVARIANTS.md P2).
#define SC_LANES _Pragma("GCC ivdep") for (unsigned i = 0; i < kLanes; ++i)

namespace softcuda {
namespace ptx {

template <class T>
inline T* dst_lanes(Warp& w, int32_t o) {
  return static_cast<T*>(__builtin_assume_aligned(w.regs + o, 64));
}
template <class T>
inline const T* src_lanes(const Warp& w, int32_t o) {
  const char* base = (o & kConstant) != 0 ? w.constants : w.regs;
  return static_cast<const T*>(__builtin_assume_aligned(base + (o & ~3), 64));
}

// Stores f(i) for the active lanes i.
template <class T, class F>
inline __attribute__((always_inline)) void store_lanes(Warp& w, int32_t o, F f) {
  if (o < 0) return;
  T* d = dst_lanes<T>(w, o);
  if (w.mask == kAllLanes) {
    SC_LANES d[i] = f(i);
    return;
  }
  alignas(64) T t[kLanes];
  SC_LANES t[i] = f(i);
  const uint32_t mask = w.mask;
  SC_LANES d[i] = (mask >> i & 1) != 0 ? t[i] : d[i];
}

// Returns the bit mask of the lanes for which f(i) is true.
template <class F>
inline __attribute__((always_inline)) uint32_t lane_mask(F f) {
  uint32_t m = 0;
  SC_LANES m |= f(i) ? uint32_t{1} << i : 0u;
  return m;
}

inline uint32_t pred_of(const Warp& w, int32_t o) {
  const uint32_t* p =
      reinterpret_cast<const uint32_t*>(((o & kConstant) != 0 ? w.constants : w.regs) + (o & ~3));
  return (o & kNegated) != 0 ? ~*p : *p;
}
inline void set_pred(Warp& w, int32_t o, uint32_t value) {
  if (o < 0) return;
  uint32_t* p = reinterpret_cast<uint32_t*>(w.regs + o);
  *p = (*p & ~w.mask) | (value & w.mask);
}

// Returns the active lanes of an instruction whose handler evaluates the guard predicate itself.
inline uint32_t active_lanes(const Warp& w, const Instr* in) {
  return in->guard < 0 ? w.mask : w.mask & pred_of(w, in->guard);
}

template <class To, class From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "sizes differ");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// ---- floating-point modes -----------------------------------------------------------------------
// Workers flush denormals (INVARIANTS.md X10), as instructions with .ftz do. An object of this
// class sets another mode while it exists: denormals are kept, and results are rounded in
// `rounding`.
enum class Rounding : uint8_t { nearest, zero, down, up };
class FloatMode {
 public:
  explicit FloatMode(bool flush, Rounding rounding = Rounding::nearest) {
#if defined(__x86_64__)
    saved_ = _mm_getcsr();
    constexpr unsigned kModes[] = {0, 0x6000, 0x2000, 0x4000};
    set((saved_ & ~0xe040u) | (flush ? 0x8040u : 0u) | kModes[static_cast<unsigned>(rounding)]);
#elif defined(__aarch64__)
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    constexpr unsigned long kModes[] = {0, 3, 2, 1};
    set((saved_ & ~(7ul << 22)) | (flush ? 1ul << 24 : 0ul) |
        kModes[static_cast<unsigned>(rounding)] << 22);
#endif
  }
  ~FloatMode() { set(saved_); }
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
#if defined(__x86_64__)
  static void set(unsigned mode) {
    asm volatile("" ::: "memory");
    _mm_setcsr(mode);
    asm volatile("" ::: "memory");
  }
  unsigned saved_;
#elif defined(__aarch64__)
  static void set(unsigned long mode) { asm volatile("msr fpcr, %0" ::"r"(mode) : "memory"); }
  unsigned long saved_;
#else
  static void set(unsigned) {}
  unsigned saved_ = 0;
#endif
};

// Returns x or, if x is NaN, the NaN that arithmetic instructions return.
inline float canonical(float x) { return x == x ? x : bit_cast<float>(0x7fffffffu); }
inline double canonical(double x) {
  return x == x ? x : bit_cast<double>(uint64_t{0x7fffffffffffffff});
}

// ---- 16-bit floats ------------------------------------------------------------------------------

inline float float_of_bf16(uint16_t h) { return bit_cast<float>(uint32_t{h} << 16); }
inline uint16_t bf16_of_float(float f) {
  const uint32_t u = bit_cast<uint32_t>(f);
  const uint32_t rounded = (u + 0x7fffu + (u >> 16 & 1)) >> 16;
  return static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : rounded);
}
inline float float_of_f16(uint16_t h) {
  // Use integer arithmetic, because the processor may flush denormals.
  const uint32_t sign = uint32_t{h} << 16 & 0x80000000u;
  const uint32_t exponent = h >> 10 & 31u;
  const uint32_t mantissa = h & 0x3ffu;
  const uint32_t normal = (exponent + 112) << 23 | mantissa << 13;
  const uint32_t special = 0x7f800000u | mantissa << 13;
  // A subnormal value is mantissa * 2^-24. The conversion of the integer is exact.
  const float scaled = static_cast<float>(static_cast<int32_t>(mantissa)) * 5.9604644775390625e-8f;
  const uint32_t subnormal = bit_cast<uint32_t>(scaled);
  const uint32_t value = exponent == 0 ? subnormal : exponent == 31 ? special : normal;
  return bit_cast<float>(sign | value);
}
inline uint16_t f16_of_float(float f) {
  const uint32_t u = bit_cast<uint32_t>(f);
  const uint32_t sign = u >> 16 & 0x8000u;
  const uint32_t a = u & 0x7fffffffu;
  // Normal results: rebias and round to nearest even.
  const uint32_t rebased = a - (112u << 23);
  const uint32_t normal = (rebased + 0xfffu + (rebased >> 13 & 1)) >> 13;
  // Subnormal results: adding 0.5 rounds at the bit 2^-24.
  const float magnitude = bit_cast<float>(a);
  const uint32_t subnormal = bit_cast<uint32_t>(magnitude + 0.5f) - 0x3f000000u;
  uint32_t value = a < (113u << 23) ? subnormal : normal;
  value = a >= 0x47800000u ? 0x7c00u : value;
  value = normal >= 0x7c00u && a >= (113u << 23) ? 0x7c00u : value;
  value = a > 0x7f800000u ? 0x7fffu : value;
  return static_cast<uint16_t>((a > 0x7f800000u ? 0u : sign) | value);
}

// Computes a * b + c with one rounding to odd, so that a following rounding to 16 bits is correct.
inline double fma_odd(double a, double b, double c) {
  const double product = a * b;  // exact for 16-bit inputs and for floats
  const double sum = product + c;
  const double bb = sum - product;
  const double error = (product - (sum - bb)) + (c - bb);
  const uint64_t bits = bit_cast<uint64_t>(sum);
  if (error == 0 || (bits & 1) != 0 || !(sum - sum == 0)) return sum;
  return bit_cast<double>((error > 0) == (sum > 0) ? bits + 1 : bits - 1);
}

// Resolves the address of one lane's access in a state space. Returns null after a fault.
char* resolve_address(Warp& w, const Instr* in, Space space, unsigned lane, uint64_t address,
                      unsigned bytes, bool write);

}  // namespace ptx
}  // namespace softcuda
