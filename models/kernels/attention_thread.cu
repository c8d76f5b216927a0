// Causal attention of one row over its slot's cached positions 0..pos, of a tree's row those of its
// path: one thread per (row, head), no barrier. Grouped-query: consecutive query heads share a key
// head.
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
#include "model.cuh"

#define TILE 32
#define LANES 32
#define WHOLE (HEAD_DIM / LANES * LANES)

// Dot products of a query with `count` keys. Partial i of a key takes dimensions i, i + LANES, ...
// in order; the partials are folded as a tree. Loops run over more than 16 items, and conversions
// stand in loops of their own, because that is what C++ compilers vectorise.
__device__ __noinline__ void score_tile(const float* query, const CACHE* keys, const long long* at,
                                        int count, float* score) {
  float folded[TILE][LANES / 2];
  for (int j = 0; j < count; ++j) {
    const CACHE* stored = keys + at[j];
    float key[HEAD_DIM];
    for (int d = 0; d < HEAD_DIM; ++d) key[d] = to_float(stored[d]);
    float partial[LANES] = {};
    for (int d = 0; d < WHOLE; d += LANES) {
      for (int i = 0; i < LANES; ++i) partial[i] = fmaf(query[d + i], key[d + i], partial[i]);
    }
    for (int i = 0; i < HEAD_DIM - WHOLE; ++i) {
      partial[i] = fmaf(query[WHOLE + i], key[WHOLE + i], partial[i]);
    }
    for (int i = 0; i < LANES / 2; ++i) folded[j][i] = partial[i] + partial[i + LANES / 2];
  }
  for (int j = count; j < TILE; ++j) {
    for (int i = 0; i < LANES / 2; ++i) folded[j][i] = 0.0f;
  }
  fold_rows<TILE>(folded, score);
}

// sum = sum * shrink + the values weighted, position after position.
__device__ __noinline__ void add_values(const float* weight, const CACHE* values,
                                        const long long* at, int count, float shrink, float* sum) {
  float total[HEAD_DIM];
  for (int d = 0; d < HEAD_DIM; ++d) total[d] = sum[d] * shrink;
  for (int j = 0; j < count; ++j) {
    const CACHE* stored = values + at[j];
    float value[HEAD_DIM];
    for (int d = 0; d < HEAD_DIM; ++d) value[d] = to_float(stored[d]);
    const float w = weight[j];
    for (int d = 0; d < HEAD_DIM; ++d) total[d] = fmaf(w, value[d], total[d]);
  }
  for (int d = 0; d < HEAD_DIM; ++d) sum[d] = total[d];
}

// Grid (rows), block (heads). `qkv` rows hold all_heads heads, queries first.
extern "C" __global__ void attention_thread(const float* qkv, const int* slot, const int* pos,
                                            const unsigned long long* tree, const int* page_table,
                                            const CACHE* keys, const CACHE* values, float* out,
                                            int rows, int heads, int kv_heads, int slots,
                                            int max_pages, int page_shift, float scale) {
  wait_for_kernel_before();
  const int row = blockIdx.x;
  const int head = threadIdx.x;
  if (row >= rows || head >= heads) return;
  const Pages pages = {page_table, slots, max_pages, page_shift, kv_heads, HEAD_DIM};
  const int s = slot[row];
  const int last = pos[row];
  float* y = out + (static_cast<long long>(row) * heads + head) * HEAD_DIM;
  if (!row_is_live(pages, s, last)) {
    for (int d = 0; d < HEAD_DIM; ++d) y[d] = 0.0f;
    return;
  }
  const float* from =
      qkv + (static_cast<long long>(row) * (heads + 2 * kv_heads) + head) * HEAD_DIM;
  const int kv_head = head / (heads / kv_heads);
  float query[HEAD_DIM];
  float sum[HEAD_DIM];
  for (int d = 0; d < HEAD_DIM; ++d) {
    query[d] = from[d] * scale;
    sum[d] = 0.0f;
  }
  float top = -3.0e38f;
  float mass = 0.0f;
  const Path path = path_at(tree, row, last);
  for (int first = 0; first <= last; first += TILE) {
    const int count = last - first + 1 < TILE ? last - first + 1 : TILE;
    long long at[TILE];
    float score[TILE];
    for (int j = 0; j < count; ++j) {
      const int cached = cached_at(path, first + j);
      at[j] = element_of(pages, page_of(pages, s, cached), cached, kv_head);
    }
    score_tile(query, keys, at, count, score);
    float tile_top = top;
    for (int j = 0; j < count; ++j) tile_top = score[j] > tile_top ? score[j] : tile_top;
    float weight[TILE];
    float weights[TILE];
    for (int j = 0; j < TILE; ++j) {
      const float e = exp_exact(score[j] - tile_top);
      weight[j] = j < count ? e : 0.0f;
      weights[j] = weight[j];
    }
    const float shrink = exp_exact(top - tile_top);
    mass = fmaf(mass, shrink, tree_sum<TILE>(weights));
    add_values(weight, values, at, count, shrink, sum);
    top = tile_top;
  }
  const float inverse = 1.0f / mass;
  for (int d = 0; d < HEAD_DIM; ++d) y[d] = sum[d] * inverse;
}
