// Data exchange between a round on the device and a drafter function on the host.
#include "sampling/kernels/slot.cuh"

#define FAILED -2  // the host writes this value as the first draft if the drafter function failed

// Writes slot, epoch, position and token of every input row of the drafter to host memory. Padding
// rows have slot -1. The epoch of a slot distinguishes the requests that use the slot one after
// another.
extern "C" __global__ void copy_rows_to_host(const int* token, const int* slot, const int* pos,
                                             int rows, const Slot* slots, int* host_rows) {
  for (int r = threadIdx.x; r < rows; r += blockDim.x) {
    host_rows[4 * r] = slot[r];
    host_rows[4 * r + 1] = slot[r] >= 0 && slots != nullptr ? slots[slot[r]].epoch : 0;
    host_rows[4 * r + 2] = pos[r];
    host_rows[4 * r + 3] = token[r];
  }
}

// Deactivates the requests for which the drafter function has failed; the host has written FAILED
// as their first draft.
extern "C" __global__ void end_failed(const int* row_slot, int batch, const int* proposal,
                                      int max_drafts, Slot* slots) {
  for (int b = threadIdx.x; b < batch; b += blockDim.x) {
    if (row_slot[b] >= 0 && proposal[b * max_drafts] == FAILED) slots[row_slot[b]].active = 0;
  }
}
