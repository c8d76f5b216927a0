// Copies of mask rows from host to device memory.
#include "row.cuh"
#include "slot.cuh"

// Copies mask rows (token bitmasks, one per position to sample) of every slot of the batch to
// device memory. Block (b, i) copies mask row `first` + i of batch row b. Mask rows that the
// grammar has not filled are skipped.
extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    copy_mask_rows(const int* row_slot, int first, const int* exchange, const ExchangeLayout layout,
                   const int* host_masks, int* device_masks) {
  __shared__ int filled;
  const int index = row_slot[blockIdx.x];
  const int j = first + static_cast<int>(blockIdx.y);
  if (index < 0) return;
  if (threadIdx.x == 0) filled = read_stamp(exchange, layout, index, j).state == ROW_READY;
  block_sync();
  if (!filled) return;
  const u32* source = mask_of(host_masks, layout, index, j);
  u32* target = const_cast<u32*>(mask_of(device_masks, layout, index, j));
  for (int base = static_cast<int>(threadIdx.x); base < layout.words; base += BLOCK * LOADED) {
    u32 words[LOADED];
#pragma unroll
    for (int k = 0; k < LOADED; ++k) {
      const int w = base + k * BLOCK;
      words[k] = w < layout.words ? source[w] : 0u;
    }
#pragma unroll
    for (int k = 0; k < LOADED; ++k) {
      const int w = base + k * BLOCK;
      if (w < layout.words) target[w] = words[k];
    }
  }
}
