// Causal attention of rows over their slot's cached positions 0..pos, of a tree's row those of its
// path: a thread takes some queries of one key head, which consecutive query heads share; no
// barrier.
//
// Online softmax (Milakov and Gimelshein, 2018) over tiles of TILE positions anchored at 0, in
// order. Positions beyond the row's own count for nothing. The order of every sum depends on the
// position alone. A tile is brought into floats once for all queries whose rows see the same.
#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
#ifndef CACHE
#define CACHE bf16_t
#endif
#include "lanes.cuh"

#define TILE 32
#define QUERIES 48
#define PARTS ((HEAD_DIM + LANES - 1) / LANES)
#define WIDTH (PARTS * LANES)

struct Query {
  int row;
  int slot;
  int last;  // -1: padding
  Path path;
  float top;
  float mass;
  alignas(32) float of[WIDTH];  // scaled; zeros behind HEAD_DIM, as in all of this width
  alignas(32) float sum[WIDTH];
};

// A tile of the cache as floats.
struct Tile {
  int slot;
  int row;  // whose path it shows; -1: positions in order
  int count;
  alignas(32) float key[TILE * WIDTH];
  alignas(32) float value[TILE * WIDTH];
};

__device__ __forceinline__ void bring(Tile& tile, const Query& query, const Pages& pages,
                                      const CACHE* keys, const CACHE* values, int kv_head,
                                      int first, int count) {
  const bool in_order = query.path.drafts == 0 || first + count - 1 <= query.path.base;
  const int row = in_order ? -1 : query.row;
  if (tile.slot != query.slot || tile.row != row) tile.count = 0;
  tile.slot = query.slot;
  tile.row = row;
  for (; tile.count < count; ++tile.count) {
    const int cached = cached_at(query.path, first + tile.count);
    const long long at = element_of(pages, page_of(pages, query.slot, cached), cached, kv_head);
    float* key = tile.key + tile.count * WIDTH;
    float* value = tile.value + tile.count * WIDTH;
    for (int d = 0; d < HEAD_DIM; ++d) key[d] = to_float(keys[at + d]);
    for (int d = 0; d < HEAD_DIM; ++d) value[d] = to_float(values[at + d]);
  }
}

// Dot products of a query with LANES keys. Partial i of a key takes dimensions i, i + LANES, ... in
// order.
__device__ __forceinline__ void score_keys(const float* query, const float* key, float* score) {
  Lanes partial[LANES] = {};
  for (int d = 0; d < WIDTH; d += LANES) {
    const Lanes q = load_lanes(query + d);
    UNROLLED for (int j = 0; j < LANES; ++j) {
      partial[j] = fma_lanes(q, load_lanes(key + j * WIDTH + d), partial[j]);
    }
  }
  fold_lanes<LANES>(partial, score);
}

// sum = sum * shrink + the values weighted, position after position, for COUNT lanes of dimensions.
template <int COUNT>
__device__ __forceinline__ void add_values(const float* weight, const float* value, int count,
                                           float shrink, float* sum) {
  Lanes total[COUNT];
  UNROLLED for (int d = 0; d < COUNT; ++d) {
    UNROLLED for (int i = 0; i < LANES; ++i) total[d][i] = sum[d * LANES + i] * shrink;
  }
  for (int j = 0; j < count; ++j) {
    Lanes w;
    UNROLLED for (int i = 0; i < LANES; ++i) w[i] = weight[j];
    UNROLLED for (int d = 0; d < COUNT; ++d) {
      total[d] = fma_lanes(w, load_lanes(value + j * WIDTH + d * LANES), total[d]);
    }
  }
  UNROLLED for (int d = 0; d < COUNT; ++d) {
    UNROLLED for (int i = 0; i < LANES; ++i) sum[d * LANES + i] = total[d][i];
  }
}

__device__ __noinline__ void attend(Query& query, const Tile& tile, int count) {
  float score[TILE];
  for (int j = 0; j < TILE; j += LANES) score_keys(query.of, tile.key + j * WIDTH, score + j);
  float top = query.top;
  for (int j = 0; j < count; ++j) top = score[j] > top ? score[j] : top;
  float weight[TILE];
  float weights[TILE];
  for (int j = 0; j < TILE; ++j) {
    const float e = exp_exact(score[j] - top);
    weight[j] = j < count ? e : 0.0f;
    weights[j] = weight[j];
  }
  const float shrink = exp_exact(query.top - top);
  query.mass = fmaf(query.mass, shrink, tree_sum<TILE>(weights));
  query.top = top;
  int d = 0;
  for (; d + 8 <= PARTS; d += 8) {
    add_values<8>(weight, tile.value + d * LANES, count, shrink, query.sum + d * LANES);
  }
  if constexpr (PARTS % 8 != 0) {
    add_values<PARTS % 8>(weight, tile.value + d * LANES, count, shrink, query.sum + d * LANES);
  }
}

// Grid (row and head of the key head's queries / queries, kv_heads), block 1; queries <= QUERIES.
// `qkv` rows hold all_heads heads, queries first.
extern "C" __global__ void attention_thread(const float* qkv, const int* slot, const int* pos,
                                            const unsigned long long* tree, const int* page_table,
                                            const CACHE* keys, const CACHE* values, float* out,
                                            int rows, int heads, int kv_heads, int slots,
                                            int max_pages, int page_shift, float scale,
                                            int queries) {
  wait_for_kernel_before();
  const Pages pages = {page_table, slots, max_pages, page_shift, kv_heads, HEAD_DIM};
  const int kv_head = blockIdx.y;
  const int group = heads / kv_heads;
  const int begin = blockIdx.x * queries;
  const int count = begin + queries < rows * group ? queries : rows * group - begin;
  Query query[QUERIES];
  Tile tile;
  for (int i = 0; i < TILE * WIDTH; ++i) tile.key[i] = tile.value[i] = 0.0f;
  int longest = -1;
  for (int i = 0; i < count; ++i) {
    Query& q = query[i];
    q.row = (begin + i) / group;
    q.slot = slot[q.row];
    q.last = row_is_live(pages, q.slot, pos[q.row]) ? pos[q.row] : -1;
    q.path = path_at(tree, q.row, q.last);
    q.top = -3.0e38f;
    q.mass = 0.0f;
    longest = q.last > longest ? q.last : longest;
    const int head = kv_head * group + (begin + i) % group;
    const float* from =
        qkv + (static_cast<long long>(q.row) * (heads + 2 * kv_heads) + head) * HEAD_DIM;
    for (int d = 0; d < WIDTH; ++d) {
      q.of[d] = d < HEAD_DIM ? from[d] * scale : 0.0f;
      q.sum[d] = 0.0f;
    }
  }
  for (int first = 0; first <= longest; first += TILE) {
    tile.slot = -1;
    for (int i = 0; i < count; ++i) {
      const int seen = query[i].last - first + 1 < TILE ? query[i].last - first + 1 : TILE;
      if (seen <= 0) continue;
      bring(tile, query[i], pages, keys, values, kv_head, first, seen);
      attend(query[i], tile, seen);
    }
  }
  for (int i = 0; i < count; ++i) {
    const int head = kv_head * group + (begin + i) % group;
    float* y = out + (static_cast<long long>(query[i].row) * heads + head) * HEAD_DIM;
    const float inverse = query[i].last < 0 ? 0.0f : 1.0f / query[i].mass;
    for (int d = 0; d < HEAD_DIM; ++d) y[d] = query[i].sum[d] * inverse;
  }
}
