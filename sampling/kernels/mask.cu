// Applies token bitmasks to logits in place: the logits of illegal tokens become -inf.
//
// Row r of the logits uses row mask_row[r] of `mask`, or row r if `mask_row` is null. If
// mask_row[r] is negative, the row of logits is left unchanged. A mask row has one bit per target
// id, 32 ids per word. If `d2t` is not null, the columns of the logits are ids of a drafter's own
// vocabulary, and d2t[column] is the target id.
#include "row.cuh"

template <class T>
__device__ __forceinline__ void mask_apply(T* logits, int columns, const unsigned int* mask,
                                           int mask_stride, const int* mask_row, const int* d2t,
                                           int token_limit, T minus_infinity) {
  const int r = static_cast<int>(blockIdx.y);
  const int index = mask_row ? mask_row[r] : r;
  if (index < 0) return;
  const Row row = {nullptr, columns, mask + static_cast<long long>(index) * mask_stride,
                   token_limit, d2t};
  T* out = logits + static_cast<long long>(r) * columns;
  const int lane = static_cast<int>(threadIdx.x) % LANES;
  const int warp = static_cast<int>(blockIdx.x) * WARPS + static_cast<int>(threadIdx.x) / LANES;
  const int warps = static_cast<int>(gridDim.x) * WARPS;
  // Each thread of the warp loads one mask word and broadcasts it to the other threads. The loads
  // of the warp are thus coalesced, which also matters for masks in host memory.
  const int words = (columns + 31) / 32;
  for (int group = warp * LANES; group < words; group += warps * LANES) {
    const int own = (group + lane) * 32;
    const u32 loaded = d2t || own >= columns ? 0u : legal_word<false>(row, own);
    for (int t = 0; t < LANES && group + t < words; ++t) {
      const u32 word = LANES == 1 ? loaded : __shfl_sync(FULL_WARP, loaded, t);
      const int base = (group + t) * 32;
      const int count = columns - base < 32 ? columns - base : 32;
      if (!d2t && word == 0xffffffffu) continue;
      for (int l = lane; l < count; l += LANES) {
        const bool ok = d2t ? legal<true>(row, word, base + l) : legal<false>(row, word, base + l);
        if (!ok) out[base + l] = minus_infinity;
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    mask_apply_float32(float* logits, int columns, const unsigned int* mask, int mask_stride,
                       const int* mask_row, const int* d2t, int token_limit) {
  mask_apply(logits, columns, mask, mask_stride, mask_row, d2t, token_limit,
             __uint_as_float(0xff800000u));
}

extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    mask_apply_float16(fp16_t* logits, int columns, const unsigned int* mask, int mask_stride,
                       const int* mask_row, const int* d2t, int token_limit) {
  mask_apply(logits, columns, mask, mask_stride, mask_row, d2t, token_limit, fp16_t{0xfc00u});
}

extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    mask_apply_bfloat16(bf16_t* logits, int columns, const unsigned int* mask, int mask_stride,
                        const int* mask_row, const int* d2t, int token_limit) {
  mask_apply(logits, columns, mask, mask_stride, mask_row, d2t, token_limit, bf16_t{0xff80u});
}
