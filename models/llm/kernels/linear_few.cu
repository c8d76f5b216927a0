// Tensor-core matrix product for a small number of rows. The weights are streamed from global
// memory to registers. A block computes a tile of (16 TILES) output columns x (8 TILES) rows of the
// mma operand B. With TILES = 2, each row of x that a block loads thus serves twice as many
// outputs. A warp computes one of the partial sums (linear_mma.cuh) of 16 columns for all rows.
//
// The first weights are loaded before the kernel waits for the previous kernel, because no kernel
// writes weights. The inputs of the epilogue are loaded before the main loop.
#ifndef TILES
#define TILES 1
#endif
#define WARPS (PARTS * TILES)
#define GROUP 16
#include "linear_mma.cuh"

// Chunks of weights that a warp has in registers, in flight or in use. A block with fewer warps has
// more registers per warp.
#define DEPTH ((TILES == 1 ? 3 : 2) << WEIGHT8)
#define STEPS (CHUNK / 32)
#define BLOCKS_PER_MULTIPROCESSOR (TILES == 1 ? 3 : 2)

// The overloads of load_x load eight values of a row of x and convert them to WEIGHT16, the type of
// the mma operands.
__device__ __forceinline__ Pack16 load_x(const WEIGHT16* from, int) {
  return *reinterpret_cast<const Pack16*>(from);
}

__device__ __forceinline__ Pack16 load_x(const float* from, int split) {
  const Floats4* at = reinterpret_cast<const Floats4*>(from);
  const Floats4 eight[2] = {at[0], at[1]};
  return pack_x(eight, split);
}

// Grid: (columns / (16 TILES), rows / (8 TILES)). With SPLIT_X, a row of x takes two rows of the
// mma operand B, so a block has half as many rows of x. linear_mma.cuh documents the arguments.
extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS_PER_MULTIPROCESSOR)
    linear_few(const Weight* weight, const float* weight_scale, const float* bias, const Input* x,
               const float* residual, OUT* out, float* copy, int rows, int columns, int inner,
               int copy_offset, int copy_stride, const float* square_sums, float eps,
               const float* norm, NormOut* norm_out, float* norm_square_sums,
               const float* rope_table, const int* slot, const int* pos,
               const unsigned long long* ancestors, const int* page_table, CACHE* keys,
               CACHE* values, int heads, int kv_heads, int slots, int max_pages, int page_shift,
               int scratch_page) {
  constexpr int ROWS = TILES * 8 >> SPLIT_X;
  static_assert(8 * TILES * ROWS <= WARPS * 32, "a thread stores one pair of outputs");
  __shared__ float part[PARTS][TILES * 16][TILES * 8];
  __shared__ float scale[ROWS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int column = blockIdx.x * TILES * 16, first = blockIdx.y * ROWS;
  const int own_part = warp % PARTS, warp_column = warp / PARTS * 16;
  // For columns that do not exist, load the last columns.
  const int weight_row = min(column + warp_column, columns - 16) + g;
  const Weight* const top = weight + static_cast<long long>(weight_row) * inner + 8 * t;
  const Input* from[TILES];
#pragma unroll
  for (int n = 0; n < TILES; ++n) {
    const int row = first + (n * 8 + g >> SPLIT_X);  // rows that do not exist load the last row
    from[n] = x + static_cast<long long>(row < rows ? row : rows - 1) * inner + 8 * t;
  }
  const int chunks = (inner / CHUNK - own_part + PARTS - 1) / PARTS;  // of this warp
  const auto inner_of = [&](int chunk) { return (own_part + chunk * PARTS) * CHUNK; };
  float sum[TILES][4] = {};
  Weights weights[DEPTH][STEPS][2];
  // Loads this lane's weights of one chunk, whose first inner index is `from`: rows g and g + 8 of
  // the mma tile.
  const auto load_chunk = [&](int from, Weights(*to)[2]) {
#pragma unroll
    for (int j = 0; j < STEPS; ++j) {
      to[j][0] = load_weight(top + from + 32 * j);
      to[j][1] = load_weight(top + 8ll * inner + from + 32 * j);
    }
  };
#pragma unroll
  for (int s = 0; s < DEPTH - 1; ++s) {
    // These loads must be issued before wait_for_previous_kernel(). A branch would let the compiler
    // move them after it. A warp that has fewer chunks therefore loads the last inner indices and
    // does not use the values.
    load_chunk(min(inner_of(s), inner - CHUNK), weights[s]);
  }
  wait_for_previous_kernel();
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
  const int own_tile = threadIdx.x / 8 / ROWS, own_row = threadIdx.x / 8 % ROWS;
  const int own_column = own_tile * 16 + threadIdx.x % 8;
  const bool is_owner = own_tile < TILES;  // whether this thread stores outputs
  EpilogueInputs inputs = {};
  RowState state = {};
  // Whether the epilogue's inputs are loaded before the main loop. With 16 rows and 8-bit weights,
  // there are too few registers for them.
  constexpr bool LOADS_EARLY = !WEIGHT8 || TILES == 1;
  const auto load_own_row = [&] {
    if (!is_owner) return;
    load_residual(&inputs, y, first + own_row, column + own_column);
    state = load_row_state(y, to, first + own_row);
  };
  if (LOADS_EARLY) load_own_row();
  load_scales<ROWS>(square_sums, eps, first, rows, inner, scale);
  if (LOADS_EARLY && is_owner) load_rotation(&inputs, y, to, state, column + own_column);
  for (int chunk = 0; chunk < chunks; chunk += DEPTH) {
#pragma unroll
    for (int s = 0; s < DEPTH; ++s) {
      const int now = chunk + s, next = now + DEPTH - 1;
      if (now >= chunks) break;
      if (next < chunks) load_chunk(inner_of(next), weights[(s + DEPTH - 1) % DEPTH]);
#pragma unroll
      for (int j = 0; j < STEPS; ++j) {
        Pack16 b[TILES];
#pragma unroll
        for (int n = 0; n < TILES; ++n) b[n] = load_x(from[n] + inner_of(now) + 32 * j, g % 2);
        const Pack16 high_rows = widen(weights[s][j][0]), low_rows = widen(weights[s][j][1]);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          unsigned int a[4];
          load_operand(high_rows, low_rows, h, a);
#pragma unroll
          for (int n = 0; n < TILES; ++n) mma_m16n8k16<WEIGHT16>(sum[n], a, b[n].u + 2 * h);
        }
      }
    }
  }
  if (!LOADS_EARLY) load_own_row();
  if (!LOADS_EARLY && is_owner) load_rotation(&inputs, y, to, state, column + own_column);
  if (is_owner) load_factors(&inputs, y, column + own_column);
#pragma unroll
  for (int n = 0; n < TILES; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      part[own_part][warp_column + g + 8 * (i / 2)][n * 8 + 2 * t + i % 2] = sum[n][i];
    }
  }
  __syncthreads();
  if (!is_owner) return;
  const int parts = parts_of(inner);
  const auto folded = [&](int r, int c) {
    float total = 0.0f;
    for (int p = 0; p < parts; ++p) {
      const float* of = part[p][c] + (r << SPLIT_X);
      const float value = SPLIT_X ? of[0] + of[1] : of[0];
      total = p == 0 ? value : total + value;
    }
    return total * scale[r];
  };
  store_pair(y, inputs, to, first + own_row, column + own_column, folded(own_row, own_column),
             folded(own_row, own_column + 8));
}
