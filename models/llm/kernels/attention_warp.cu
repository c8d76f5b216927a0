// Causal attention over the KV cache without tensor cores, with one block of WARPS warps for each
// row and head. A row attends to positions 0..pos of its slot. A row of a draft tree attends to the
// committed positions and to the drafts on its path. In grouped-query attention consecutive query
// heads share a KV head.
//
// Reduction order: positions are divided into tiles of 32 that start at position 0. Warp w
// processes tiles w, w + WARPS, ... with an online softmax, in which each lane computes the score
// of one position. The results of the warps are combined in order. Masked positions contribute
// exact zeros. The order depends only on the position of the row, so the kernel is row
// invariant.
#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
#ifndef CACHE
#define CACHE bf16_t
#endif
#ifndef OUT
#define OUT float
#endif
#include "model.cuh"

#define WARPS 4
#define PER_LANE ((HEAD_DIM + 31) / 32)
#define PACK (HEAD_DIM % 8 == 0 ? 8 : 2)
#define LOWEST -3.0e38f

struct alignas(sizeof(CACHE) * PACK > 16 ? 16 : sizeof(CACHE) * PACK) KeyPack {
  CACHE item[PACK];
};

// Returns the dot product of the query with one key.
__device__ __forceinline__ float dot_key(const float* query, const CACHE* key) {
  float partial[PACK] = {};
#pragma unroll 4
  for (int d = 0; d < HEAD_DIM; d += PACK) {
    const KeyPack pack = *reinterpret_cast<const KeyPack*>(key + d);
#pragma unroll
    for (int i = 0; i < PACK; ++i) {
      partial[i] = fmaf(query[d + i], to_float(pack.item[i]), partial[i]);
    }
  }
  return tree_sum<PACK>(partial);
}

// Grid: (heads, rows). A row of `qkv` has heads + 2 kv_heads heads, queries first.
extern "C" __global__ void attention_warp(const float* qkv, const int* slot, const int* pos,
                                          const unsigned long long* ancestors,
                                          const int* page_table, const CACHE* keys,
                                          const CACHE* values, OUT* out, int rows, int heads,
                                          int kv_heads, int slots, int max_pages, int page_shift,
                                          float scale) {
  wait_for_previous_kernel();
  __shared__ float query[HEAD_DIM];
  __shared__ float part_top[WARPS];
  __shared__ float part_mass[WARPS];
  __shared__ float part_sum[WARPS][HEAD_DIM];
  const int head = blockIdx.x;
  const int row = blockIdx.y;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const Pages pages = {page_table, slots, max_pages, page_shift, kv_heads, HEAD_DIM};
  const int s = slot[row];
  const int last = pos[row];
  OUT* y = out + (static_cast<long long>(row) * heads + head) * HEAD_DIM;
  if (!row_is_live(pages, s, last)) {
    for (int d = threadIdx.x; d < HEAD_DIM; d += WARPS * 32) from_float(0.0f, y + d);
    return;
  }
  const float* from =
      qkv + (static_cast<long long>(row) * (heads + 2 * kv_heads) + head) * HEAD_DIM;
  const int kv_head = head / (heads / kv_heads);
  for (int d = threadIdx.x; d < HEAD_DIM; d += WARPS * 32) query[d] = from[d] * scale;
  __syncthreads();

  const Path path = path_at(ancestors, row, last);
  float sum[PER_LANE] = {};
  float top = LOWEST;
  float mass = 0.0f;
  for (int first = warp * 32; first <= last; first += WARPS * 32) {
    const int count = last - first + 1 < 32 ? last - first + 1 : 32;
    const int own = cached_at(path, first + (lane < count ? lane : 0));
    const long long at = element_of(pages, page_of(pages, s, own), own, kv_head);
    float score = dot_key(query, keys + at);
    score = lane < count ? score : LOWEST;
    const float tile_top = warp_max(score > top ? score : top);
    const float e = exp_exact(score - tile_top);
    const float weight = lane < count ? e : 0.0f;
    const float shrink = exp_exact(top - tile_top);
    mass = fmaf(mass, shrink, warp_sum(weight));
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) sum[i] *= shrink;
    for (int j = 0; j < count; ++j) {
      const float w = __shfl_sync(FULL_WARP, weight, j);
      const long long of = __shfl_sync(FULL_WARP, at, j);
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i) {
        const int d = lane + 32 * i;
        if (d < HEAD_DIM) sum[i] = fmaf(w, to_float(values[of + d]), sum[i]);
      }
    }
    top = tile_top;
  }
  if (lane == 0) {
    part_top[warp] = top;
    part_mass[warp] = mass;
  }
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    if (lane + 32 * i < HEAD_DIM) part_sum[warp][lane + 32 * i] = sum[i];
  }
  __syncthreads();

  for (int d = threadIdx.x; d < HEAD_DIM; d += WARPS * 32) {
    float all_top = part_top[0];
    for (int w = 1; w < WARPS; ++w) all_top = part_top[w] > all_top ? part_top[w] : all_top;
    float all_mass = 0.0f;
    float all_sum = 0.0f;
    for (int w = 0; w < WARPS; ++w) {
      // A warp that has processed no positions has mass 0 and adds exact zeros.
      const float shrink = part_mass[w] > 0.0f ? exp_exact(part_top[w] - all_top) : 0.0f;
      all_mass = fmaf(part_mass[w], shrink, all_mass);
      all_sum = fmaf(part_sum[w][d], shrink, all_sum);
    }
    from_float(all_sum / all_mass, y + d);
  }
}
