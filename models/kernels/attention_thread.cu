// Causal attention of one row over its slot's cached positions 0..pos: one thread per (row, head),
// no barrier. Grouped-query: consecutive query heads share a key head.
//
// Online softmax (Milakov and Gimelshein, 2018) over tiles of TILE positions anchored at 0, in
// order. Positions beyond the row's own are never touched. The order of every sum depends on the
// position alone.
#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
#ifndef CACHE
#define CACHE bf16_t
#endif
#include "pages.cuh"
#include "vector_math.cuh"

#define TILE 32
// Partial sums of a dot product: the largest power of two up to 16 that divides HEAD_DIM.
#define LANES (HEAD_DIM % 16 == 0 ? 16 : HEAD_DIM % 8 == 0 ? 8 : HEAD_DIM % 4 == 0 ? 4 : 2)

__device__ __forceinline__ float dot_key(const float* query, const CACHE* key) {
  float partial[LANES] = {};
#pragma unroll
  for (int d = 0; d < HEAD_DIM; d += LANES) {
#pragma unroll
    for (int i = 0; i < LANES; ++i) {
      partial[i] = fmaf(query[d + i], to_float(key[d + i]), partial[i]);
    }
  }
  return tree_sum<LANES>(partial);
}

// Grid (rows), block (heads). `qkv` rows hold all_heads heads, queries first.
extern "C" __global__ void attention_thread(const float* qkv, const int* slot, const int* pos,
                                            const int* page_table, const CACHE* keys,
                                            const CACHE* values, float* out, int rows, int heads,
                                            int kv_heads, int slots, int max_pages, int page_shift,
                                            float scale) {
  const int row = blockIdx.x;
  const int head = threadIdx.x;
  if (row >= rows || head >= heads) return;
  const Pages pages = {page_table, slots, max_pages, page_shift, kv_heads};
  const int s = slot[row];
  const int last = pos[row];
  float* y = out + (static_cast<long long>(row) * heads + head) * HEAD_DIM;
  if (!row_is_live(pages, s, last)) {
    for (int d = 0; d < HEAD_DIM; ++d) y[d] = 0.0f;
    return;
  }
  const float* from = qkv + (static_cast<long long>(row) * (heads + 2 * kv_heads) + head) * HEAD_DIM;
  const int kv_head = head / (heads / kv_heads);
  float query[HEAD_DIM];
  float sum[HEAD_DIM];
  for (int d = 0; d < HEAD_DIM; ++d) {
    query[d] = from[d] * scale;
    sum[d] = 0.0f;
  }
  float top = -3.0e38f;
  float mass = 0.0f;
  for (int first = 0; first <= last; first += TILE) {
    const int count = last - first + 1 < TILE ? last - first + 1 : TILE;
    long long at[TILE];
    float score[TILE];
    float tile_top = top;
    for (int j = 0; j < count; ++j) {
      const int page = page_of(pages, s, first + j);
      at[j] = element_of(pages, page, first + j, kv_head);
      score[j] = dot_key(query, keys + at[j]);
      tile_top = score[j] > tile_top ? score[j] : tile_top;
    }
    for (int j = count; j < TILE; ++j) score[j] = tile_top;
    float weight[TILE];
    float weights[TILE];
    for (int j = 0; j < TILE; ++j) {
      const float e = exp_exact(score[j] - tile_top);
      weight[j] = j < count ? e : 0.0f;
      weights[j] = weight[j];
    }
    const float shrink = exp_exact(top - tile_top);
    mass = fmaf(mass, shrink, tree_sum<TILE>(weights));
    for (int d = 0; d < HEAD_DIM; d += LANES) {
      float part[LANES];
#pragma unroll
      for (int i = 0; i < LANES; ++i) part[i] = sum[d + i] * shrink;
      for (int j = 0; j < count; ++j) {
        const CACHE* value = values + at[j] + d;
#pragma unroll
        for (int i = 0; i < LANES; ++i) part[i] = fmaf(weight[j], to_float(value[i]), part[i]);
      }
#pragma unroll
      for (int i = 0; i < LANES; ++i) sum[d + i] = part[i];
    }
    top = tile_top;
  }
  const float inverse = 1.0f / mass;
  for (int d = 0; d < HEAD_DIM; ++d) y[d] = sum[d] * inverse;
}
