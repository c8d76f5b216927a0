// Admission of a request to a slot, and leaving it. One thread each; a request comes by value, so
// nothing that the host may overwrite is read later.
#include "slot.cuh"

extern "C" __global__ void slot_join(Slot* slots, int slot, const Slot request) {
  slots[slot] = request;
  float reach = 1.0f;
  for (int j = 0; j < MAX_DRAFTS; ++j) slots[slot].reach[j] = reach *= REACH_FIRST;
}

extern "C" __global__ void slot_leave(Slot* slots, int slot) {
  slots[slot].active = 0;
  slots[slot].draft_len = 0;
}
