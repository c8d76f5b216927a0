// Counter-based random numbers: Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random
// numbers: as easy as 1, 2, 3", SC 2011).
//
// One stream per request: key = the 64-bit request seed (low word, high word). A draw is named, not
// consumed: counter = (absolute position of the token being decided, purpose | sample index << 8,
// id div 4, 0), and the word used is id mod 4; scalar draws use id 0. So the number a draw sees
// depends on the request and on what is being decided, never on batch, round or draft length.
#pragma once

#include "numeric.cuh"

// NOISE decides the target token (bonus, no speculation) and, in coupled verification, is shared
// with the drafter by design. In rejection sampling every purpose must be independent of the
// others.
#define PURPOSE_NOISE 0u
#define PURPOSE_TARGET 0u
#define PURPOSE_DRAFT 1u
#define PURPOSE_COIN 2u
#define PURPOSE_RESIDUAL 3u

struct Words4 {
  unsigned int x[4];
};

__device__ __forceinline__ Words4 philox4x32_10(Words4 counter, unsigned int key0,
                                                unsigned int key1) {
  Words4 c = counter;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const unsigned long long a = 0xD2511F53ull * c.x[0];
    const unsigned long long b = 0xCD9E8D57ull * c.x[2];
    Words4 next;
    next.x[0] = static_cast<unsigned int>(b >> 32) ^ c.x[1] ^ key0;
    next.x[1] = static_cast<unsigned int>(b);
    next.x[2] = static_cast<unsigned int>(a >> 32) ^ c.x[3] ^ key1;
    next.x[3] = static_cast<unsigned int>(a);
    c = next;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return c;
}

// Everything that names a draw except the token id.
struct Noise {
  unsigned long long seed;
  int position;
  unsigned int purpose;  // purpose | sample index << 8
};

__device__ __forceinline__ Words4 noise_words(const Noise& noise, unsigned int id_group) {
  Words4 counter;
  counter.x[0] = static_cast<unsigned int>(noise.position);
  counter.x[1] = noise.purpose;
  counter.x[2] = id_group;
  counter.x[3] = 0u;
  return philox4x32_10(counter, static_cast<unsigned int>(noise.seed),
                       static_cast<unsigned int>(noise.seed >> 32));
}

// Uniform in [0, 1) from the upper 24 bits: every value is exact in fp32 and 1 is never reached.
__device__ __forceinline__ float uniform24(unsigned int x) {
  return static_cast<float>(x >> 8) * 5.9604644775390625e-08f;
}

// Standard exponential variate E = -log1p(-v), v = min((x + 1/2) 2^-32, 1 - 2^-24).
//
// argmax(log p + Gumbel) with Gumbel = -log(E) is argmax(p / E): the same winner with one logarithm
// instead of three, and with relative instead of absolute rounding. Both tails keep full fp32
// accuracy: near v = 0 the series runs in v itself (E down to 2^-33, so rare tokens can win), near
// v = 1 the complement is taken from the integer (~x), and E never exceeds 24 log 2.
__device__ __forceinline__ float exponential(unsigned int x) {
  const float v = fmul(fadd(static_cast<float>(x), 0.5f), 2.3283064365386963e-10f);
  if (v < 0.29289f) return -log1p_small(-v);
  float complement = fmul(fadd(static_cast<float>(~x), 0.5f), 2.3283064365386963e-10f);
  if (complement < 5.9604644775390625e-08f) complement = 5.9604644775390625e-08f;
  return -log_positive(complement);
}
