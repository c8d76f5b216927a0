// y = x W^T (+ residual) on tensor cores: weights are the 16 rows of A, rows of x the columns of B.
//
// A dot product is PARTS interleaved partial sums: part p takes the chunks p, p + PARTS, ... of
// CHUNK inner indices in order, from zero; the parts are added left to right. Within a chunk the
// order is the same everywhere: lane 4 g + t holds eight neighbours of 32, which are two steps. So
// neither the rows that share a pass, nor which entry, block or warp sums a part, touches a bit.
//
// x is rounded to the weights' type; with SPLIT it is two rows, rounded and what is left, whose
// parts are added before the others are.
#include "mma.cuh"

#ifndef WEIGHT
#define WEIGHT bf16_t
#endif
#ifndef SPLIT
#define SPLIT 0
#endif
#ifndef TILES
#define TILES 1  // of eight rows, split ones counted twice, in a block of linear_few
#endif
#ifndef ROW_BLOCK
#define ROW_BLOCK 64  // rows, split ones counted twice, in a block of linear_many
#endif
#define PARTS 8
#define CHUNK 128
#define WARPS 8

struct Output {
  const float* residual;  // may be null, may be `out`
  float* out;
  float* tap;  // second copy with its own row stride; may be null
  int rows;
  int columns;
  int tap_stride;
};

__device__ __forceinline__ void store(const Output& y, int row, int column, float value) {
  if (row >= y.rows || column >= y.columns) return;
  const long long at = static_cast<long long>(row) * y.columns + column;
  if (y.residual != nullptr) value += y.residual[at];
  y.out[at] = value;
  if (y.tap != nullptr) y.tap[static_cast<long long>(row) * y.tap_stride + column] = value;
}

// Eight neighbours of a row of x, as `split` (0: rounded, 1: what is left) has them.
__device__ __forceinline__ Pack16 pack_x(const Floats4* from, int split) {
  Pack16 pack;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float low = from[i / 2].f[i % 2 * 2], high = from[i / 2].f[i % 2 * 2 + 1];
    if (SPLIT) {
      const unsigned int near = pack_pair<WEIGHT>(low, high);
      low -= split ? half_of<WEIGHT>(near, 0) : 0.0f;
      high -= split ? half_of<WEIGHT>(near, 1) : 0.0f;
    }
    pack.u[i] = pack_pair<WEIGHT>(low, high);
  }
  return pack;
}

// The step `h` of 32 inner indices: `top` and `low` of weight rows g and g + 8.
__device__ __forceinline__ void step(float* sum, const Pack16& top, const Pack16& low,
                                     const Pack16& x, int h) {
  const unsigned int a[4] = {top.u[2 * h], low.u[2 * h], top.u[2 * h + 1], low.u[2 * h + 1]};
  mma_m16n8k16<WEIGHT>(sum, a, x.u + 2 * h);
}

__device__ __forceinline__ int parts_of(int inner) {
  return inner / CHUNK < PARTS ? inner / CHUNK : PARTS;
}

__device__ __forceinline__ void load_chunk(const WEIGHT* top, const WEIGHT* low,
                                           Pack16 (*weight)[2]) {
#pragma unroll
  for (int j = 0; j < CHUNK / 32; ++j) {
    weight[j][0] = load_weight(top + 32 * j);
    weight[j][1] = load_weight(low + 32 * j);
  }
}

// For few rows, which weights stream past: a block makes 16 outputs, warp p part p of them. Grid
// (columns / 16, rows / (8 TILES)), with SPLIT half as many rows a block.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 2)
    linear_few(const WEIGHT* weight, const float* x, const float* residual, float* out, float* tap,
               int rows, int columns, int inner, int tap_offset, int tap_stride) {
  __shared__ float part[WARPS][16][TILES * 8];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int column = blockIdx.x * 16, first = blockIdx.y * (TILES * 8 >> SPLIT);
  const WEIGHT* top = weight + static_cast<long long>(column + g) * inner + 8 * t;
  const WEIGHT* low = top + 8ll * inner;
  const float* from[TILES];
#pragma unroll
  for (int n = 0; n < TILES; ++n) {
    const int row = first + (n * 8 + g >> SPLIT);  // past the end: the last one again
    from[n] = x + static_cast<long long>(row < rows ? row : rows - 1) * inner + 8 * t;
  }
  const int chunks = inner / CHUNK;
  float sum[TILES][4] = {};
  Pack16 a[2][CHUNK / 32][2];
  if (warp < chunks) load_chunk(top + warp * CHUNK, low + warp * CHUNK, a[0]);
  for (int c = warp; c < chunks; c += 2 * WARPS) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const int now = c + s * WARPS, next = now + WARPS;
      if (now >= chunks) break;
      if (next < chunks) load_chunk(top + next * CHUNK, low + next * CHUNK, a[1 - s]);
#pragma unroll
      for (int j = 0; j < CHUNK / 32; ++j) {
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
          const Floats4* at = reinterpret_cast<const Floats4*>(from[n] + now * CHUNK + 32 * j);
          const Floats4 eight[2] = {at[0], at[1]};
          const Pack16 b = pack_x(eight, g % 2);
#pragma unroll
          for (int h = 0; h < 2; ++h) step(sum[n], a[s][j][0], a[s][j][1], b, h);
        }
      }
    }
  }
#pragma unroll
  for (int n = 0; n < TILES; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) part[warp][g + 8 * (i / 2)][n * 8 + 2 * t + i % 2] = sum[n][i];
  }
  __syncthreads();
  const Output y = {residual, out, tap != nullptr ? tap + tap_offset : nullptr, rows, columns,
                    tap_stride};
  const int parts = parts_of(inner);
  for (int i = threadIdx.x; i < 16 * (TILES * 8 >> SPLIT); i += WARPS * 32) {
    const int c = i % 16, r = i / 16;
    float total = 0.0f;
    for (int p = 0; p < parts; ++p) {
      const float* of = part[p][c] + (r << SPLIT);
      const float value = SPLIT ? of[0] + of[1] : of[0];
      total = p == 0 ? value : total + value;
    }
    store(y, first + r, column + c, total);
  }
}

// For many rows: a block makes 128 outputs of ROW_BLOCK rows, of all parts or of neighbouring ones.
#define OUTPUTS 128
#define STAGE 64  // inner indices; weights of STAGES - 1 stages are on their way, x of one
#define STAGES (ROW_BLOCK == 64 ? 4 : 3)
#define ROW_WARPS (ROW_BLOCK == 128 ? 4 : 2)
#define ROW_TILES (ROW_BLOCK / 8 / ROW_WARPS)
#define COLUMN_WARPS (WARPS / ROW_WARPS)
#define COLUMN_TILES (OUTPUTS / 16 / COLUMN_WARPS)
#define X_AT_ONCE ((ROW_BLOCK + 63) / 64)

// Where pack t of 32 inner indices `sub` of a row lies, rows of 64 bytes: no two of eight lanes
// that act together meet in a bank, be they rows g, g + 1 of one `sub` or one row of both.
__device__ __forceinline__ int place(int rows, int row, int sub, int t) {
  return (sub * rows + (row ^ sub)) * 4 + t;
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
    linear_many(const WEIGHT* weight, const float* x, const float* residual, float* out, float* tap,
                int rows, int columns, int inner, int tap_offset, int tap_stride, float* partials,
                int* arrived) {
  extern __shared__ Pack16 staged[];
  __shared__ int last;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int column = blockIdx.x * OUTPUTS, first = blockIdx.y * (ROW_BLOCK >> SPLIT);
  const int splits = gridDim.z, parts = parts_of(inner);
  const int own_column = warp % COLUMN_WARPS * COLUMN_TILES * 16;
  const int own_row = warp / COLUMN_WARPS * ROW_TILES * 8;
  const int begin = blockIdx.z * (PARTS / splits), behind = begin + PARTS / splits;
  Walk here = {begin, behind < parts ? behind : parts, inner / CHUNK, begin, 0};
  Walk ahead = here;
  Pack16* const staged_x = staged + STAGES * OUTPUTS * (STAGE / 8);

  const auto copy_weights = [&](int stage) {
    if (ahead.there()) {
      Pack16* to = staged + stage * OUTPUTS * (STAGE / 8);
      for (int i = threadIdx.x; i < OUTPUTS * (STAGE / 8); i += WARPS * 32) {
        const int row = i / 8, at = column + row < columns ? column + row : columns - 1;
        copy_async(to + place(OUTPUTS, row, i % 8 / 4, i % 4),
                   weight + static_cast<long long>(at) * inner + ahead.inner() + i % 8 * 8);
      }
      ahead.next();
    }
    end_copies();
  };
  // Those of x that come while the 32 inner indices `sub` are summed.
  Floats4 coming[X_AT_ONCE][2];
  const auto load_x = [&](int sub) {
#pragma unroll
    for (int i = 0; i < X_AT_ONCE; ++i) {
      const int pack = (sub * X_AT_ONCE + i) * WARPS * 32 + threadIdx.x;
      if (pack >= ROW_BLOCK * (STAGE / 8)) break;
      const int row = first + (pack / 8 >> SPLIT);
      const float* from = x + static_cast<long long>(row < rows ? row : rows - 1) * inner;
      const Floats4* at = reinterpret_cast<const Floats4*>(from + here.inner() + pack % 8 * 8);
      coming[i][0] = at[0];
      coming[i][1] = at[1];
    }
  };
  const auto store_x = [&](int sub, int stage) {
    Pack16* to = staged_x + stage * ROW_BLOCK * (STAGE / 8);
#pragma unroll
    for (int i = 0; i < X_AT_ONCE; ++i) {
      const int pack = (sub * X_AT_ONCE + i) * WARPS * 32 + threadIdx.x, row = pack / 8;
      if (pack >= ROW_BLOCK * (STAGE / 8)) break;
      to[place(ROW_BLOCK, row, pack % 8 / 4, pack % 4)] = pack_x(coming[i], row % 2);
    }
  };

  const Output y = {residual, out, tap != nullptr ? tap + tap_offset : nullptr, rows, columns,
                    tap_stride};
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
          } else if (!SPLIT || i % 2 == 0) {
            const int r = own_row + n * 8 + 2 * t + i % 2 >> SPLIT;
            const int c = own_column + m * 16 + g + i / 2 * 8;
            parted[(part * ROW_BLOCK + r) * OUTPUTS + c] = value;
          }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[m][n][i] = 0.0f;
      }
    }
  };

  for (int s = 0; s < STAGES - 1; ++s) copy_weights(s);
  for (int sub = 0; sub < 2 && here.there(); ++sub) {
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
    copy_weights(at > 0 ? at - 1 : STAGES - 1);
    const Pack16* w = staged + at * OUTPUTS * (STAGE / 8);
    const Pack16* v = staged_x + at * ROW_BLOCK * (STAGE / 8);
#pragma unroll
    for (int sub = 0; sub < STAGE / 32; ++sub) {
      if (here.there()) load_x(sub);
      Pack16 a[COLUMN_TILES][2];
      Pack16 b[ROW_TILES];
#pragma unroll
      for (int m = 0; m < COLUMN_TILES; ++m) {
        a[m][0] = w[place(OUTPUTS, own_column + m * 16 + g, sub, t)];
        a[m][1] = w[place(OUTPUTS, own_column + m * 16 + g + 8, sub, t)];
      }
#pragma unroll
      for (int n = 0; n < ROW_TILES; ++n) b[n] = v[place(ROW_BLOCK, own_row + n * 8 + g, sub, t)];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int m = 0; m < COLUMN_TILES; ++m) {
#pragma unroll
          for (int n = 0; n < ROW_TILES; ++n) step(sum[m][n], a[m][0], a[m][1], b[n], h);
        }
      }
      if (here.there()) store_x(sub, after);
    }
    if (ends) end_part(part);
  }

  if (splits == 1) {
#pragma unroll
    for (int m = 0; m < COLUMN_TILES; ++m) {
#pragma unroll
      for (int n = 0; n < ROW_TILES; ++n) {
#pragma unroll
        for (int i = 0; i < 4; i += 1 + SPLIT) {
          store(y, first + (own_row + n * 8 + 2 * t + i % 2 >> SPLIT),
                column + own_column + m * 16 + g + i / 2 * 8, total[m][n][i]);
        }
      }
    }
    return;
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(&arrived[tile], 1) == splits - 1;
    if (last) arrived[tile] = 0;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  const volatile float* of = parted;
  for (int i = threadIdx.x; i < (ROW_BLOCK >> SPLIT) * OUTPUTS; i += WARPS * 32) {
    float value = of[i];
    for (int p = 1; p < parts; ++p) value += of[p * ROW_BLOCK * OUTPUTS + i];
    store(y, first + i / OUTPUTS, column + i % OUTPUTS, value);
  }
}
