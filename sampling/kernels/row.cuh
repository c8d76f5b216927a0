// One row of logits on one block: legality, the best legal token, the filtered distribution, draws.
//
// Order of filters: vocabulary bound, mask, temperature, top-k, top-p, min-p, renormalise. Ties go
// to the smaller id everywhere. Only legal logits are looked at: -inf there forbids the token like
// a mask bit, NaN or +inf means a broken model and fails the row.
//
// SAMPLE_BLOCK (threads of a block) is a compile-time choice of the loader: wide on a GPU, 1 on the
// soft device, where a barrier costs more than the work it separates. Results do not depend on it:
// sums are integers, maxima carry their index, so no order of threads shows in a bit.
//
// Ownership: element i of a row belongs to thread i mod SAMPLE_BLOCK, so passes that only touch own
// elements need no barrier between them.
#pragma once

#include "philox.cuh"

#ifndef SAMPLE_BLOCK
#define SAMPLE_BLOCK 512
#endif

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int BLOCK = SAMPLE_BLOCK;
constexpr int LANES = BLOCK < 32 ? BLOCK : 32;  // threads that share a 32-bit mask word
constexpr int WARPS = BLOCK / LANES;
static_assert(BLOCK == 1 || BLOCK % 32 == 0, "SAMPLE_BLOCK is 1 or a multiple of 32");

constexpr int BINS = 256;
constexpr int STAGED_WORDS = BLOCK == 1 ? 1 : 8192;  // 2^18 token ids in 32 KiB

struct Scratch {
  u32 words[STAGED_WORDS];
  u64 partial[BLOCK];
  u64 group[LANES];
  u64 mass[BINS];
  u32 members[BINS];
  u64 cut;
  u64 need;
  int token;
};

__device__ __forceinline__ void block_sync() {
  if (BLOCK > 1) __syncthreads();
}

struct Max {
  __device__ __forceinline__ u64 operator()(u64 a, u64 b) const { return a > b ? a : b; }
};

struct Sum {
  __device__ __forceinline__ u64 operator()(u64 a, u64 b) const { return a + b; }
};

// Combine one value of every thread; all threads receive the result. Two barriers: the first of the
// next call orders this call's reads of `group` before they are overwritten.
template <class Op>
__device__ __forceinline__ u64 block_reduce(u64 value, Scratch& scratch, Op op) {
  if (BLOCK == 1) return value;
  const int tid = static_cast<int>(threadIdx.x);
  scratch.partial[tid] = value;
  __syncthreads();
  if (tid < LANES) {
    u64 x = scratch.partial[tid];
    for (int i = tid + LANES; i < BLOCK; i += LANES) x = op(x, scratch.partial[i]);
    scratch.group[tid] = x;
  }
  __syncthreads();
  u64 x = scratch.group[0];
  for (int i = 1; i < LANES; ++i) x = op(x, scratch.group[i]);
  return x;
}

#define ROW_OK 1
#define ROW_NO_TOKEN 2
#define ROW_BAD_LOGIT 3

#define KEY_POSITIVE_INFINITY 0x7f800000
#define KEY_NEGATIVE_INFINITY static_cast<int>(0x807fffffu)

struct Row {
  const float* logits;  // [size]
  int size;             // columns, < 2^24
  const u32* mask;      // legality bits by target id, or null: unconstrained
  int token_limit;      // target ids at or above are illegal
  const int* map;       // column -> target id, or null: identity
};

struct Filter {
  float temperature;
  int top_k;    // 0: off
  float top_p;  // 1: off
  float min_p;  // 0: off
};

// Signed integer with the order of floats; NaN of either sign above +inf, both zeros equal.
__device__ __forceinline__ int order_key(float x) {
  const u32 bits = __float_as_uint(x + 0.0f);
  const int key = static_cast<int>(bits ^ ((bits >> 31) ? 0x7fffffffu : 0u));
  return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffffff : key;
}

// A mask row usually lies in pinned host memory: one coalesced read brings it into shared memory,
// where a drafter's vocabulary map may then jump about. Rows that do not fit are read where they
// are.
__device__ __forceinline__ const u32* stage_mask(const u32* mask, int words, Scratch& scratch) {
  if (BLOCK > 1 && words <= STAGED_WORDS) {
    for (int i = static_cast<int>(threadIdx.x); i < words; i += BLOCK) scratch.words[i] = mask[i];
    block_sync();
    return scratch.words;
  }
  return mask;
}

// Legality of the 32 columns from `base` on where columns are target ids (all ones when mapped).
template <bool MAPPED>
__device__ __forceinline__ u32 legal_word(const Row& row, int base) {
  if (MAPPED) return 0xffffffffu;
  if (base >= row.token_limit) return 0u;
  const u32 word = row.mask ? row.mask[base >> 5] : 0xffffffffu;
  const int left = row.token_limit - base;
  return left < 32 ? word & ((1u << left) - 1u) : word;
}

template <bool MAPPED>
__device__ __forceinline__ bool legal(const Row& row, u32 word, int column) {
  if (!MAPPED) return (word >> (column & 31)) & 1u;
  const int id = row.map[column];
  if (id < 0 || id >= row.token_limit) return false;
  return !row.mask || ((row.mask[id >> 5] >> (id & 31)) & 1u);
}

// Best legal column; with STORE also work[i] = logit or -inf. Returns ROW_OK, ROW_NO_TOKEN or
// ROW_BAD_LOGIT to all threads.
template <bool MAPPED, bool STORE>
__device__ __forceinline__ int row_best(const Row& row, float* work, Scratch& scratch,
                                        int* best_column, float* best_logit) {
  const int tid = static_cast<int>(threadIdx.x);
  const int lane = tid % LANES;
  const float minus_infinity = __uint_as_float(0xff800000u);
  int best = KEY_NEGATIVE_INFINITY;
  int best_base = -1;
  for (int base = (tid / LANES) * 32; base < row.size; base += WARPS * 32) {
    const u32 word = legal_word<MAPPED>(row, base);
    const int count = row.size - base < 32 ? row.size - base : 32;
    if (word == 0u) {
      if (STORE) {
        for (int l = lane; l < count; l += LANES) work[base + l] = minus_infinity;
      }
      continue;
    }
    int chunk = KEY_NEGATIVE_INFINITY;
    const float* logits = row.logits + base;
    const auto scan = [&](int end) {
      for (int l = lane; l < end; l += LANES) {
        const bool ok = legal<MAPPED>(row, word, base + l);
        const int key = ok ? order_key(logits[l]) : KEY_NEGATIVE_INFINITY;
        chunk = key > chunk ? key : chunk;
        if (STORE) work[base + l] = ok ? logits[l] : minus_infinity;
      }
    };
    if (count == 32) {
      scan(32);  // a constant, for the soft device's vectoriser
    } else {
      scan(count);
    }
    if (chunk > best) {
      best = chunk;
      best_base = base;
    }
  }
  // The first own column that holds the best key, packed so that ties go to the smaller one.
  u64 packed = 0;
  if (best_base >= 0) {
    const u32 word = legal_word<MAPPED>(row, best_base);
    const int count = row.size - best_base < 32 ? row.size - best_base : 32;
    for (int l = lane; l < count; l += LANES) {
      const int column = best_base + l;
      if (!legal<MAPPED>(row, word, column) || order_key(row.logits[column]) != best) continue;
      packed = (static_cast<u64>(static_cast<u32>(best) ^ 0x80000000u) << 32) |
               (0xffffffffu - static_cast<u32>(column));
      break;
    }
  }
  packed = block_reduce(packed, scratch, Max());
  if (packed == 0) return ROW_NO_TOKEN;
  const int key = static_cast<int>(static_cast<u32>(packed >> 32) ^ 0x80000000u);
  if (key >= KEY_POSITIVE_INFINITY) return ROW_BAD_LOGIT;
  *best_column = static_cast<int>(0xffffffffu - static_cast<u32>(packed));
  *best_logit = row.logits[*best_column] + 0.0f;
  return ROW_OK;
}

// Weights are in [0, 1]; sums are exact integers of 2^-45 (2^17 columns stay below 2^63).
__device__ __forceinline__ u64 fixed_point(float weight) {
  return static_cast<u64>(static_cast<long long>(weight * 35184372088832.0f));
}

__device__ __forceinline__ float from_fixed_point(u64 sum) {
  return fmul(static_cast<float>(sum), 2.8421709430404007e-14f);
}

__device__ __forceinline__ u64 weight_sum(const float* work, int size, Scratch& scratch) {
  u64 sum = 0;
  for (int i = static_cast<int>(threadIdx.x); i < size; i += BLOCK) sum += fixed_point(work[i]);
  return block_reduce(sum, scratch, Sum());
}

// Rank of a column: by logit, ties to the smaller id. 32 bits of key, 24 bits of column.
__device__ __forceinline__ u64 rank_key(const Row& row, int column) {
  const u32 key = static_cast<u32>(order_key(row.logits[column])) ^ 0x80000000u;
  return (static_cast<u64>(key) << 24) | static_cast<u64>(0xffffffu - static_cast<u32>(column));
}

// Keep the smallest set of best-ranked columns whose mass reaches `need`; zero the other weights.
// Mass is the number of columns, or with WEIGHTED their fixed-point weight. Radix select, eight
// bits of the rank a pass, on integers only.
template <bool WEIGHTED>
__device__ __forceinline__ void keep_top(const Row& row, float* work, u64 need, Scratch& scratch) {
  const int tid = static_cast<int>(threadIdx.x);
  u64 prefix = 0;
  for (int shift = 48; shift >= 0; shift -= 8) {
    for (int b = tid; b < BINS; b += BLOCK) {
      scratch.mass[b] = 0;
      scratch.members[b] = 0;
    }
    block_sync();
    for (int i = tid; i < row.size; i += BLOCK) {
      if (!(work[i] > 0.0f)) continue;
      const u64 rank = rank_key(row, i);
      if ((rank >> shift) >> 8 != (prefix >> shift) >> 8) continue;
      const u32 bin = static_cast<u32>(rank >> shift) & 255u;
      const u64 mass = WEIGHTED ? fixed_point(work[i]) : 1u;
      if (BLOCK == 1) {
        scratch.mass[bin] += mass;
        scratch.members[bin] += 1u;
      } else {
        atomicAdd(&scratch.mass[bin], mass);
        atomicAdd(&scratch.members[bin], 1u);
      }
    }
    block_sync();
    if (tid == 0) {
      int bin = BINS - 1;
      u64 left = need;
      while (bin > 0 && scratch.mass[bin] < left) left -= scratch.mass[bin--];
      scratch.need = left;
      scratch.cut = prefix | (static_cast<u64>(bin) << shift);
    }
    block_sync();
    prefix = scratch.cut;
    need = scratch.need;
    const u32 bin = static_cast<u32>(prefix >> shift) & 255u;
    // Done when the whole bin is wanted, when it is one column, or when everything is too little.
    const bool done = scratch.mass[bin] <= need || scratch.members[bin] <= 1u;
    block_sync();
    if (done) break;
  }
  for (int i = tid; i < row.size; i += BLOCK) {
    if (work[i] > 0.0f && rank_key(row, i) < prefix) work[i] = 0.0f;
  }
}

// work[0..size) = the filtered distribution of the row (fp32, zero where a token cannot be chosen).
// The row is complete for all threads on return. temperature must be >= GREEDY_TEMPERATURE.
template <bool MAPPED>
__device__ __forceinline__ int row_distribution(const Row& row, const Filter& filter, float* work,
                                                Scratch& scratch) {
  const int tid = static_cast<int>(threadIdx.x);
  int best_column = 0;
  float best_logit = 0.0f;
  const int status = row_best<MAPPED, true>(row, work, scratch, &best_column, &best_logit);
  if (status != ROW_OK) return status;

  const float inverse_temperature = fdiv(1.0f, filter.temperature);
  for (int i = tid; i < row.size; i += BLOCK) {
    work[i] = exp_nonpositive(fmul(fadd(work[i], -best_logit), inverse_temperature));
  }
  if (filter.top_k > 0 && filter.top_k < row.size) {
    keep_top<false>(row, work, static_cast<u64>(filter.top_k), scratch);
  }
  if (filter.top_p < 1.0f) {
    const double total = static_cast<double>(weight_sum(work, row.size, scratch));
    const double wanted = total * static_cast<double>(filter.top_p);
    u64 need = static_cast<u64>(static_cast<long long>(wanted));
    if (need == 0 || static_cast<double>(need) < wanted) ++need;
    keep_top<true>(row, work, need, scratch);
  }
  if (filter.min_p > 0.0f) {
    // The best token's weight is exactly 1, so min_p relative to it is an absolute bound.
    const float bound = filter.min_p < 1.0f ? filter.min_p : 1.0f;
    for (int i = tid; i < row.size; i += BLOCK) work[i] = work[i] < bound ? 0.0f : work[i];
  }
  const u64 sum = weight_sum(work, row.size, scratch);
  const float total = from_fixed_point(sum);
  for (int i = tid; i < row.size; i += BLOCK) work[i] = fdiv(work[i], total);
  block_sync();
  return ROW_OK;
}

// Categorical draws by the exponential race: argmax(weight / E) over the vocabulary, which is
// argmax(log weight + Gumbel). The noise is indexed by TARGET id, so a drafter with its own
// vocabulary and the target see the same number for the same token.
//
// Column with the largest weight(i) / E(id of i), ties to the smaller column; -1 if no weight is
// positive. `weight` is a callable of the column; weights need no normalisation. All threads call
// it and all receive the result; rows written by other threads need a barrier before.
template <class Weight>
__device__ __forceinline__ int draw_column(int size, const int* map, const Noise& noise,
                                           Scratch& scratch, Weight weight) {
  u64 packed = 0;
  float best = 0.0f;
  u32 cached = 0xffffffffu;
  Words4 words = {};
  // Four neighbouring columns a step: where columns are ids, they share one Philox block.
  for (int first = static_cast<int>(threadIdx.x) * 4; first < size; first += BLOCK * 4) {
    const int end = size - first < 4 ? size : first + 4;
    for (int i = first; i < end; ++i) {
      const float w = weight(i);
      if (!(w > 0.0f)) continue;
      const u32 id = static_cast<u32>(map ? map[i] : i);
      if ((id >> 2) != cached) {
        cached = id >> 2;
        words = noise_words(noise, cached);
      }
      const u32 x = words.x[id & 3u];
      // E >= v, so a token that loses even with v in place of E needs no logarithm. The slack is
      // far above the rounding of either side: no winner is ever skipped.
      if (w < best * (static_cast<float>(x) * 2.328e-10f)) continue;
      const float score = fdiv(w, exponential(x));
      if (packed != 0 && !(score > best)) continue;
      best = score;
      packed =
          (static_cast<u64>(__float_as_uint(score)) << 32) | (0xffffffffu - static_cast<u32>(i));
    }
  }
  packed = block_reduce(packed, scratch, Max());
  return packed == 0 ? -1 : static_cast<int>(0xffffffffu - static_cast<u32>(packed));
}
