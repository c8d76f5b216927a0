// Per-slot sampling parameters and mask row states, as the row kernels read them.
#pragma once

#include "philox.cuh"
#include "row.cuh"

#define VERIFY_REJECTION 0
#define VERIFY_COUPLED 1
#define DRAFT_DENSE 0  // drawn from the stored table q
#define DRAFT_POINT 1  // point mass: argmax, forced, n-gram
#define MAX_STOP_IDS 8

// State of mask row `row_state` (int4 {state, epoch, position, more}) for the token after
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

// The token that the grammar forces at that row; -1: none.
__device__ __forceinline__ int forced_token(const int* row_state, int epoch, int position) {
  if (stamped_state(row_state, epoch, position) != ROW_READY) return -1;
  return row_state[3] - 1;
}

// One thread: draft j of a slot, in its state and in the record that the host reads.
__device__ __forceinline__ void keep_draft(int index, int j, int token, int kind, int replay,
                                           int* drafts, int* q_kind, int* draft_len, int* record) {
  drafts[index] = token;
  q_kind[index] = kind;
  *draft_len = j;
  record[0] = replay;
  record[1] = j;
  record[1 + j] = token;
  __threadfence_system();
}

__device__ __forceinline__ bool is_stop(const int* stop_ids, int stop_count, int token) {
  bool found = false;
  for (int i = 0; i < stop_count; ++i) found = found || stop_ids[i] == token;
  return found;
}
