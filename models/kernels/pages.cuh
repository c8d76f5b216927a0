// Where a position of a slot lies in the paged cache.
#pragma once
#include "graft.cuh"

// Pages hold 2^page_shift positions of [kv_heads, HEAD_DIM]. Table entries of positions that were
// never allocated name the scratch page, which is never written.
struct Pages {
  const int* table;  // [slots, max_pages]
  int slots;
  int max_pages;
  int page_shift;
  int kv_heads;
};

// A padding row, or one beyond the table, reads and writes nothing.
__device__ __forceinline__ bool row_is_live(const Pages& pages, int slot, int pos) {
  return slot >= 0 && slot < pages.slots && pos >= 0 && (pos >> pages.page_shift) < pages.max_pages;
}

__device__ __forceinline__ int page_of(const Pages& pages, int slot, int pos) {
  return pages.table[static_cast<long long>(slot) * pages.max_pages + (pos >> pages.page_shift)];
}

// Index of the first element of (page, position, head).
__device__ __forceinline__ long long element_of(const Pages& pages, int page, int pos, int head) {
  const long long at =
      (static_cast<long long>(page) << pages.page_shift) + (pos & ((1 << pages.page_shift) - 1));
  return (at * pages.kv_heads + head) * HEAD_DIM;
}
