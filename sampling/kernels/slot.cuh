// Per-slot sampling parameters and mask row states, as the row kernels read them.
#pragma once

#include "philox.cuh"
#include "row.cuh"

#define VERIFY_REJECTION 0
#define VERIFY_COUPLED 1
#define DRAFT_DENSE 0  // drawn from the stored table q
#define DRAFT_POINT 1  // point mass: argmax, forced, n-gram
#define MAX_STOP_IDS 8

// State of mask row `row_state` (int4 {state, epoch, position, free}) for the token after
// `position`. A stamp that is not this request's, at this position, is a row nobody filled for us.
__device__ __forceinline__ int stamped_state(const int* row_state, int epoch, int position) {
  const int state = row_state[0];
  if (row_state[1] != epoch) return ROW_NOT_READY;
  if (state == ROW_FREE) return ROW_FREE;
  return row_state[2] == position ? state : ROW_NOT_READY;
}

// Whether the slot's request has no grammar: every row is free, whatever its position. Unlike the
// states of other rows this does not change while a round drafts.
__device__ __forceinline__ bool is_unconstrained(const int* row_state, int epoch) {
  return row_state[0] == ROW_FREE && row_state[1] == epoch && row_state[3] != 0;
}

__device__ __forceinline__ bool is_stop(const int* stop_ids, int stop_count, int token) {
  bool found = false;
  for (int i = 0; i < stop_count; ++i) found = found || stop_ids[i] == token;
  return found;
}
