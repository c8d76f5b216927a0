// Products with many rows: a block makes 128 outputs of ROW_BLOCK rows, split ones counted twice;
// of all parts, or of some that are neighbours.
#ifndef ROW_BLOCK
#define ROW_BLOCK 64
#endif
#include "linear_mma.cuh"

#define OUTPUTS 128
#define STAGE 64  // inner indices; STAGES - 1 stages are on their way, floats of x half a one
#define STAGES (3 + (ROW_BLOCK == 64) + WEIGHT8 * (ROW_BLOCK == 128 ? 1 : 2))
#define COPIED (16 / static_cast<int>(sizeof(Weight)))  // weights at once
#define COPIES (STAGE / COPIED)
#define ROW_WARPS (ROW_BLOCK == 128 ? 4 : 2)
#define ROW_TILES (ROW_BLOCK / 8 / ROW_WARPS)
#define COLUMN_WARPS (WARPS / ROW_WARPS)
#define COLUMN_TILES (OUTPUTS / 16 / COLUMN_WARPS)
#define X_PACKS (ROW_BLOCK * (STAGE / 8))
#define X_AT_ONCE ((ROW_BLOCK + 63) / 64)

// Where pack t of 32 inner indices `sub` of a row lies, rows of four packs, `half` of them 64
// bytes: no two lanes that act together meet in a bank, be they neighbouring rows of one `sub` or
// one row of both.
__device__ __forceinline__ int place(int rows, int row, int sub, int t, int half) {
  return (sub * rows + (row ^ sub * half)) * 4 + t;
}

__device__ __forceinline__ int place_weight(int row, int sub, int t) {
  return place(OUTPUTS, row, sub, t, WEIGHT8 ? 2 : 1);
}

__device__ __forceinline__ int place_x(int row, int sub, int t) {
  return place(ROW_BLOCK, row, sub, t, 1);
}

// The stages of parts [part, end) in order.
struct Walk {
  int part;
  int end;
  int chunks;
  int chunk;
  int half;

  __device__ __forceinline__ bool there() const { return part < end; }
  __device__ __forceinline__ int inner() const { return chunk * CHUNK + half * STAGE; }
  __device__ __forceinline__ bool ends_part() const { return half == 1 && chunk + PARTS >= chunks; }
  __device__ __forceinline__ void next() {
    half ^= 1;
    if (half == 1) return;
    chunk += PARTS;
    if (chunk >= chunks) chunk = ++part;
  }
};

// Grid (columns / 128, rows / ROW_BLOCK, splits), with SPLIT half as many rows a block. Where a
// block sums some parts only, they go to `partials` [tiles, PARTS, ROW_BLOCK, 128], and the last of
// a tile to arrive adds them up; `arrived` [tiles] is zero before and after.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    linear_many(const Weight* weight, const float* weight_scale, const Input* x,
                const float* residual, OUT* out, float* tap, int rows, int columns, int inner,
                int tap_offset, int tap_stride, const float* squares, float eps, const float* norm,
                Normed* normed, float* sums, const float* turn, const int* slot, const int* pos,
                const unsigned long long* tree, const int* page_table, CACHE* keys, CACHE* values,
                int heads, int kv_heads, int slots, int max_pages, int page_shift, int scratch_page,
                float* partials, int* arrived) {
  wait_for_previous_kernel();
  extern __shared__ Pack16 staged[];
  __shared__ int last;
  __shared__ float scale[ROW_BLOCK >> SPLIT];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int column = blockIdx.x * OUTPUTS, first = blockIdx.y * (ROW_BLOCK >> SPLIT);
  const int splits = gridDim.z, parts = parts_of(inner);
  const int own_column = warp % COLUMN_WARPS * COLUMN_TILES * 16;
  const int own_row = warp / COLUMN_WARPS * ROW_TILES * 8;
  const int begin = blockIdx.z * (PARTS / splits), behind = begin + PARTS / splits;
  Walk here = {begin, behind < parts ? behind : parts, inner / CHUNK, begin, 0};
  Walk ahead = here;
  Weights* const staged_weight = reinterpret_cast<Weights*>(staged);
  Pack16* const staged_x =
      reinterpret_cast<Pack16*>(staged_weight + STAGES * OUTPUTS * (STAGE / 8));

  // Pack i of a stage of x; of rows past the end the last one again.
  const auto x_at = [&](int i, const Walk& at) {
    const int row = first + (i / 8 >> SPLIT);
    return x + static_cast<long long>(row < rows ? row : rows - 1) * inner + at.inner() + i % 8 * 8;
  };
  const auto copy_stage = [&](int stage) {
    if (ahead.there()) {
      Weights* to = staged_weight + stage * OUTPUTS * (STAGE / 8);
#pragma unroll
      for (int n = 0; n < OUTPUTS * COPIES / (WARPS * 32); ++n) {
        const int i = n * WARPS * 32 + threadIdx.x, row = i / COPIES, k = i % COPIES * COPIED;
        const int at = column + row < columns ? column + row : columns - 1;
        copy_async(to + place_weight(row, k / 32, k % 32 / 8),
                   weight + static_cast<long long>(at) * inner + ahead.inner() + k);
      }
#pragma unroll
      for (int n = 0; n < X_PACKS * X16 / (WARPS * 32); ++n) {
        const int i = n * WARPS * 32 + threadIdx.x;
        copy_async(staged_x + stage * X_PACKS + place_x(i / 8, i % 8 / 4, i % 4), x_at(i, ahead));
      }
      ahead.next();
    }
    end_copies();
  };
  // Floats of x that come while the 32 inner indices `sub` are summed.
  Floats4 coming[X_AT_ONCE][2];
  const auto load_x = [&](int sub) {
#pragma unroll
    for (int i = 0; i < X_AT_ONCE; ++i) {
      const int pack = (sub * X_AT_ONCE + i) * WARPS * 32 + threadIdx.x;
      if (ROW_BLOCK < 64 && sub > 0) break;
      const Floats4* at = reinterpret_cast<const Floats4*>(x_at(pack, here));
      coming[i][0] = at[0];
      coming[i][1] = at[1];
    }
  };
  const auto store_x = [&](int sub, int stage) {
    Pack16* to = staged_x + stage * X_PACKS;
#pragma unroll
    for (int i = 0; i < X_AT_ONCE; ++i) {
      const int pack = (sub * X_AT_ONCE + i) * WARPS * 32 + threadIdx.x, row = pack / 8;
      if (ROW_BLOCK < 64 && sub > 0) break;
      to[place_x(row, pack % 8 / 4, pack % 4)] = pack_x(coming[i], row % 2);
    }
  };

  const Output y = {weight_scale, residual, out,        tap != nullptr ? tap + tap_offset : nullptr,
                    rows,         columns,  tap_stride, norm,
                    normed,       sums};
  const Pages pages = {page_table, slots, max_pages, page_shift, kv_heads, TURNED};
  const Heads to = {turn, slot, pos, tree, pages, keys, values, heads, scratch_page};
  const long long tile = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  float* const parted = partials + tile * PARTS * ROW_BLOCK * OUTPUTS;
  float sum[COLUMN_TILES][ROW_TILES][4] = {};
  float total[COLUMN_TILES][ROW_TILES][4];
  const auto end_part = [&](int part) {
#pragma unroll
    for (int m = 0; m < COLUMN_TILES; ++m) {
#pragma unroll
      for (int n = 0; n < ROW_TILES; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float value = SPLIT ? sum[m][n][i & 2] + sum[m][n][i | 1] : sum[m][n][i];
          if (splits == 1) {
            total[m][n][i] = part == 0 ? value : total[m][n][i] + value;
          } else if (const int r = own_row + n * 8 + 2 * t + i % 2 >> SPLIT;
                     first + r < rows && (!SPLIT || i % 2 == 0)) {
            const int c = own_column + m * 16 + g + i / 2 * 8;
            parted[(part * ROW_BLOCK + r) * OUTPUTS + c] = value;
          }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[m][n][i] = 0.0f;
      }
    }
  };

  for (int s = 0; s < STAGES - 1; ++s) copy_stage(s);
  load_scales(squares, eps, first, ROW_BLOCK >> SPLIT, rows, inner, scale);
  for (int sub = 0; !X16 && sub < 2 && here.there(); ++sub) {
    load_x(sub);
    store_x(sub, 0);
  }
  for (int at = 0; here.there(); at = at + 1 < STAGES ? at + 1 : 0) {
    const int after = at + 1 < STAGES ? at + 1 : 0;
    const bool ends = here.ends_part();
    const int part = here.part;
    here.next();
    copies_left<STAGES - 2>();
    __syncthreads();
    copy_stage(at > 0 ? at - 1 : STAGES - 1);
    const Weights* w = staged_weight + at * OUTPUTS * (STAGE / 8);
    const Pack16* v = staged_x + at * X_PACKS;
#pragma unroll
    for (int sub = 0; sub < STAGE / 32; ++sub) {
      if (!X16 && here.there()) load_x(sub);
      Pack16 a[COLUMN_TILES][2];
      Pack16 b[ROW_TILES];
#pragma unroll
      for (int m = 0; m < COLUMN_TILES; ++m) {
        a[m][0] = widen(w[place_weight(own_column + m * 16 + g, sub, t)]);
        a[m][1] = widen(w[place_weight(own_column + m * 16 + g + 8, sub, t)]);
      }
#pragma unroll
      for (int n = 0; n < ROW_TILES; ++n) b[n] = v[place_x(own_row + n * 8 + g, sub, t)];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int m = 0; m < COLUMN_TILES; ++m) {
#pragma unroll
          for (int n = 0; n < ROW_TILES; ++n) step(sum[m][n], a[m][0], a[m][1], b[n], h);
        }
      }
      if (!X16 && here.there()) store_x(sub, after);
    }
    if (ends) end_part(part);
  }

  const volatile float* of = parted;
  if (splits == 1) {  // by way of shared memory, which no copy is on its way to
    float* const whole = reinterpret_cast<float*>(staged);
    __syncthreads();
#pragma unroll
    for (int m = 0; m < COLUMN_TILES; ++m) {
#pragma unroll
      for (int n = 0; n < ROW_TILES; ++n) {
#pragma unroll
        for (int i = 0; i < 4; i += 1 + SPLIT) {
          const int r = own_row + n * 8 + 2 * t + i % 2 >> SPLIT;
          whole[r * OUTPUTS + own_column + m * 16 + g + i / 2 * 8] = total[m][n][i];
        }
      }
    }
    __syncthreads();
    of = whole;
  } else {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      last = atomicAdd(&arrived[tile], 1) == splits - 1;
      if (last) arrived[tile] = 0;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < (ROW_BLOCK >> SPLIT) * OUTPUTS / 2; i += WARPS * 32) {
    const int r = i / (OUTPUTS / 2), c = i % (OUTPUTS / 2) / 8 * 16 + i % 8;
    if (first + r >= rows) break;
    float top = of[r * OUTPUTS + c], low = of[r * OUTPUTS + c + 8];
    for (int p = 1; splits > 1 && p < parts; ++p) {
      top += of[(p * ROW_BLOCK + r) * OUTPUTS + c];
      low += of[(p * ROW_BLOCK + r) * OUTPUTS + c + 8];
    }
    store_pair(y, to, first + r, column + c, top * scale[r], low * scale[r]);
  }
}
