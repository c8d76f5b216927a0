// Counter-based random numbers: Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random
// numbers: as easy as 1, 2, 3", SC 2011).
//
// Each request has one stream, whose key is its 64-bit seed (low word, high word). Random numbers
// are addressed by counter: (position of the sampled token, purpose | sample index << 8, id div 4,
// round). Of the four words that Philox returns, the random number is word id mod 4. Random numbers
// that belong to no token id use id 0. A random number therefore depends on the request and on what
// is sampled. It does not depend on the other requests of the batch, the batch size of the graph or
// the KV-cache pages.
//
// The last counter word is 0 for purpose NOISE, which samples each position once. For DRAFT, COIN
// and RESIDUAL it is the position of the last token at the beginning of the round. Block
// verification reads all of these numbers before it decides where to stop, so the result is
// correlated with the numbers of later positions; the next round must not use them again.
//
// Every product and sum of exp and log is rounded separately (no contraction), and division is
// IEEE. A GPU, the soft device and NumPy therefore return the same bits and sample the same tokens.
// The loops that use these functions contain no calls and vectorize on the soft device.
#pragma once

#include "graft.cuh"

#ifdef __CUDA_ARCH__
__device__ __forceinline__ float fmul(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float fadd(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float fdiv(float a, float b) { return __fdiv_rn(a, b); }
#else
__device__ __forceinline__ float fmul(float a, float b) { return a * b; }
__device__ __forceinline__ float fadd(float a, float b) { return a + b; }
__device__ __forceinline__ float fdiv(float a, float b) { return a / b; }
#endif

// log 2 = LN2_HIGH + LN2_LOW. LN2_HIGH has 16 significant bits, so its product with an exponent is
// exact.
#define LN2_HIGH 0.693145751953125f
#define LN2_LOW 1.42860682030941723212e-06f

// Returns exp(x) for x <= 0; exactly 0 for x < -87. The result is therefore never subnormal: exp(x)
// is below the smallest normal number only for x < -87.33. The method is range reduction by log 2,
// followed by the Taylor polynomial of degree 7 on |r| <= log(2) / 2.
__device__ __forceinline__ float exp_nonpositive(float x) {
  const float y = x < -87.0f ? -87.0f : x;
  // Adding and subtracting 1.5 * 2^23 rounds to the nearest integer.
  const float n = fadd(fadd(fmul(y, 1.44269504088896341f), 12582912.0f), -12582912.0f);
  const float r = fadd(fadd(y, -fmul(n, LN2_HIGH)), -fmul(n, LN2_LOW));
  float s = 1.98412698e-04f;
  s = fadd(fmul(s, r), 1.38888889e-03f);
  s = fadd(fmul(s, r), 8.33333333e-03f);
  s = fadd(fmul(s, r), 4.16666667e-02f);
  s = fadd(fmul(s, r), 1.66666667e-01f);
  s = fadd(fmul(s, r), 0.5f);
  s = fadd(fadd(fmul(fmul(s, r), r), r), 1.0f);
  const unsigned int scale = static_cast<unsigned int>(static_cast<int>(n)) << 23;
  const float result = __uint_as_float(__float_as_uint(s) + scale);
  return x < -87.0f ? 0.0f : result;
}

// Returns log(1 + f) for -0.2929 < f <= 0.4143, by the series of 2 artanh(f / (2 + f)). The result
// is accurate near f = 0.
__device__ __forceinline__ float log1p_small(float f) {
  const float s = fdiv(f, fadd(2.0f, f));
  const float z = fmul(s, s);
  float t = 1.11111111e-01f;
  t = fadd(fmul(t, z), 1.42857143e-01f);
  t = fadd(fmul(t, z), 2.0e-01f);
  t = fadd(fmul(t, z), 3.33333333e-01f);
  const float twice = fadd(s, s);
  return fadd(twice, fmul(twice, fmul(t, z)));
}

// Returns log(y) for normal y > 0, computed from a mantissa in [sqrt(1/2), sqrt(2)) and an
// exponent.
__device__ __forceinline__ float log_positive(float y) {
  const unsigned int bits = __float_as_uint(y);
  const unsigned int shifted = bits - 0x3f3504f3u;  // sqrt(1/2)
  const int k = static_cast<int>(shifted) >> 23;
  const float m = __uint_as_float(bits - (static_cast<unsigned int>(k) << 23));
  const float n = static_cast<float>(k);
  return fadd(fmul(n, LN2_HIGH), fadd(fmul(n, LN2_LOW), log1p_small(fadd(m, -1.0f))));
}

// Purposes of random numbers. NOISE samples target tokens; coupled drafts are sampled with the same
// numbers. In rejection sampling, the numbers of different purposes must be independent.
#define PURPOSE_NOISE 0u
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

// Address of a random number: the key of the request's Philox stream (`seed`), and the words of the
// counter except for the one that contains the token id.
struct Noise {
  unsigned long long seed;
  int position;
  unsigned int purpose;  // purpose | sample index << 8
  int round = 0;
};

__device__ __forceinline__ Words4 noise_words(const Noise& noise, unsigned int id_group) {
  Words4 counter;
  counter.x[0] = static_cast<unsigned int>(noise.position);
  counter.x[1] = noise.purpose;
  counter.x[2] = id_group;
  counter.x[3] = static_cast<unsigned int>(noise.round);
  return philox4x32_10(counter, static_cast<unsigned int>(noise.seed),
                       static_cast<unsigned int>(noise.seed >> 32));
}

// Returns words.x[id % 4]. A run-time array index would move the words to local memory.
__device__ __forceinline__ unsigned int word_of(const Words4& words, unsigned int id) {
  const unsigned int low = id & 1u ? words.x[1] : words.x[0];
  const unsigned int high = id & 1u ? words.x[3] : words.x[2];
  return id & 2u ? high : low;
}

// Returns the random numbers of ids. A Philox block is computed once for successive calls whose ids
// belong to it.
struct NoiseOfIds {
  const Noise& noise;
  unsigned int group = 0xffffffffu;
  Words4 words = {};

  __device__ __forceinline__ unsigned int operator()(unsigned int id) {
    if ((id >> 2) != group) {
      group = id >> 2;
      words = noise_words(noise, group);
    }
    return word_of(words, id);
  }
};

// Returns a uniform number in [0, 1) from the upper 24 bits of x. Every value is exact in fp32.
__device__ __forceinline__ float uniform24(unsigned int x) {
  return static_cast<float>(x >> 8) * 5.9604644775390625e-08f;
}

// Returns the exponential variate E = -log1p(-v) with v = min((x + 1/2) 2^-32, 1 - 2^-24).
//
// Categorical sampling by the exponential race, argmax(p / E), is equivalent to the Gumbel-max
// trick, argmax(log p + Gumbel), with Gumbel = -log(E). The race needs one logarithm instead of
// three and has relative instead of absolute rounding errors. Both tails have full fp32 accuracy.
// Near v = 0, the series is evaluated in v itself; E is at least 2^-33, so rare tokens can win.
// Near v = 1, the complement 1 - v is computed from the integer ~x; E is at most 24 log 2.
__device__ __forceinline__ float exponential(unsigned int x) {
  const float v = fmul(fadd(static_cast<float>(x), 0.5f), 2.3283064365386963e-10f);
  if (v < 0.29289f) return -log1p_small(-v);
  float complement = fmul(fadd(static_cast<float>(~x), 0.5f), 2.3283064365386963e-10f);
  if (complement < 5.9604644775390625e-08f) complement = 5.9604644775390625e-08f;
  return -log_positive(complement);
}
