// Functions that several model kernels use: arithmetic, and addresses in the paged KV cache. The
// arithmetic gives the same bits on every device. It is written such that C++ compilers, which
// compile the kernels for the soft device, can vectorize it.
#pragma once
#include "graft.cuh"

// Returns e^x for x of at most 88, with a relative error of about 1e-7. An x below -87 gives e^-87,
// and NaN gives NaN.
//
// With x = n ln2 + r and |r| <= ln2 / 2, e^r is computed as a Taylor series up to r^7, and n is
// added to the exponent of the result.
__device__ __forceinline__ float exp_bounded(float x) {
  x = x < -87.0f ? -87.0f : x;
  const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const float rounded = fmaf(x, 1.44269504088896341f, shift);
  const float n = rounded - shift;
  float r = fmaf(n, -0.693145751953125f, x);  // high part of ln 2; its product with n is exact
  r = fmaf(n, -1.42860682030941723e-6f, r);
  float p = 1.98412698e-4f;
  p = fmaf(p, r, 1.38888889e-3f);
  p = fmaf(p, r, 8.33333333e-3f);
  p = fmaf(p, r, 4.16666667e-2f);
  p = fmaf(p, r, 1.66666667e-1f);
  p = fmaf(p, r, 0.5f);
  p = fmaf(p, r, 1.0f);
  p = fmaf(p, r, 1.0f);
  // p times 2^n. The power of two is a normal number, so the product is exact. If x is NaN, p is
  // NaN, and so is the result. A plain product could be contracted with a later sum.
  return fmaf(p, __uint_as_float((__float_as_uint(rounded) << 23) + 0x3f800000u), 0.0f);
}

// Returns e^x as exp_bounded does, and e^88 for x above 88.
__device__ __forceinline__ float exp_exact(float x) { return exp_bounded(x > 88.0f ? 88.0f : x); }

// SwiGLU (Shazeer, 2020): silu(gate) * up.
__device__ __forceinline__ float gated(float gate, float up) {
  return gate / (1.0f + exp_exact(-gate)) * up;
}

// Sums COUNT values (a power of two) in a fixed tree, folding the halves onto each other. The
// values are overwritten. The function is recursive instead of an outer loop over the levels of the
// tree, because compilers vectorize the inner loop only if they have unrolled the outer one.
template <int COUNT>
__device__ __forceinline__ float tree_sum(float* values) {
  if constexpr (COUNT == 1) {
    return values[0];
  } else {
#pragma unroll
    for (int i = 0; i < COUNT / 2; ++i) values[i] += values[i + COUNT / 2];
    return tree_sum<COUNT / 2>(values);
  }
}

// Counts the block at a counter of `blocks` blocks. Returns whether all blocks have now been
// counted, and then sets the counter to zero. The caller then sees what the other blocks wrote
// before they were counted. Called by one thread after a barrier, and followed by a barrier.
__device__ __forceinline__ bool arrive(unsigned int* arrived, int blocks) {
  const unsigned int highest = static_cast<unsigned int>(blocks) - 1u;
  __threadfence();
  const bool is_last = atomicInc(arrived, highest) == highest;
  __threadfence();
  return is_last;
}

// Returns whether this block is the last of `blocks` blocks to call the function with the same
// counter. The last block sees what the other blocks wrote before their calls. All threads of the
// block call the function; `last` is in shared memory. The counter must be zero and is left zero.
__device__ __forceinline__ bool is_last_block(unsigned int* arrived, int blocks, int* last) {
  __syncthreads();
  if (threadIdx.x == 0) *last = arrive(arrived, blocks);
  __syncthreads();
  return *last != 0;
}

// Layout of the paged KV cache.
//
// A page has 2^page_shift positions of [kv_heads, head_dim] elements. Page table entries of
// positions that are not allocated contain the number of the scratch page, which is never written.
struct Pages {
  const int* table;  // [slots, max_pages]
  int slots;
  int max_pages;
  int page_shift;
  int kv_heads;
  int head_dim;
};

// Returns whether a row may access the KV cache. Padding rows, and rows whose slot or position is
// outside the page table, must not.
__device__ __forceinline__ bool row_is_live(const Pages& pages, int slot, int pos) {
  return slot >= 0 && slot < pages.slots && pos >= 0 && (pos >> pages.page_shift) < pages.max_pages;
}

// Returns the page that contains a cache position of a slot.
__device__ __forceinline__ int page_of(const Pages& pages, int slot, int pos) {
  return pages.table[static_cast<long long>(slot) * pages.max_pages + (pos >> pages.page_shift)];
}

// Returns the index of the first element of (page, position, head).
__device__ __forceinline__ long long element_of(const Pages& pages, int page, int pos, int head) {
  const long long at =
      (static_cast<long long>(page) << pages.page_shift) + (pos & ((1 << pages.page_shift) - 1));
  return (at * pages.kv_heads + head) * pages.head_dim;
}

// Addressing of the cached positions of a draft tree. Row 0 of a tree is the last committed token.
// Draft j is cached j positions after row 0, regardless of its depth in the tree. A row uses its
// path to find the keys of its ancestors, and reads them in the order of their sequence positions.
// Its sums therefore have the same bits as if the path were a chain.
struct Path {
  // Bit mask: bit j - 1 is set if draft j is on the path from the root to this row, inclusive. The
  // mask is 0 if the row is cached at its sequence position.
  unsigned long long drafts;
  int base;  // position of row 0 of the tree
};

// Returns the path of a row at sequence position `pos`. ancestors[row] is Path::drafts of the row;
// `ancestors` is null if no row belongs to a draft tree.
__device__ __forceinline__ Path path_at(const unsigned long long* ancestors, int row, int pos) {
  const unsigned long long drafts = ancestors == nullptr ? 0 : ancestors[row];
  return {drafts, pos - __popcll(drafts)};
}

// Returns the cache position of the row that has sequence position `pos` on a path.
__device__ __forceinline__ int cached_at(const Path& path, int pos) {
  if (path.drafts == 0 || pos <= path.base) return pos;
  unsigned long long rest = path.drafts;
  for (int above = pos - path.base - 1; above > 0; --above) rest &= rest - 1;
  return path.base + __ffsll(static_cast<long long>(rest));
}
