// Tensor-core product for many rows. A block computes a tile of OUTPUTS columns x ROW_BLOCK rows
// of the mma operand B from a shared-memory pipeline. With split K (grid z > 1) a block computes
// only some consecutive parts of the sums (linear_mma.cuh).
//
// The weights of the first STAGES - 1 stages are copied before the kernel waits for the previous
// kernel, because no kernel writes weights.
#ifndef ROW_BLOCK
#define ROW_BLOCK 64
#endif
// Tiles of 256 columns halve the traffic of x through the L2 cache.
#ifndef OUTPUTS
#define OUTPUTS 128
#endif
#define WARPS 8
#define GROUP 64
#include "linear_mma.cuh"

// Tiles of 256 rows halve the traffic of the weights through the L2 cache. A thread accumulates 128
// sums of such a tile in registers, one part (linear_mma.cuh) of each dot product at a time. No
// registers are left for the totals over the completed parts, so these totals are in shared memory.
// Inputs must be 16-bit floats.
#define TALL (ROW_BLOCK == 256)
#if TALL && !X16
#error "ROW_BLOCK 256 requires inputs of 16 bits"
#endif
// Inner indices per pipeline stage. Asynchronous copies keep STAGES - 1 stages in flight. Float
// inputs have to be converted and are therefore prefetched to registers, half a stage ahead.
#define STAGE (TALL ? 32 : 64)
#define STAGES (TALL ? 4 : 3 + (ROW_BLOCK == 64) + WEIGHT8 * (ROW_BLOCK == 128 ? 1 : 2))
#define PACKS (STAGE / 8)                               // packs per row in a stage
#define COPIED (16 / static_cast<int>(sizeof(Weight)))  // weights per asynchronous copy
#define COPIES (STAGE / COPIED)
#define ROW_WARPS (ROW_BLOCK >= 128 ? 4 : 2)
#define ROW_TILES (ROW_BLOCK / 8 / ROW_WARPS)
#define COLUMN_WARPS (WARPS / ROW_WARPS)
#define COLUMN_TILES (OUTPUTS / 16 / COLUMN_WARPS)
#define ROWS (ROW_BLOCK >> SPLIT_X)  // rows of x per block
#define X_PACKS (ROW_BLOCK * PACKS)
// How many copies of weights and how many packs of x a thread makes per pipeline stage, and the
// distance between the rows of two successive copies.
#define WEIGHT_COPIES (OUTPUTS * COPIES / (WARPS * 32))
#define WEIGHT_ROW_STEP (WARPS * 32 / COPIES)
#define X_COPIES (X_PACKS / (WARPS * 32))
#define X_ROW_STEP (WARPS * 32 / PACKS)
#define X_AT_ONCE ((ROW_BLOCK + 63) / 64)
#define BLOCKS_PER_MULTIPROCESSOR (ROW_BLOCK == 32 ? 2 : 1)
// How often a block polls whether the other blocks of its tile have stored their sums. On a GPU,
// the polls take about 10 us.
#ifndef POLLS
#define POLLS 32
#endif
// Whether position, slot and ancestors of each row (RowState), which RoPE and the KV cache need,
// are loaded to shared memory before the main loop. Tall tiles (TALL) have no shared memory left
// for them, because the totals over partial sums are stored there.
#define SHARES_STATES (ROPE_HEAD_DIM && !TALL)
// Whether each operand A is changed by an operation whose result the compiler does not know (`a[i]
// |= zero`). This forces the compiler to keep the operand in the four adjacent registers from which
// mma instructions read it. Otherwise the compiler copies the operand there again before most of
// the ROW_TILES instructions that use it. The conversion of 8-bit weights has the same effect.
#define KEEPS_OPERANDS (ROW_TILES > 2 && !WEIGHT8)

// Type of an argument whose value is a constant.
template <int VALUE_>
struct Constant {
  static constexpr int VALUE = VALUE_;
};

// Returns the swizzled shared-memory index of pack t (0 to 3) of a row, in half `sub` of a pipeline
// stage (a half has 32 inner indices). The swizzle avoids bank conflicts between the lanes of one
// access, which access adjacent rows in the same half, or the same row in both halves. `half` is 1
// for packs of 16 bytes and 2 for packs of 8 bytes.
__device__ __forceinline__ int swizzle(int rows, int row, int sub, int t, int half) {
  return (sub * rows + (row ^ sub * half)) * 4 + t;
}

__device__ __forceinline__ int swizzle_weight(int row, int sub, int t) {
  return swizzle(OUTPUTS, row, sub, t, WEIGHT8 ? 2 : 1);
}

__device__ __forceinline__ int swizzle_x(int row, int sub, int t) {
  return swizzle(ROW_BLOCK, row, sub, t, 1);
}

// Returns the index of an output of the tile in the shared memory in which the sums are exchanged.
// The permutation of the columns avoids bank conflicts between lanes that write adjacent rows.
__device__ __forceinline__ int exchange_index(int row, int column) {
  return row * OUTPUTS + (column ^ (row << SPLIT_X & 6) << 2);
}

// Iterates over the pipeline stages of the partial sums [part, end) in order.
struct StageIterator {
  int part;
  int end;
  int chunks;
  int chunk;
  int offset;  // first inner index of the stage in its chunk

  __device__ __forceinline__ bool valid() const { return part < end; }
  __device__ __forceinline__ int inner() const { return chunk * CHUNK + offset; }
  __device__ __forceinline__ bool ends_part() const {
    return offset == CHUNK - STAGE && chunk + PARTS >= chunks;
  }
  __device__ __forceinline__ void next() {
    offset = (offset + STAGE) % CHUNK;
    if (offset > 0) return;
    chunk += PARTS;
    if (chunk >= chunks) chunk = ++part;
  }
};

// Waits until `others` blocks have called arrive() with the same counter, then sets the counter to
// zero and returns true. Returns false if they have not after POLLS polls.
__device__ __forceinline__ bool wait_for_arrivals(unsigned int* arrived, int others) {
  volatile unsigned int* const count = arrived;
#pragma unroll 1
  for (int poll = 0; poll < POLLS; ++poll) {
    if (*count != static_cast<unsigned int>(others)) continue;
    *count = 0;
    __threadfence();
    return true;
  }
  return false;
}

// Grid: (splits, rows / ROW_BLOCK, columns / OUTPUTS). Blocks that use the same weights run at the
// same time, so the weights are read from global memory only once. With SPLIT_X, a row of x takes
// two rows of the mma operand B, so a block has half as many rows of x.
//
// With split K, several blocks compute one tile. Each computes some of the PARTS partial sums of
// every output of the tile. The first block adds its own partial sums in order; the other blocks
// keep each partial sum by itself, so that they can be added to the total of the first block in
// order. The rows of the tile are divided into one share per block. A block stores the sums of the
// shares of the other blocks to `partials` [tiles, PARTS, ROW_BLOCK, OUTPUTS]. When the other
// blocks have stored the sums of the block's own share, the block adds them and stores the results.
//
// `arrived` [tiles, splits] counts, for each share, the blocks that have stored their sums of it.
// It must be zero and is left zero. A block waits only for a limited time, because the other blocks
// might not run at the same time. It then stores the sums of its own share as well. The last block
// that arrives at the counter of a share adds its sums, whichever block this is. linear_mma.cuh
// documents the other arguments.
extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS_PER_MULTIPROCESSOR)
    linear_many(const Weight* weight, const float* weight_scale, const float* bias, const Input* x,
                const float* residual, OUT* out, float* copy, int rows, int columns, int inner,
                int copy_offset, int copy_stride, const float* square_sums, float eps,
                const float* norm, NormOut* norm_out, float* norm_square_sums,
                const float* rope_table, const int* slot, const int* pos,
                const unsigned long long* ancestors, const int* page_table, CACHE* keys,
                CACHE* values, int heads, int kv_heads, int slots, int max_pages, int page_shift,
                int scratch_page, float* partials, unsigned int* arrived) {
  extern __shared__ Pack16 staged[];
  __shared__ bool adds[PARTS];  // whether this block adds the sums of a share
  __shared__ float scale[ROWS];
  __shared__ RowState row_state[SHARES_STATES ? ROWS : 1];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int column = blockIdx.z * OUTPUTS, first = blockIdx.y * ROWS;
  const int splits = gridDim.x, own_share = blockIdx.x, parts = parts_of(inner);
  const int own_column = warp % COLUMN_WARPS * COLUMN_TILES * 16;
  const int own_row = warp / COLUMN_WARPS * ROW_TILES * 8;
  const int begin = own_share * (PARTS / splits), end = begin + PARTS / splits;
  StageIterator current = {begin, end < parts ? end : parts, inner / CHUNK, begin, 0};
  StageIterator next_copy = current;
  // The last part of this block, whose sums the block keeps until the end; -1 if it has no part.
  const int kept = current.valid() ? current.end - 1 : -1;
  Weights* const staged_weight = reinterpret_cast<Weights*>(staged);
  Pack16* const staged_x = reinterpret_cast<Pack16*>(staged_weight + STAGES * OUTPUTS * PACKS);
  // Shared memory for the sums of the tile, at index exchange_index(row, column). Unless TALL, it
  // is the memory of the pipeline stages, which are not used after the sums are complete.
  float* const exchanged = reinterpret_cast<float*>(TALL ? staged_x + STAGES * X_PACKS : staged);

  // What this thread copies to every pipeline stage. For the weights and for x: the offset of the
  // inner index in the stage (_k), the index in the stage to which the first copy is stored (_to),
  // and the rows to read (_row). A row after the last one reads the last row.
  const int thread = threadIdx.x;
  const int weight_k = thread % COPIES * COPIED, x_k = thread % PACKS * 8;
  const int weight_to = swizzle_weight(thread / COPIES, weight_k / 32, weight_k % 32 / 8);
  const int x_to = swizzle_x(thread / PACKS, x_k / 32, x_k % 32 / 8);
  int weight_row[WEIGHT_COPIES], x_row[X_COPIES];
#pragma unroll
  for (int n = 0; n < WEIGHT_COPIES; ++n) {
    weight_row[n] = min(column + thread / COPIES + n * WEIGHT_ROW_STEP, columns - 1);
  }
#pragma unroll
  for (int n = 0; n < X_COPIES; ++n) {
    x_row[n] = min(first + (thread / PACKS + n * X_ROW_STEP >> SPLIT_X), rows - 1);
  }
  const auto copy_weights = [&](int stage, const StageIterator& from) {
    if (!from.valid()) return;
    Weights* const to = staged_weight + stage * OUTPUTS * PACKS + weight_to;
    const Weight* const at = weight + from.inner() + weight_k;
#pragma unroll
    for (int n = 0; n < WEIGHT_COPIES; ++n) {
      copy_async(to + n * WEIGHT_ROW_STEP * 4, at + static_cast<long long>(weight_row[n]) * inner);
    }
  };
  // If x has 16 bits, starts the copies of the next inner indices of x to pipeline stage `stage`.
  // Then commits them as one group, together with the copies of weights that were started since the
  // last commit.
  const auto copy_rows = [&](int stage) {
    if (next_copy.valid()) {
      Pack16* const to = staged_x + stage * X_PACKS + x_to;
      const Input* const from = x + next_copy.inner() + x_k;
#pragma unroll
      for (int n = 0; n < X_COPIES * X16; ++n) {
        copy_async(to + n * X_ROW_STEP * 4, from + static_cast<long long>(x_row[n]) * inner);
      }
      next_copy.next();
    }
    commit_copies();
  };
  // Registers for float inputs of the next pipeline stage. load_x loads inputs to them before half
  // `sub` of a stage is multiplied, and store_x stores them to shared memory afterwards.
  Floats4 prefetched[X_AT_ONCE][2];
  const auto load_x = [&](int sub) {
#pragma unroll
    for (int i = 0; i < X_AT_ONCE; ++i) {
      if (ROW_BLOCK < 64 && sub > 0) break;
      const int n = sub * X_AT_ONCE + i;
      const Input* const from = x + current.inner() + x_k;
      const Floats4* const at =
          reinterpret_cast<const Floats4*>(from + static_cast<long long>(x_row[n]) * inner);
      prefetched[i][0] = at[0];
      prefetched[i][1] = at[1];
    }
  };
  const auto store_x = [&](int sub, int stage) {
    Pack16* to = staged_x + stage * X_PACKS;
#pragma unroll
    for (int i = 0; i < X_AT_ONCE; ++i) {
      const int pack = (sub * X_AT_ONCE + i) * WARPS * 32 + threadIdx.x, row = pack / 8;
      if (ROW_BLOCK < 64 && sub > 0) break;
      to[swizzle_x(row, pack % 8 / 4, pack % 4)] = pack_x(prefetched[i], row % 2);
    }
  };

  const Output y = {weight_scale,
                    bias,
                    residual,
                    out,
                    copy != nullptr ? copy + copy_offset : nullptr,
                    rows,
                    columns,
                    copy_stride,
                    norm,
                    norm_out,
                    norm_square_sums};
  const Pages pages = {page_table, slots, max_pages, page_shift, kv_heads, ROPE_HEAD_DIM};
  const RopeStore to = {rope_table, slot, pos, ancestors, pages, keys, values, heads, scratch_page};
  const int tile = blockIdx.z * gridDim.y + blockIdx.y;
  float* const tile_partials =
      partials + static_cast<long long>(tile) * (PARTS * ROW_BLOCK * OUTPUTS);
  float sum[COLUMN_TILES][ROW_TILES][4] = {};
  // Totals over the parts of the inner dimension that this block has completed. Only the block that
  // computes a tile's first parts needs them. The other blocks store the partial sum of each part
  // in `partials`, and the last block of the tile to arrive adds these sums to the total of the
  // first block. With TALL, the totals are in shared memory (`exchanged`) instead.
  float total[COLUMN_TILES][ROW_TILES][4];
  // Of the four sums that a lane holds for a pair of mma tiles, row_of returns the output row of
  // sum i in row tile n, and column_of the output column of sum i in column tile m.
  const auto row_of = [&](int n, int i) { return own_row + n * 8 + 2 * t + i % 2 >> SPLIT_X; };
  const auto column_of = [&](int m, int i) { return own_column + m * 16 + g + i / 2 * 8; };
  const auto end_part = [&](int part) {
#pragma unroll
    for (int m = 0; m < COLUMN_TILES; ++m) {
      float before[ROW_TILES][4];  // totals from shared memory, all loaded before a store
#pragma unroll
      for (int n = 0; n < ROW_TILES && TALL; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const bool is_used = begin == 0 && part > 0;
          before[n][i] = is_used ? exchanged[exchange_index(row_of(n, i), column_of(m, i))] : 0.0f;
        }
      }
#pragma unroll
      for (int n = 0; n < ROW_TILES; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float value = SPLIT_X ? sum[m][n][i & 2] + sum[m][n][i | 1] : sum[m][n][i];
          const int r = row_of(n, i), c = column_of(m, i);
          // With split K, the block with the first parts of a tile adds its partial sums in order.
          // The other blocks store each partial sum. The sums of the last part follow at the end.
          const float folded =
              begin > 0 || part == 0 ? value : (TALL ? before[n][i] : total[m][n][i]) + value;
          if (!TALL) total[m][n][i] = folded;
          if (TALL && (begin == 0 || part == kept)) exchanged[exchange_index(r, c)] = folded;
          if (begin == 0 || part == kept) continue;
          if (first + r >= rows || (SPLIT_X && i % 2 == 1)) continue;
          tile_partials[(part * ROW_BLOCK + r) * OUTPUTS + c] = folded;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[m][n][i] = 0.0f;
      }
    }
  };

  // This is zero, but the compiler does not know it, because `inner` could be negative.
  [[maybe_unused]] const unsigned int zero = static_cast<unsigned int>(inner) >> 31;
  StageIterator next_weights = current;
  for (int s = 0; s < STAGES - 1; ++s) {
    copy_weights(s, next_weights);
    next_weights.next();
  }
  wait_for_previous_kernel();
  for (int s = 0; s < STAGES - 1; ++s) copy_rows(s);
  load_scales<ROWS>(square_sums, eps, first, rows, inner, scale);
  if (SHARES_STATES && threadIdx.x < ROWS) {
    row_state[threadIdx.x] = load_row_state(y, to, first + threadIdx.x);
  }
  for (int sub = 0; !X16 && sub < 2 && current.valid(); ++sub) {
    load_x(sub);
    store_x(sub, 0);
  }
  for (int at = 0; current.valid(); at = at + 1 < STAGES ? at + 1 : 0) {
    const int after = at + 1 < STAGES ? at + 1 : 0;
    const bool ends = current.ends_part();
    const int part = current.part;
    current.next();
    wait_copies<STAGES - 2>();
    __syncthreads();
    const int free = at > 0 ? at - 1 : STAGES - 1;
    copy_weights(free, next_copy);
    copy_rows(free);
    const Weights* w = staged_weight + at * OUTPUTS * PACKS;
    const Pack16* v = staged_x + at * X_PACKS;
#pragma unroll
    for (int sub = 0; sub < STAGE / 32; ++sub) {
      if (!X16 && current.valid()) load_x(sub);
      Pack16 b[ROW_TILES];
#pragma unroll
      for (int n = 0; n < ROW_TILES; ++n) b[n] = v[swizzle_x(own_row + n * 8 + g, sub, t)];
      Pack16 top[COLUMN_TILES], low[COLUMN_TILES];
#pragma unroll
      for (int m = 0; m < COLUMN_TILES; ++m) {
        top[m] = widen(w[swizzle_weight(own_column + m * 16 + g, sub, t)]);
        low[m] = widen(w[swizzle_weight(own_column + m * 16 + g + 8, sub, t)]);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int m = 0; m < COLUMN_TILES; ++m) {
          unsigned int a[4];
          load_operand(top[m], low[m], h, a);
          if (KEEPS_OPERANDS) {
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] |= zero;
          }
#pragma unroll
          for (int n = 0; n < ROW_TILES; ++n) mma_m16n8k16<WEIGHT16>(sum[m][n], a, b[n].u + 2 * h);
        }
      }
      if (!X16 && current.valid()) store_x(sub, after);
    }
    if (ends) end_part(part);
  }

  // Epilogue. A thread stores up to PAIRS pairs of outputs, all of them in the same two columns. It
  // loads the inputs of AT_ONCE pairs before it adds the partial sums of the first one, so that the
  // latencies of the loads overlap. An output is the sum of up to SUMS partial sums. With split K,
  // a block usually stores at most half of the pairs.
  constexpr int PAIRS = ROWS * OUTPUTS / 2 / (WARPS * 32);
  constexpr int ROW_STEP = ROWS / PAIRS;
  const int first_row = threadIdx.x / (OUTPUTS / 2);
  const int c = threadIdx.x % (OUTPUTS / 2) / 8 * 16 + threadIdx.x % 8;
  const auto store_rows = [&](auto sums, int begin_row, int end_row, int first_sum, int count,
                              const auto& sum_at) {
    constexpr int SUMS = sums.VALUE;
    // As many as fit into registers.
    constexpr int MOST = TALL && ROPE_HEAD_DIM && (BIAS || SUMS > 1) ? 8 : 16;
    constexpr int USUAL = SUMS > 1 && PAIRS > 1 ? PAIRS / 2 : PAIRS;
    constexpr int AT_ONCE = USUAL < MOST ? USUAL : MOST;
    EpilogueInputs factors = {};
    load_factors(&factors, y, column + c);
#pragma unroll 1
    for (int r = begin_row + first_row; r < end_row; r += AT_ONCE * ROW_STEP) {
      float top[AT_ONCE][SUMS], low[AT_ONCE][SUMS];
      EpilogueInputs inputs[AT_ONCE];
      RowState states[AT_ONCE];
#pragma unroll
      for (int u = 0; u < AT_ONCE; ++u) {
        const int row = r + u * ROW_STEP;
        inputs[u] = factors;
        states[u] = {-1, -1, 0};
        if (row < end_row) {
          load_residual(&inputs[u], y, first + row, column + c);
          states[u] = SHARES_STATES ? row_state[row] : load_row_state(y, to, first + row);
        }
#pragma unroll
        for (int p = 0; p < SUMS; ++p) {
          const bool is_used = row < end_row && p >= first_sum && p < count;
          top[u][p] = is_used ? sum_at(p, row, c) : 0.0f;
          low[u][p] = is_used ? sum_at(p, row, c + 8) : 0.0f;
        }
      }
#pragma unroll
      for (int u = 0; u < AT_ONCE; ++u) {
        load_rotation(&inputs[u], y, to, states[u], column + c);
      }
#pragma unroll
      for (int u = 0; u < AT_ONCE; ++u) {
        const int row = r + u * ROW_STEP;
        if (row >= end_row) return;
#pragma unroll
        for (int p = 1; p < SUMS; ++p) {
          // Unused partial sums are skipped: adding their 0 would change the sign of a sum of -0.
          if (p >= count) break;
          top[u][0] = p > first_sum ? top[u][0] + top[u][p] : top[u][p];
          low[u][0] = p > first_sum ? low[u][0] + low[u][p] : low[u][p];
        }
        store_pair(y, inputs[u], to, first + row, column + c, top[u][0] * scale[row],
                   low[u][0] * scale[row]);
      }
    }
  };
  // Stores the sums that this thread keeps in registers to `exchanged`.
  const auto exchange_sums = [&] {
#pragma unroll
    for (int m = 0; m < COLUMN_TILES && !TALL; ++m) {
#pragma unroll
      for (int n = 0; n < ROW_TILES; ++n) {
#pragma unroll
        for (int i = 0; i < 4; i += 1 + SPLIT_X) {
          exchanged[exchange_index(row_of(n, i), column_of(m, i))] = total[m][n][i];
        }
      }
    }
    if (!TALL) __syncthreads();
  };
  __syncthreads();  // all threads have read the last stage
  exchange_sums();
  if (splits == 1) {
    store_rows(Constant<1>(), 0, min(ROWS, rows - first), 0, 1,
               [=](int, int row, int at) { return exchanged[exchange_index(row, at)]; });
    return;
  }
  // Stores the last sums of this block for the rows [begin_row, end_row) to `partials`.
  const auto store_sums = [&](int begin_row, int end_row) {
    Floats4* const of_part = reinterpret_cast<Floats4*>(tile_partials + kept * ROW_BLOCK * OUTPUTS);
    const int packs = min(end_row, rows - first) * (OUTPUTS / 4);
    for (int n = begin_row * (OUTPUTS / 4) + threadIdx.x; n < packs; n += WARPS * 32) {
      const int at = exchange_index(n / (OUTPUTS / 4), n % (OUTPUTS / 4) * 4);
      if (kept >= 0) of_part[n] = *reinterpret_cast<const Floats4*>(exchanged + at);
    }
  };
  unsigned int* const counters = arrived + tile * splits;
  const int share_rows = ROWS / splits, own_begin = own_share * share_rows;
  store_sums(0, own_begin);
  store_sums(own_begin + share_rows, ROWS);
  __syncthreads();  // the sums of the other shares are stored
  if (warp == 0) {
    if (lane < splits && lane != own_share) adds[lane] = arrive(counters + lane, splits);
    __syncwarp();  // a block is counted before it waits, because other blocks wait for it
    if (lane == own_share) adds[lane] = wait_for_arrivals(counters + lane, splits - 1);
  }
  __syncthreads();
  if (!adds[own_share]) {
    store_sums(own_begin, own_begin + share_rows);
    __syncthreads();
    if (threadIdx.x == 0) adds[own_share] = arrive(counters + own_share, splits);
    __syncthreads();
  }
  // Number of parts of the first block: PARTS / splits, for which the main loop has no register.
  const int first_parts = share_rows / (ROWS / PARTS);
  const volatile float* const of = tile_partials;
#pragma unroll 1
  for (int share = 0; share < splits; ++share) {
    if (!adds[share]) continue;
    const int begin_row = share * share_rows, end_row = min(begin_row + share_rows, rows - first);
    store_rows(Constant<PARTS>(), begin_row, end_row, min(first_parts, parts) - 1, parts,
               [=](int p, int row, int at) {
                 if (p == kept) return exchanged[exchange_index(row, at)];
                 return static_cast<float>(of[(p * ROW_BLOCK + row) * OUTPUTS + at]);
               });
  }
}
