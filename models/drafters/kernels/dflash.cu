// Lays out the rows of a block drafter's forward pass. A block is the rows of one request, one row
// per level. Rows are ordered by level and then by request, so the logits of a level are
// contiguous.
#include "sampling/kernels/slot.cuh"

// Row i * batch + b of the forward pass is row i of the block of batch row b (one request of the
// batch), at position n + i, where n is the position of the request's last committed token. Row 0
// of a block has this token, and the other rows have the token `mask`. As in the published code,
// the forward pass processes whole blocks, also at positions after the request's limit. Rows at
// positions for which the slot cannot have pages (`Slot.capacity`) are padding. Row r attends to
// positions 0..last[r], where last[r] is the last position of its block that is not padding.
extern "C" __global__ void block_rows(const int* row_slot, const Slot* slots, const RoundRow* rows,
                                      int row_words, int batch, int width, int mask, int* token,
                                      int* slot, int* pos, int* last) {
  const int r = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (r >= batch * width) return;
  const int b = r % batch;
  const int i = r / batch;
  const int s = row_slot[b];
  const bool used = s >= 0 && round_row(rows, row_words, b)->count > 0 && slots[s].active &&
                    slots[s].n + i < slots[s].capacity;
  const int end = used ? slots[s].n + width : 0;
  token[r] = !used ? 0 : i == 0 ? slots[s].last : mask;
  slot[r] = used ? s : -1;
  pos[r] = used ? slots[s].n + i : -1;
  last[r] = used && end > slots[s].capacity ? slots[s].capacity - 1 : end - 1;
}
