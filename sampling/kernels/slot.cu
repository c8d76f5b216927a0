// Kernels of one thread each: slot_join assigns a slot to a request, slot_leave frees it. The
// request is passed by value, so that the host may change its copy after the launch.
#include "slot.cuh"

extern "C" __global__ void slot_join(Slot* slots, int slot, const Slot request) {
  slots[slot] = request;
  float prob = 1.0f;
  for (int j = 0; j < MAX_DRAFTS; ++j) {
    prob *= ACCEPT_PROB_INITIAL;
    slots[slot].accept_prob[j] = prob;
  }
}

extern "C" __global__ void slot_leave(Slot* slots, int slot) {
  slots[slot].active = 0;
  slots[slot].draft_len = 0;
}
