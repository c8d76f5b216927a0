// Sampling from one row of logits: legal tokens, argmax, filtered distribution, categorical
// sampling.
//
// Filters are applied in the order vocabulary bound, mask, temperature, top-k, top-p, min-p,
// renormalization. Ties go to the smaller id. A logit of -inf makes a token illegal like a mask
// bit. NaN and +inf fail the row if the token is legal; the logits of illegal tokens have no
// effect.
//
// SAMPLE_BLOCK, the number of threads per block, is set when the kernel is compiled: large on a
// GPU, 1 on the soft device, where a barrier costs more than the work that it separates. Several
// blocks (gridDim.y) may share a row, each with a slice of its columns; the last block to finish
// does the work that needs the whole row. Results depend neither on the number of threads nor on
// the number of blocks, because sums are integers, and of equal maxima the one with the smaller
// column is taken.
//
// Element i of a slice belongs to thread i mod SAMPLE_BLOCK. A thread needs no barrier between two
// passes over its own elements.
#pragma once

#include "philox.cuh"

#ifdef __SOFTCUDA__
// With this option, the compiler of the soft device takes 2/3 of the time that it takes with -O3,
// and the kernels run equally fast.
#pragma softcuda quick
#endif

#ifndef SAMPLE_BLOCK
#define SAMPLE_BLOCK 512
#endif

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int BLOCK = SAMPLE_BLOCK;
constexpr int LANES = BLOCK < 32 ? BLOCK : 32;  // threads per 32-bit mask word
constexpr int WARPS = BLOCK / LANES;
// Minimum number of resident blocks per multiprocessor (__launch_bounds__) of the kernels that
// sample. The compiler limits their registers accordingly.
constexpr int RESIDENT = BLOCK <= 512 ? 2 : 1;
static_assert(BLOCK == 1 || BLOCK % 32 == 0, "SAMPLE_BLOCK is 1 or a multiple of 32");

// SPANS is the number of histogram bins, which are called spans. A span contains the columns of a
// row whose logits are about equally far below the row's best logit. COUNTS is the size of a
// Histogram<SPANS> in 32-bit words.
#define SPANS 1024
#define COUNTS 3072

// Global memory through which the blocks that share a row exchange results. It must be zero before
// the first step for the row (STEP_BEST of row_sample), and the last step resets it to zero.
struct CrossBlockScratch {
  unsigned long long best;  // packed, see row_best
  unsigned long long sum;
  unsigned long long race;  // packed, see draw_packed
  unsigned long long floor;
  int end;
  unsigned int arrived;
  unsigned int spans[COUNTS];  // memory of a Histogram<SPANS>
};

// For each bin, the number of its columns (members) and the sum of their weights in fixed point
// (mass). Masses are stored in two halves, because GPUs have no 64-bit atomic addition in shared
// memory.
template <int N>
struct Histogram {
  u32 low[N];
  u32 high[N];
  u32 members[N];

  template <bool CONCURRENT>
  __device__ __forceinline__ void add(int bin, u64 more, u32 count) {
    const u32 part = static_cast<u32>(more);
    if (CONCURRENT) {
      const u32 carry = atomicAdd(&low[bin], part) + part < part;
      atomicAdd(&high[bin], static_cast<u32>(more >> 32) + carry);
      atomicAdd(&members[bin], count);
    } else {
      set(bin, mass(bin) + more, members[bin] + count);
    }
  }

  __device__ __forceinline__ void set(int bin, u64 mass, u32 count) {
    low[bin] = static_cast<u32>(mass);
    high[bin] = static_cast<u32>(mass >> 32);
    members[bin] = count;
  }

  __device__ __forceinline__ u64 mass(int bin) const {
    return static_cast<u64>(high[bin]) << 32 | low[bin];
  }

  template <bool WEIGHTED>
  __device__ __forceinline__ u64 count(int bin) const {
    return WEIGHTED ? mass(bin) : members[bin];
  }

  __device__ __forceinline__ void clear() {
    for (int b = static_cast<int>(threadIdx.x); b < N; b += BLOCK) set(b, 0, 0);
  }
};

// Number of columns that a thread loads before it uses the first one. On a GPU, the latencies of
// these loads overlap.
constexpr int LOADED = BLOCK > 1 ? 8 : 1;

constexpr int BINS = 256;     // values of a radix digit
constexpr int LISTED = 2048;  // maximum number of columns of a span to list in shared memory

struct Scratch {
  u64 partial[BLOCK];
  u64 group[LANES];
  u64 sums[SPANS / 32];
  u64 need;
  int token;
  u32 listed;
  Histogram<SPANS> spans;
  Histogram<BINS> digits;
  int columns[LISTED];
};

__device__ __forceinline__ void block_sync() {
  if (BLOCK > 1) __syncthreads();
}

// Returns whether this block is the last one of its row to call this function. The last block sees
// the writes of all other blocks of the row.
__device__ __forceinline__ bool is_last(CrossBlockScratch& cross_block, Scratch& scratch,
                                        unsigned int blocks = gridDim.y) {
  block_sync();
  if (blocks == 1) return true;
  if (threadIdx.x == 0) {
    __threadfence();
    scratch.token = atomicInc(&cross_block.arrived, blocks - 1) == blocks - 1;
    __threadfence();
  }
  block_sync();
  return scratch.token != 0;
}

struct Slice {
  int begin;
  int end;
};

// Returns the columns of a row that this block processes, in whole mask words of 32 columns.
__device__ __forceinline__ Slice own_slice(int size) {
  const int parts = static_cast<int>(gridDim.y);
  const int most = ((size + 31) / 32 + parts - 1) / parts * 32;
  const int begin = static_cast<int>(blockIdx.y) * most;
  return {begin < size ? begin : size, size - begin < most ? size : begin + most};
}

struct Max {
  __device__ __forceinline__ u64 operator()(u64 a, u64 b) const { return a > b ? a : b; }
};

struct Sum {
  __device__ __forceinline__ u64 operator()(u64 a, u64 b) const { return a + b; }
};

// Combines one value of every thread with `op` and returns the result to all threads. When a thread
// returns, other threads may still read `scratch.group`. The next call is safe nevertheless,
// because its first barrier comes before its writes to `scratch.group`.
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
#define ROW_RELAXED 4  // as ROW_OK, but relaxed acceptance has replaced the sampled token

#define KEY_POSITIVE_INFINITY 0x7f800000
#define KEY_NEGATIVE_INFINITY static_cast<int>(0x807fffffu)

struct Row {
  const float* logits;  // [size]
  int size;             // columns, < 2^24
  const u32* mask;      // bitmask by target id; null: unconstrained
  int token_limit;      // target ids at or above it are illegal
  const int* map;       // target id of each column; null: identity
};

struct Filter {
  float temperature;
  int top_k;    // 0: disabled
  float top_p;  // 1: disabled
  float min_p;  // 0: disabled
};

// Returns an integer for x, such that greater floats have greater integers. NaN is greater than
// +inf, and both zeros are equal.
__device__ __forceinline__ int order_key(float x) {
  const u32 bits = __float_as_uint(x + 0.0f);
  const int key = static_cast<int>(bits ^ ((bits >> 31) ? 0x7fffffffu : 0u));
  return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffffff : key;
}

// Returns the mask bits of the 32 columns from `base` on. If `row.map` maps columns to target ids,
// the result is all ones, and legal() reads the mask bit of each column.
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

// Packs a column with the order_key of its value. The result is greater for a greater key and, if
// the keys are equal, for a smaller column.
__device__ __forceinline__ u64 pack_key(int key, int column) {
  return (static_cast<u64>(static_cast<u32>(key) ^ 0x80000000u) << 32) |
         (0xffffffffu - static_cast<u32>(column));
}

// Returns the best legal column of the calling thread in a slice, packed by pack_key; 0 if it has
// none. With STORE, also sets work[i] to the logit, or to -inf for illegal columns.
template <bool MAPPED, bool STORE>
__device__ __forceinline__ u64 own_best(const Row& row, const Slice& own, float* work) {
  const float minus_infinity = __uint_as_float(0xff800000u);
  int best = KEY_NEGATIVE_INFINITY;
  int best_column = -1;
  for (int first = own.begin + static_cast<int>(threadIdx.x); first < own.end;
       first += BLOCK * LOADED) {
    bool ok[LOADED];
    float logits[LOADED];
#pragma unroll
    for (int k = 0; k < LOADED; ++k) {
      const int i = first + k * BLOCK;
      ok[k] = i < own.end && legal<MAPPED>(row, legal_word<MAPPED>(row, i & ~31), i);
    }
#pragma unroll
    for (int k = 0; k < LOADED; ++k) {
      logits[k] = ok[k] ? row.logits[first + k * BLOCK] : minus_infinity;
    }
#pragma unroll
    for (int k = 0; k < LOADED; ++k) {
      const int i = first + k * BLOCK;
      if (STORE && i < own.end) work[i] = logits[k];
      const int key = order_key(logits[k]);
      if (key <= best) continue;
      best = key;
      best_column = i;
    }
  }
  return best_column < 0 ? 0 : pack_key(best, best_column);
}

// Returns the same as own_best, for blocks with a single thread. The loop over the columns of a
// mask word vectorizes on the soft device.
template <bool MAPPED, bool STORE>
__device__ __forceinline__ u64 only_best(const Row& row, const Slice& own, float* work) {
  const float minus_infinity = __uint_as_float(0xff800000u);
  int best = KEY_NEGATIVE_INFINITY;
  int best_base = -1;
  for (int base = own.begin; base < own.end; base += 32) {
    const u32 word = legal_word<MAPPED>(row, base);
    const int count = row.size - base < 32 ? row.size - base : 32;
    if (word == 0u) {
      for (int l = 0; STORE && l < count; ++l) work[base + l] = minus_infinity;
      continue;
    }
    int chunk = KEY_NEGATIVE_INFINITY;
    const float* logits = row.logits + base;
    const auto scan = [&](int end) {
      for (int l = 0; l < end; ++l) {
        const bool ok = legal<MAPPED>(row, word, base + l);
        const int key = ok ? order_key(logits[l]) : KEY_NEGATIVE_INFINITY;
        chunk = key > chunk ? key : chunk;
        if (STORE) work[base + l] = ok ? logits[l] : minus_infinity;
      }
    };
    if (count == 32) {
      scan(32);  // a constant trip count lets the soft device's compiler vectorize
    } else {
      scan(count);
    }
    if (chunk > best) {
      best = chunk;
      best_base = base;
    }
  }
  if (best_base < 0) return 0;
  const u32 word = legal_word<MAPPED>(row, best_base);
  int column = best_base;
  while (!legal<MAPPED>(row, word, column) || order_key(row.logits[column]) != best) ++column;
  return pack_key(best, column);
}

// Returns the best legal column of a slice, packed for `read_best`. With STORE, also sets work[i]
// to the logit, or to -inf for illegal columns.
template <bool MAPPED, bool STORE>
__device__ __forceinline__ u64 row_best(const Row& row, const Slice& own, float* work,
                                        Scratch& scratch) {
  const u64 best = BLOCK > 1 ? own_best<MAPPED, STORE>(row, own, work)
                             : only_best<MAPPED, STORE>(row, own, work);
  return block_reduce(best, scratch, Max());
}

// Unpacks the maximum of the values that row_best returned for the slices of a row: the best column
// and its logit. Returns ROW_OK, ROW_NO_TOKEN or ROW_BAD_LOGIT.
__device__ __forceinline__ int read_best(const Row& row, u64 packed, int* column, float* logit) {
  if (packed == 0) return ROW_NO_TOKEN;
  const int key = static_cast<int>(static_cast<u32>(packed >> 32) ^ 0x80000000u);
  if (key >= KEY_POSITIVE_INFINITY) return ROW_BAD_LOGIT;
  *column = static_cast<int>(0xffffffffu - static_cast<u32>(packed));
  *logit = row.logits[*column] + 0.0f;
  return ROW_OK;
}

// Converts a weight in [0, 1] to an integer in units of 2^-45, so that sums are exact. The sum of
// 2^17 weights is below 2^63.
__device__ __forceinline__ u64 fixed_point(float weight) {
  return static_cast<u64>(static_cast<long long>(weight * 35184372088832.0f));
}

__device__ __forceinline__ float from_fixed_point(u64 sum) {
  return fmul(static_cast<float>(sum), 2.8421709430404007e-14f);
}

// Returns an integer that orders columns by logit: 32 bits of order_key and 24 bits of the
// complemented column. It is greater for a greater logit and, for equal logits, for a smaller
// column.
__device__ __forceinline__ u64 rank_key(float logit, int column) {
  const u32 key = static_cast<u32>(order_key(logit)) ^ 0x80000000u;
  return (static_cast<u64>(key) << 24) | static_cast<u64>(0xffffffu - static_cast<u32>(column));
}

// Computes the weights of the columns of a row, exp((logit - best logit) / temperature), and the
// span (histogram bin, see SPANS) to which a column belongs. A column with a higher logit is in the
// same or an earlier span. Columns of weight 0 are in no span.
struct Weights {
  const Row& row;
  const Filter& filter;
  float best;
  float inverse_temperature;
  float* work;

  __device__ __forceinline__ bool cuts() const {
    return (filter.top_k > 0 && filter.top_k < row.size) || filter.top_p < 1.0f;
  }

  // Returns the span (histogram bin, see SPANS) of a column with this logit, which must have a
  // positive weight. The result is less than SPANS, because no positive weight is below exp(-87).
  __device__ __forceinline__ int span(float logit) const {
    return static_cast<int>(fmul(fmul(fadd(best, -logit), inverse_temperature), 11.5f));
  }

  // Returns the minimum weight of the columns that min_p keeps. The weight of the best token is
  // exactly 1, so min_p itself is the bound.
  __device__ __forceinline__ float min_weight() const {
    return filter.min_p < 1.0f ? filter.min_p : 1.0f;
  }

  // Calls visit(column, weight, logit) for each column of a slice that has a positive weight. The
  // columns are divided among the threads of the block.
  template <class Visit>
  __device__ __forceinline__ void for_each(const Slice& slice, Visit visit) const {
    for (int base = slice.begin + static_cast<int>(threadIdx.x); base < slice.end;
         base += BLOCK * LOADED) {
      float weights[LOADED];
      float logits[LOADED];
#pragma unroll
      for (int k = 0; k < LOADED; ++k) {
        const int i = base + k * BLOCK;
        weights[k] = i < slice.end ? work[i] : 0.0f;
        logits[k] = i < slice.end ? row.logits[i] : 0.0f;
      }
#pragma unroll
      for (int k = 0; k < LOADED; ++k) {
        if (weights[k] > 0.0f) visit(base + k * BLOCK, weights[k], logits[k]);
      }
    }
  }

  // Sets to 0 the weights of a slice that are below the bound of min_p.
  __device__ __forceinline__ void apply_min_p(const Slice& own) const {
    const float least = min_weight();
    if (!(least > 0.0f)) return;
    for (int i = own.begin + static_cast<int>(threadIdx.x); i < own.end; i += BLOCK) {
      work[i] = work[i] < least ? 0.0f : work[i];
    }
  }
};

// Columns that top-k and top-p keep: all columns of the spans (histogram bins, see SPANS) before
// the last one, and the columns of the last span whose rank_key() is at least `floor`.
struct Cut {
  int end;    // index of the last span, plus 1
  u64 floor;  // smallest kept rank in the last span
  u64 sum;    // total weight of the kept columns

  __device__ __forceinline__ bool keeps(const Weights& w, int column, float logit) const {
    const int span = w.span(logit);
    return span + 1 < end || (span + 1 == end && rank_key(logit, column) >= floor);
  }
};

// Replaces the logits of a slice, which row_best has stored in `w.work`, by their weights. If top-k
// or top-p applies, adds the weights to the histogram scratch.spans and returns 0; otherwise
// returns their sum.
__device__ __forceinline__ u64 row_weigh(const Weights& w, const Slice& own, Scratch& scratch) {
  const int begin = own.begin + static_cast<int>(threadIdx.x);
  float* work = w.work;
  for (int i = begin; i < own.end; i += BLOCK) {
    work[i] = exp_nonpositive(fmul(fadd(work[i], -w.best), w.inverse_temperature));
  }
  u64 sum = 0;
  if (!w.cuts()) {
    w.apply_min_p(own);
    for (int i = begin; i < own.end; i += BLOCK) sum += fixed_point(work[i]);
    return block_reduce(sum, scratch, Sum());
  }
  scratch.spans.clear();
  block_sync();
  w.for_each(own, [&](int, float weight, float logit) {
    scratch.spans.add<(BLOCK > 1)>(w.span(logit), fixed_point(weight), 1u);
  });
  block_sync();
  return 0;
}

// Returns the first of `end` bins at which the cumulative number of columns (with WEIGHTED, the
// cumulative mass) reaches `need`, or the last bin if none does. Subtracts the sum over the earlier
// bins from `need`.
template <bool WEIGHTED, int N>
__device__ __forceinline__ int find_bin(const Histogram<N>& bins, int end, u64* need,
                                        Scratch& scratch) {
  for (int g = static_cast<int>(threadIdx.x); g * 32 < end; g += BLOCK) {
    u64 sum = 0;
    for (int b = g * 32; b < end && b < g * 32 + 32; ++b) sum += bins.template count<WEIGHTED>(b);
    scratch.sums[g] = sum;
  }
  block_sync();
  if (threadIdx.x == 0) {
    u64 left = *need;
    int bin = 0;
    while (bin + 32 < end && scratch.sums[bin / 32] < left) {
      left -= scratch.sums[bin / 32];
      bin += 32;
    }
    for (; bin + 1 < end && bins.template count<WEIGHTED>(bin) < left; ++bin) {
      left -= bins.template count<WEIGHTED>(bin);
    }
    scratch.need = left;
    scratch.token = bin;
  }
  block_sync();
  *need = scratch.need;
  return scratch.token;
}

// Reduces `cut` (the set of kept columns) to the smallest set of best-ranked columns that reaches
// `need`, which is a number of columns (top-k) or, with WEIGHTED, a sum of fixed-point weights
// (top-p). The histogram scratch.spans, whose bins are called spans, shows in which span the
// boundary of the set lies. Within this span, a radix select by rank finds the boundary, eight bits
// per pass.
template <bool WEIGHTED>
__device__ __forceinline__ void narrow(Cut& cut, const Weights& w, u64 need, Scratch& scratch) {
  const int tid = static_cast<int>(threadIdx.x);
  const int span = find_bin<WEIGHTED>(scratch.spans, cut.end, &need, scratch);
  if (span + 1 < cut.end) cut.floor = 0;
  cut.end = span + 1;
  if (scratch.spans.count<WEIGHTED>(span) <= need) return;
  const auto is_here = [&](int i, float logit) {
    return w.span(logit) == span && rank_key(logit, i) >= cut.floor;
  };
  const bool fits = scratch.spans.members[span] <= LISTED;
  if (tid == 0) scratch.listed = 0;
  block_sync();
  if (fits) {
    w.for_each({0, w.row.size}, [&](int i, float, float logit) {
      if (is_here(i, logit)) scratch.columns[atomicAdd(&scratch.listed, 1u)] = i;
    });
  }
  block_sync();
  const int count = fits ? static_cast<int>(scratch.listed) : w.row.size;
  const auto each = [&](auto visit) {
    for (int c = tid; c < count; c += BLOCK) {
      const int i = fits ? scratch.columns[c] : c;
      const float logit = w.row.logits[i];
      if (fits || (w.work[i] > 0.0f && is_here(i, logit))) visit(w.work[i], rank_key(logit, i));
    }
  };
  u64 prefix = 0;
  bool done = false;
  for (int shift = 48; shift >= 0 && !done; shift -= 8) {
    scratch.digits.clear();
    block_sync();
    each([&](float weight, u64 rank) {
      if ((rank >> shift) >> 8 != (prefix >> shift) >> 8) return;
      const int digit = static_cast<int>(rank >> shift & 255u);
      scratch.digits.add<(BLOCK > 1)>(BINS - 1 - digit, fixed_point(weight), 1u);
    });
    block_sync();
    const int bin = find_bin<WEIGHTED>(scratch.digits, BINS, &need, scratch);
    prefix |= static_cast<u64>(BINS - 1 - bin) << shift;
    // No further pass over the columns is needed if the filter keeps all columns of the bin or the
    // bin has a single column.
    done = scratch.digits.count<WEIGHTED>(bin) <= need || scratch.digits.members[bin] <= 1u;
    block_sync();
  }
  cut.floor = prefix > cut.floor ? prefix : cut.floor;
  u64 mass = 0;
  each([&](float weight, u64 rank) { mass += rank >= cut.floor ? fixed_point(weight) : 0; });
  mass = block_reduce(mass, scratch, Sum());
  if (tid == 0) scratch.spans.set(span, mass, scratch.spans.members[span]);
  block_sync();
}

// Computes the cut, which is the set of columns that top-k, top-p and min-p keep, from the
// histogram scratch.spans. Runs in one block.
__device__ __forceinline__ Cut row_cut(const Weights& w, Scratch& scratch) {
  const int tid = static_cast<int>(threadIdx.x);
  Cut cut = {SPANS, 0, 0};
  const auto mass = [&] {
    u64 sum = 0;
    for (int b = tid; b < cut.end; b += BLOCK) sum += scratch.spans.mass(b);
    return block_reduce(sum, scratch, Sum());
  };
  if (w.filter.top_k > 0 && w.filter.top_k < w.row.size) {
    narrow<false>(cut, w, static_cast<u64>(w.filter.top_k), scratch);
  }
  if (w.filter.top_p < 1.0f) {
    const double wanted = static_cast<double>(mass()) * static_cast<double>(w.filter.top_p);
    u64 need = static_cast<u64>(static_cast<long long>(wanted));
    if (need == 0 || static_cast<double>(need) < wanted) ++need;
    narrow<true>(cut, w, need, scratch);
  }
  if (!(w.filter.min_p > 0.0f)) {
    cut.sum = mass();
    return cut;
  }
  const float least = w.min_weight();
  u64 sum = 0;
  w.for_each({0, w.row.size}, [&](int i, float weight, float logit) {
    if (weight < least) {
      w.work[i] = 0.0f;
    } else if (cut.keeps(w, i, logit)) {
      sum += fixed_point(weight);
    }
  });
  cut.sum = block_reduce(sum, scratch, Sum());
  return cut;
}

// Converts the weights of a slice to probabilities; columns outside the cut become 0.
__device__ __forceinline__ void row_normalize(const Weights& w, const Cut& cut, const Slice& own) {
  const int begin = own.begin + static_cast<int>(threadIdx.x);
  if (w.cuts()) {
    w.for_each(own, [&](int i, float, float logit) {
      if (!cut.keeps(w, i, logit)) w.work[i] = 0.0f;
    });
  }
  const float total = from_fixed_point(cut.sum);
  float* work = w.work;
  for (int i = begin; i < own.end; i += BLOCK) work[i] = fdiv(work[i], total);
}

// Calls visit(i) for each column of a slice. A thread visits four neighbouring columns at a time.
// If columns are target ids, one Philox block has the random numbers of all four (NoiseOfIds).
template <class Visit>
__device__ __forceinline__ void for_each_four(const Slice& own, Visit visit) {
  constexpr int STEP = BLOCK > 1 ? 4 : 1;
  for (int first = own.begin + static_cast<int>(threadIdx.x) * STEP; first < own.end;
       first += BLOCK * STEP) {
    const int end = own.end - first < STEP ? own.end : first + STEP;
    for (int i = first; i < end; ++i) visit(i);
  }
}

// Categorical sampling by the exponential race (Gumbel-max): argmax(weight / E) over the vocabulary
// equals argmax(log weight + Gumbel). Random numbers are indexed by TARGET id, so a drafter with
// its own vocabulary and the target use the same number for the same token.
//
// Returns the column of a slice with the greatest weight(i) / E(id of i), packed with this score;
// ties go to the smaller column. The maximum of the results of all slices is the sampled column,
// which `drawn` unpacks. `weight` is a function of the column; the weights need not be normalized.
// All threads take part and receive the result. If other threads have written to the row, a barrier
// is required before the call.
template <class Weight>
__device__ __forceinline__ u64 draw_packed(const Slice& own, const int* map, const Noise& noise,
                                           Scratch& scratch, Weight weight) {
  u64 packed = 0;
  float best = 0.0f;
  NoiseOfIds noise_of = {noise};
  for_each_four(own, [&](int i) {
    const float w = weight(i);
    if (!(w > 0.0f)) return;
    const u32 x = noise_of(static_cast<u32>(map ? map[i] : i));
    // The score is w / E. The variate E = -log(1 - v) is at least v, so w / v is an upper bound of
    // the score. If this bound is below `best`, skip the column without computing the logarithm.
    // The comparison has a margin far greater than the rounding errors, so the column with the
    // highest score is never skipped.
    if (w < best * (static_cast<float>(x) * 2.328e-10f)) return;
    const float score = fdiv(w, exponential(x));
    if (packed != 0 && !(score > best)) return;
    best = score;
    packed = (static_cast<u64>(__float_as_uint(score)) << 32) | (0xffffffffu - static_cast<u32>(i));
  });
  return block_reduce(packed, scratch, Max());
}

// Returns the column from a result of draw_packed; -1 if no weight is positive.
__device__ __forceinline__ int drawn(u64 packed) {
  return packed == 0 ? -1 : static_cast<int>(0xffffffffu - static_cast<u32>(packed));
}

template <class Weight>
__device__ __forceinline__ int draw_column(int size, const int* map, const Noise& noise,
                                           Scratch& scratch, Weight weight) {
  return drawn(draw_packed({0, size}, map, noise, scratch, weight));
}

#define STEP_BEST 0
#define STEP_WEIGH 1
#define STEP_DRAW 2

// Samples from a row in the steps `from` to `to`:
//
//   STEP_BEST   finds the best column.
//   STEP_WEIGH  computes weights, and the columns that the filters keep.
//   STEP_DRAW   writes the filtered distribution to work[0..size), fp32, and samples a column.
//
// Without `filtered`, only the best column is found, and `work` receives the legal logits unless it
// is null. Without `sampled`, no column is sampled.
//
// All blocks of the row run the step `from`, each for its columns. If `to` is a later step, the
// last block to finish `from` runs the later steps alone. If `to` is STEP_DRAW, the last block to
// finish returns ROW_OK, ROW_NO_TOKEN or ROW_BAD_LOGIT; `column` and `work` are then complete. All
// other calls return 0.
__device__ __forceinline__ int row_sample(const Row& row, bool filtered, const Filter& filter,
                                          bool sampled, const Noise& noise, float* work,
                                          CrossBlockScratch& cross_block, int from, int to,
                                          Scratch& scratch, int* column) {
  const bool leader = threadIdx.x == 0;
  Slice own = own_slice(row.size);
  bool alone = gridDim.y == 1;
  if (from == STEP_BEST) {
    const u64 best = row.map ? work ? row_best<true, true>(row, own, work, scratch)
                                    : row_best<true, false>(row, own, work, scratch)
                     : work  ? row_best<false, true>(row, own, work, scratch)
                             : row_best<false, false>(row, own, work, scratch);
    if (leader) atomicMax(&cross_block.best, best);
    if (to == STEP_BEST || !is_last(cross_block, scratch)) return 0;
    alone = true;
    own = {0, row.size};
  }
  float best_logit = 0.0f;
  const int status = read_best(row, cross_block.best, column, &best_logit);
  if (status == ROW_OK && filtered) {
    const Weights w = {row, filter, best_logit, fdiv(1.0f, filter.temperature), work};
    if (from <= STEP_WEIGH) {
      const u64 sum = row_weigh(w, own, scratch);
      Histogram<SPANS>& spans = *reinterpret_cast<Histogram<SPANS>*>(cross_block.spans);
      for (int b = static_cast<int>(threadIdx.x); b < SPANS && w.cuts() && !alone; b += BLOCK) {
        const u32 members = scratch.spans.members[b];
        if (members > 0) spans.add<true>(b, scratch.spans.mass(b), members);
      }
      if (!w.cuts()) {
        if (leader) atomicAdd(&cross_block.sum, sum);
      } else if (alone || is_last(cross_block, scratch)) {
        for (int b = static_cast<int>(threadIdx.x); b < SPANS && !alone; b += BLOCK) {
          scratch.spans.set(b, spans.mass(b), spans.members[b]);
          spans.set(b, 0, 0);
        }
        block_sync();
        const Cut cut = row_cut(w, scratch);
        if (leader) {
          cross_block.end = cut.end;
          cross_block.floor = cut.floor;
          cross_block.sum = cut.sum;
        }
      }
      block_sync();
    }
    if (to == STEP_WEIGH) return 0;
    row_normalize(w, {cross_block.end, cross_block.floor, cross_block.sum}, own);
    block_sync();
    if (sampled) {
      const u64 race = draw_packed(own, row.map, noise, scratch, [work](int i) { return work[i]; });
      if (leader) atomicMax(&cross_block.race, race);
    }
  }
  if (to == STEP_WEIGH || !(alone || is_last(cross_block, scratch))) return 0;
  block_sync();
  if (status == ROW_OK && filtered && sampled) *column = drawn(cross_block.race);
  block_sync();
  if (leader)
    cross_block.best = cross_block.sum = cross_block.race = cross_block.floor = cross_block.end = 0;
  return status;
}

// Called in place of row_sample, with the same steps `from` to `to`, by a block whose row needs no
// sampling or is not ready. Returns true in the last block of the row to finish STEP_DRAW.
//
// Each block reads the answer of the grammar from host memory separately. If the answer arrives
// late, some blocks of a row may see it and call row_sample while others call skip_row. skip_row
// therefore stores an invalid best column, so that row_sample returns ROW_BAD_LOGIT in this case.
__device__ __forceinline__ bool skip_row(CrossBlockScratch& cross_block, int from, int to,
                                         Scratch& scratch) {
  const bool leader = threadIdx.x == 0;
  if (leader && from == STEP_BEST) atomicMax(&cross_block.best, ~0ull);
  if (to != STEP_DRAW || !is_last(cross_block, scratch)) return false;
  if (leader) cross_block.best = 0;
  return true;
}

// Returns the column of a target id in a drafter's vocabulary; -1 if the drafter has no column for
// the id.
__device__ __forceinline__ int column_of(const int* t2d, int draft_vocab, int id) {
  return t2d ? t2d[id] : id < draft_vocab ? id : -1;
}

// Unnormalized residual distribution of a rejected draft, by target id: weight * p - q. Negative
// values count as 0.
struct Residual {
  float weight;
  const float* p;
  const float* q;  // draft distribution by drafter column; null: a point mass at `draft`
  int draft;
  const int* t2d;
  int draft_vocab;

  __device__ __forceinline__ float operator()(int id) const {
    if (!(p[id] > 0.0f) || (!q && id == draft)) return 0.0f;
    const float mass = fmul(weight, p[id]);
    const int column = q ? column_of(t2d, draft_vocab, id) : -1;
    return column < 0 ? mass : fadd(mass, -q[column]);
  }
};
