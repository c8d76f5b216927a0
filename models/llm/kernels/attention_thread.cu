// Causal attention over the KV cache for the soft device, which runs kernels on the CPU. A thread
// computes several queries of one KV head without barriers. In grouped-query attention consecutive
// query heads share a KV head. A row attends to positions 0..pos of its slot. A row of a draft tree
// attends to the committed positions and to the drafts on its path.
//
// Reduction order: online softmax (Milakov and Gimelshein, 2018) over tiles of TILE positions, in
// order from position 0. Positions to which a query must not attend are skipped. The order depends
// only on the position of the row, so the kernel is row invariant. A tile of keys and values is
// converted to floats once for all queries that attend to the same positions.
#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
#ifndef CACHE
#define CACHE bf16_t
#endif
#include "pairs.cuh"

#define TILE 32
#define LOWEST -3.0e38f
#define QUERIES 48
#define PARTS ((HEAD_DIM + 2 * LANES - 1) / (2 * LANES))  // registers of type Pair per head
#define WIDTH (PARTS * 2 * LANES)
#define KEYS (WIDE ? 8 : 4)         // a call of score_keys processes 2 * KEYS keys
#define MAX_QUERIES (WIDE ? 4 : 1)  // maximum queries per call of attend
static_assert(TILE == 4 * LANES && TILE % (2 * KEYS) == 0, "see softmax_weights and attend");

struct Query {
  int row;
  int slot;
  int last;  // position of the row; -1 for padding
  Path path;
  float top;
  float mass;
  alignas(64) float of[WIDTH];  // scaled query, padded with zeros
  alignas(64) float sum[WIDTH];
};

// Keys and values of a tile as floats. Keys are stored in groups of 2 * KEYS keys. A group stores
// the first LANES dimensions of all its keys, then the next LANES dimensions of all, and so on.
struct Tile {
  int slot;
  int row;  // draft-tree row whose path the tile has; -1: cache positions in sequence order
  int count;
  alignas(64) float key[TILE * WIDTH];
  alignas(64) float value[TILE * WIDTH];
};

// Returns whether all positions before `end` on the path of `query` are cached in sequence order.
// In a draft tree, positions after the root may be cached in another order.
__device__ __forceinline__ bool in_order(const Query& query, int end) {
  return query.path.drafts == 0 || end - 1 <= query.path.base;
}

// Loads the keys and values of positions first .. first + count - 1 of the sequence that ends with
// the row of `query`. In a draft tree, this sequence follows Query::path. Positions that the tile
// already contains are not loaded again.
__device__ __forceinline__ void load_tile(Tile& tile, const Query& query, const Pages& pages,
                                          const CACHE* keys, const CACHE* values, int kv_head,
                                          int first, int count) {
  const int row = in_order(query, first + count) ? -1 : query.row;
  if (tile.slot != query.slot || tile.row != row) tile.count = 0;
  tile.slot = query.slot;
  tile.row = row;
  for (; tile.count < count; ++tile.count) {
    const int cached = cached_at(query.path, first + tile.count);
    const long long at = element_of(pages, page_of(pages, query.slot, cached), cached, kv_head);
    const int of = tile.count % (2 * KEYS);
    float* key = tile.key + (tile.count - of) * WIDTH + of * LANES;
    float* value = tile.value + tile.count * WIDTH;
    int d = 0;
    for (; d + LANES <= HEAD_DIM; d += LANES) {
      store_lanes(key + d * 2 * KEYS, load_lanes(keys + at + d));
      store_lanes(value + d, load_lanes(values + at + d));
    }
    if (d < HEAD_DIM) {
      pad(keys + at + d, HEAD_DIM - d, key + d * 2 * KEYS);
      pad(values + at + d, HEAD_DIM - d, value + d);
    }
  }
}

// Returns whether `query` attends to all TILE positions from `first` on, and the keys and values in
// `tile` are those of its slot.
__device__ __forceinline__ bool covers_tile(const Tile& tile, const Query& query, int first) {
  const int end = first + TILE;
  return tile.slot == query.slot && query.last >= end - 1 && in_order(query, end);
}

// Computes the dot products of COUNT queries with 2 * KEYS keys. Each dot product has LANES partial
// sums; partial sum i adds dimensions i, i + LANES, ... in order.
template <int COUNT>
__device__ __forceinline__ void score_keys(const Query* query, const float* key, int at,
                                           float (*score)[TILE]) {
  Pair partial[COUNT][KEYS] = {};
  for (int d = 0; d < WIDTH; d += LANES) {
    Pair q[COUNT];
    UNROLLED for (int i = 0; i < COUNT; ++i) q[i] = load_twice(query[i].of + d);
    UNROLLED for (int j = 0; j < KEYS; ++j) {
      const Pair k = load_pair(key + (d * KEYS + j * LANES) * 2);
      UNROLLED for (int i = 0; i < COUNT; ++i) partial[i][j] = fma_pair(q[i], k, partial[i][j]);
    }
  }
  UNROLLED for (int i = 0; i < COUNT; ++i) {
    fold_pairs<KEYS>(partial[i], reinterpret_cast<float (*)[2]>(score[i] + at));
  }
}

// Replaces the scores of `count` positions by softmax weights, and updates the maximum score and
// the mass (sum of weights) of COUNT queries. `shrink` receives, for each query, the factor by
// which its sums over earlier tiles must be multiplied. The weights of a tile are added in the
// order of a fixed binary tree.
template <int COUNT>
__device__ __forceinline__ void softmax_weights(Query* query, float (*score)[TILE], int count,
                                                float* shrink) {
  // A NaN score `a` must not become the maximum: a > b is false for NaN, so the result is b, the
  // maximum so far.
  const auto greater = [](Lanes a, Lanes b) { return a > b ? a : b; };
  Lanes tops[LANES] = {}, mass[LANES] = {};
  for (int i = 0; i < COUNT; ++i) {
    for (int j = count; j < TILE; ++j) score[i][j] = LOWEST;
    UNROLLED for (int l = 0; l < LANES; ++l) tops[i][l] = query[i].top;
    UNROLLED for (int j = 0; j < TILE; j += LANES) {
      tops[i] = greater(load_lanes(score[i] + j), tops[i]);
    }
  }
  const Lanes top = fold_eight(tops, greater);
  for (int i = 0; i < COUNT; ++i) {
    for (int j = 0; j < TILE; ++j) score[i][j] = exp_exact(score[i][j] - top[i]);
    for (int j = count; j < TILE; ++j) score[i][j] = 0.0f;
    const float* const x = score[i];
    mass[i] = (load_lanes(x) + load_lanes(x + 2 * LANES)) +
              (load_lanes(x + LANES) + load_lanes(x + 3 * LANES));
  }
  const Lanes mass_of = sum_eight(mass);
  for (int i = 0; i < COUNT; ++i) shrink[i] = query[i].top - top[i];
  for (int i = 0; i < COUNT; ++i) shrink[i] = exp_exact(shrink[i]);
  for (int i = 0; i < COUNT; ++i) {
    query[i].mass = fmaf(query[i].mass, shrink[i], mass_of[i]);
    query[i].top = top[i];
  }
}

// Multiplies the sums of COUNT queries by `shrink` and adds the weighted values of `count`
// positions, one position at a time, for the 2 * LANES * PAIRS dimensions that begin at dimension
// `at`.
template <int COUNT, int PAIRS>
__device__ __forceinline__ void add_values(Query* query, const float (*weight)[TILE],
                                           const float* shrink, const float* value, int at,
                                           int count) {
  Pair total[COUNT][PAIRS];
  UNROLLED for (int i = 0; i < COUNT; ++i) {
    UNROLLED for (int p = 0; p < PAIRS; ++p) {
      total[i][p] = scaled(load_pair(query[i].sum + at + p * 2 * LANES), shrink[i]);
    }
  }
  for (int j = 0; j < count; ++j) {
    Pair w[COUNT];
    UNROLLED for (int i = 0; i < COUNT; ++i) w[i] = broadcast(weight[i][j]);
    UNROLLED for (int p = 0; p < PAIRS; ++p) {
      const Pair v = load_pair(value + j * WIDTH + at + p * 2 * LANES);
      UNROLLED for (int i = 0; i < COUNT; ++i) total[i][p] = fma_pair(w[i], v, total[i][p]);
    }
  }
  UNROLLED for (int i = 0; i < COUNT; ++i) {
    UNROLLED for (int p = 0; p < PAIRS; ++p) {
      store_pair(query[i].sum + at + p * 2 * LANES, total[i][p]);
    }
  }
}

// Lets COUNT queries attend to the first `count` positions of a tile: updates the maximum score,
// the mass (sum of weights) and the weighted sums of values of each query.
template <int COUNT>
__device__ __noinline__ void attend(Query* query, const Tile& tile, int count) {
  float score[COUNT][TILE], shrink[COUNT];
  for (int j = 0; j < TILE; j += 2 * KEYS) {
    constexpr int AT_ONCE = COUNT < 2 ? COUNT : 2;
    for (int i = 0; i < COUNT; i += AT_ONCE) {
      score_keys<AT_ONCE>(query + i, tile.key + j * WIDTH, j, score + i);
    }
  }
  softmax_weights<COUNT>(query, score, count, shrink);
  int at = 0;
  for (; at + 8 * LANES <= WIDTH; at += 8 * LANES) {
    add_values<COUNT, 4>(query, score, shrink, tile.value, at, count);
  }
  if constexpr (PARTS % 4 != 0) {
    add_values<COUNT, PARTS % 4>(query, score, shrink, tile.value, at, count);
  }
}

// Grid: (queries of all rows per KV head / `queries`, kv_heads); one thread per block. `queries` is
// the number of queries per thread, at most QUERIES. The queries that share a KV head are ordered
// by row, then by head. A row of `qkv` has heads + 2 kv_heads heads, queries first.
extern "C" __global__ void attention_thread(const float* qkv, const int* slot, const int* pos,
                                            const unsigned long long* ancestors,
                                            const int* page_table, const CACHE* keys,
                                            const CACHE* values, float* out, int rows, int heads,
                                            int kv_heads, int slots, int max_pages, int page_shift,
                                            float scale, int queries) {
  wait_for_previous_kernel();
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
    q.path = path_at(ancestors, q.row, q.last);
    q.top = LOWEST;
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
    for (int i = 0; i < count;) {
      const int seen = query[i].last - first + 1 < TILE ? query[i].last - first + 1 : TILE;
      int together = 1;
      if (seen > 0) {
        load_tile(tile, query[i], pages, keys, values, kv_head, first, seen);
        while (together < MAX_QUERIES && i + together < count &&
               covers_tile(tile, query[i + together], first)) {
          ++together;
        }
        if (seen < TILE || tile.row >= 0) together = 1;
        if (together == MAX_QUERIES) {
          attend<MAX_QUERIES>(query + i, tile, seen);
        } else if (together >= 2) {
          attend<(MAX_QUERIES + 1) / 2>(query + i, tile, seen);
          together = 2;
        } else {
          attend<1>(query + i, tile, seen);
        }
      }
      i += together;
    }
  }
  for (int i = 0; i < count; ++i) {
    const int head = kv_head * group + (begin + i) % group;
    float* y = out + (static_cast<long long>(query[i].row) * heads + head) * HEAD_DIM;
    const float inverse = query[i].last < 0 ? 0.0f : 1.0f / query[i].mass;
    for (int d = 0; d < HEAD_DIM; ++d) y[d] = query[i].sum[d] * inverse;
  }
}
