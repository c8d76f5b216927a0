// Applies RoPE to queries (in place) and keys, and writes keys and values to the KV cache.
// RoPE rotates dimension i together with dimension i + HEAD_DIM / 2. Each thread rotates CHUNK of
// these pairs of dimensions of one head.
#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
#ifndef CACHE
#define CACHE bf16_t
#endif
#ifndef CHUNK
#define CHUNK 1
#endif
#include "model.cuh"

#define HALF (HEAD_DIM / 2)

// A row of `qkv` has `heads` queries, `kv_heads` keys and `kv_heads` values. A row of `rope_table`
// has the cosines and then the sines of a position. `ancestors` is null if no row belongs to a
// draft tree. Padding rows are skipped. Keys and values are not written for positions without a
// page, that is, where the page table contains `scratch_page`.
extern "C" __global__ void rope_and_store(float* qkv, int rows, const float* rope_table,
                                          const int* slot, const int* pos,
                                          const unsigned long long* ancestors,
                                          const int* page_table, CACHE* keys, CACHE* values,
                                          int heads, int kv_heads, int slots, int max_pages,
                                          int page_shift, int scratch_page) {
  wait_for_previous_kernel();
  const int chunks = (HALF + CHUNK - 1) / CHUNK;
  const int all_heads = heads + 2 * kv_heads;
  const int index = blockIdx.x * blockDim.x + threadIdx.x;
  const int row = index / (all_heads * chunks);
  if (row >= rows) return;
  const int head = index / chunks % all_heads;
  const int begin = index % chunks * CHUNK;
  const int end = begin + CHUNK < HALF ? begin + CHUNK : HALF;
  const Pages pages = {page_table, slots, max_pages, page_shift, kv_heads, HEAD_DIM};
  const int p = pos[row];
  if (!row_is_live(pages, slot[row], p)) return;
  float* x = qkv + (static_cast<long long>(row) * all_heads + head) * HEAD_DIM;
  const float* cosine = rope_table + static_cast<long long>(p) * HEAD_DIM;
  const float* sine = cosine + HALF;
  if (head < heads) {
    for (int i = begin; i < end; ++i) {
      const float a = x[i];
      const float b = x[i + HALF];
      x[i] = fmaf(a, cosine[i], -(b * sine[i]));
      x[i + HALF] = fmaf(b, cosine[i], a * sine[i]);
    }
    return;
  }
  const int cached = cached_at(path_at(ancestors, row, p), p);
  const int page = page_of(pages, slot[row], cached);
  if (page == scratch_page) return;
  if (head < heads + kv_heads) {
    CACHE* to = keys + element_of(pages, page, cached, head - heads);
    for (int i = begin; i < end; ++i) {
      const float a = x[i];
      const float b = x[i + HALF];
      from_float(fmaf(a, cosine[i], -(b * sine[i])), to + i);
      from_float(fmaf(b, cosine[i], a * sine[i]), to + i + HALF);
    }
    return;
  }
  CACHE* to = values + element_of(pages, page, cached, head - heads - kv_heads);
  for (int i = begin; i < end; ++i) {
    from_float(x[i], to + i);
    from_float(x[i + HALF], to + i + HALF);
  }
}
