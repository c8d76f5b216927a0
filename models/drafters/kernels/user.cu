// Between a round and a drafter on the host.
#include "sampling/kernels/slot.cuh"

#define FAILED -2  // in place of a request's first draft

// Tells which token stands where: slot (-1: nothing), epoch, position and token of every row.
extern "C" __global__ void tell_rows(const int* token, const int* slot, const int* pos, int rows,
                                     const Slot* slots, int* told) {
  for (int r = threadIdx.x; r < rows; r += blockDim.x) {
    told[4 * r] = slot[r];
    told[4 * r + 1] = slot[r] >= 0 && slots != nullptr ? slots[slot[r]].epoch : 0;
    told[4 * r + 2] = pos[r];
    told[4 * r + 3] = token[r];
  }
}

// Ends the requests that the drafter has failed.
extern "C" __global__ void end_failed(const int* row_slot, int batch, const int* proposal, int most,
                                      Slot* slots) {
  for (int b = threadIdx.x; b < batch; b += blockDim.x) {
    if (row_slot[b] >= 0 && proposal[b * most] == FAILED) slots[row_slot[b]].active = 0;
  }
}
