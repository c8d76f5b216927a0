// Compacts the KV cache after the verification of a draft tree: moves the entries of the accepted
// path to the positions that the same tokens would have in a chain.
//
// Row 0 of a tree is the last committed token and row j is draft j. Row j is cached j positions
// after row 0. Entry i of the accepted path is row from[i] of the tree. Its keys and values must
// therefore move from position from[i] to position i, counted from row 0. Row numbers increase
// along a path, so from[i] >= i. The entries are moved in ascending order, so an entry is never
// overwritten before it has been moved.
#ifndef CACHE
#define CACHE bf16_t
#endif
#include "model.cuh"
#include "sampling/kernels/slot.cuh"

// Grid: (batch rows, layers). `layer` is the distance between the keys of two layers, and `item` is
// the size of one position, kv_heads * head_dim. Both are numbers of elements.
extern "C" __global__ void compact_cache(CACHE* keys, CACHE* values, long long layer,
                                         const int* row_slot, const RoundRow* rows, int row_words,
                                         const int* page_table, int slots, int max_pages,
                                         int page_shift, int item) {
  const int b = static_cast<int>(blockIdx.x);
  const int s = row_slot[b];
  if (s < 0) return;
  const RoundRow* row = round_row(rows, row_words, b);
  const int* from = reinterpret_cast<const int*>(row + 1) + row_width(row_words);
  const Pages pages = {page_table, slots, max_pages, page_shift, 1, item};
  const long long at = static_cast<long long>(blockIdx.y) * layer;
  for (int i = 1; i < row->count; ++i) {
    if (from[i] == i) continue;
    const int source = row->old_n + from[i];
    const int target = row->old_n + i;
    const long long of = at + element_of(pages, page_of(pages, s, source), source, 0);
    const long long to = at + element_of(pages, page_of(pages, s, target), target, 0);
    for (int e = static_cast<int>(threadIdx.x); e < item; e += static_cast<int>(blockDim.x)) {
      keys[to + e] = keys[of + e];
      values[to + e] = values[of + e];
    }
  }
}

// Moves rows of `array` [rows, columns], which has one row per forward row (input token of the
// target), like compact_cache moves cache entries. Entry i of the accepted path is row from[i] of a
// tree; it is copied to row i of the tree. The tree of batch row b begins at row first_row[b] of
// the array. Grid: (batch rows).
extern "C" __global__ void compact_rows(float* array, const int* first_row, int columns,
                                        const int* row_slot, const RoundRow* rows, int row_words) {
  const int b = static_cast<int>(blockIdx.x);
  if (row_slot[b] < 0) return;
  const RoundRow* row = round_row(rows, row_words, b);
  const int* from = reinterpret_cast<const int*>(row + 1) + row_width(row_words);
  for (int i = 1; i < row->count; ++i) {
    if (from[i] == i) continue;
    float* to = array + static_cast<long long>(first_row[b] + i) * columns;
    const float* of = array + static_cast<long long>(first_row[b] + from[i]) * columns;
    for (int e = static_cast<int>(threadIdx.x); e < columns; e += static_cast<int>(blockDim.x)) {
      to[e] = of[e];
    }
  }
}
