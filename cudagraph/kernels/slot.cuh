// What the device keeps of a request from one replay to the next, and the records it exchanges;
// for the kernels of sampling, of the round and of drafters.
#pragma once

#include "graft.cuh"

#define VERIFY_REJECTION 0
#define VERIFY_COUPLED 1
#define VERIFY_PER_TOKEN 2
#define DRAFT_DENSE 0  // drawn from the stored table q
#define DRAFT_POINT 1  // point mass: argmax, forced, n-gram
#define GREEDY_TEMPERATURE 1e-5f
#define MAX_STOP_IDS 64
#define MAX_DRAFTS 64
#define MAX_LOGPROBS 20
#define ADJUST_BIAS 1      // Slot.adjust: what is done to a request's logits, as bits
#define ADJUST_COUNTS 2    // penalties on tokens that were there before
#define ADJUST_STOPS 4     // no stop id below `earliest`
#define ADJUST_LOGPROBS 8  // nothing, but they are kept and told

// One request. Python reads this struct (sampling/state.py) and hands one over, whole, at joining.
struct Slot {
  int n;          // position of `last`
  int last;       // the last committed token
  int draft_len;  // drafts at hand
  int active;
  int epoch;  // generation of the slot; its mask rows carry it
  int limit;  // tokens are produced at positions below it
  int verify;
  int sample;  // index among the samples drawn with one seed
  unsigned long long seed;
  float temperature;  // below 1e-5: greedy
  float top_p;        // 1: off
  float min_p;        // 0: off
  int top_k;          // 0: off
  int stops;
  int stop_ids[MAX_STOP_IDS];
  int drafts[MAX_DRAFTS];  // target ids
  int q_kind[MAX_DRAFTS];  // DRAFT_*
  int adjust;              // ADJUST_*; 0: nothing, and what follows is not read
  int earliest;
  int logprobs;  // best ids told with each token
  float presence;
  float frequency;
  float repetition;
};

// What a request is told of a committed token: its log probability, and the best ids and theirs.
struct Logprobs {
  float logprob;
  int ids[MAX_LOGPROBS];
  float logprobs[MAX_LOGPROBS];
};

__device__ __forceinline__ const RowStamp* stamp_of(const int* exchange, const ExchangeLayout& x,
                                                    int slot, int j) {
  return reinterpret_cast<const RowStamp*>(exchange + static_cast<long long>(slot) * x.stride +
                                           x.stamps) +
         j;
}

__device__ __forceinline__ const unsigned int* mask_of(const int* exchange, const ExchangeLayout& x,
                                                       int slot, int j) {
  return reinterpret_cast<const unsigned int*>(exchange + static_cast<long long>(slot) * x.stride +
                                               x.masks + static_cast<long long>(j) * x.words);
}

__device__ __forceinline__ int* record_of(int* exchange, const ExchangeLayout& x, int slot,
                                          int at) {
  return exchange + static_cast<long long>(slot) * x.stride + at;
}

// The round's result of batch row b; its tokens follow it.
__device__ __forceinline__ RoundRow* round_row(RoundRow* rows, int row_words, int b) {
  return reinterpret_cast<RoundRow*>(reinterpret_cast<int*>(rows) + b * row_words);
}
__device__ __forceinline__ const RoundRow* round_row(const RoundRow* rows, int row_words, int b) {
  return reinterpret_cast<const RoundRow*>(reinterpret_cast<const int*>(rows) + b * row_words);
}

// State of a mask row for the token after `position`. A stamp that is not this request's, at this
// position, is a row nobody filled for us; the free rows of a request without a grammar (`more`)
// are so at every position.
__device__ __forceinline__ int stamped_state(const RowStamp* stamp, int epoch, int position) {
  if (stamp->epoch != epoch) return ROW_NOT_READY;
  if (stamp->state == ROW_FREE && stamp->more != 0) return ROW_FREE;
  return stamp->position == position ? stamp->state : ROW_NOT_READY;
}

// Whether the slot's request has no grammar: every row is free, whatever its position. Unlike the
// states of other rows this does not change while a round drafts.
__device__ __forceinline__ bool is_unconstrained(const RowStamp* first, int epoch) {
  return first->state == ROW_FREE && first->epoch == epoch && first->more != 0;
}

// The token that the grammar forces at that row; -1: none.
__device__ __forceinline__ int forced_token(const RowStamp* stamp, int epoch, int position) {
  if (stamped_state(stamp, epoch, position) != ROW_READY) return -1;
  return stamp->more - 1;
}

__device__ __forceinline__ bool is_stop(const Slot& slot, int token) {
  bool found = false;
  for (int i = 0; i < slot.stops; ++i) found = found || slot.stop_ids[i] == token;
  return found;
}

// Whether the first `count` drafts are tested: some was drawn from a table. (It is the prefix that
// says so: what stands before the first of them was not drawn.) Else each row has a token of its
// own, which for points accepts as much as a test would, and on any tree.
__device__ __forceinline__ bool is_testing(const Slot& slot, int count) {
  if (slot.verify == VERIFY_COUPLED || slot.temperature < GREEDY_TEMPERATURE) return false;
  bool drawn = false;
  for (int j = 0; j < count; ++j) drawn = drawn || slot.q_kind[j] == DRAFT_DENSE;
  return drawn;
}

// Whether draft j (from 1) is to be made: decided by the prefix, never by what would be drawn.
__device__ __forceinline__ bool is_drafting(const Slot& slot, const RoundRow& row, int j) {
  return row.count > 0 && slot.active && slot.draft_len == j - 1 && slot.n + j < slot.limit &&
         !(j > 1 && is_stop(slot, slot.drafts[j - 2]));
}

// One thread: draft j of a slot, in its state and in the record that the grammar worker reads.
__device__ __forceinline__ void keep_draft(Slot& slot, int j, int token, int kind, int replay,
                                           int* drafted) {
  slot.drafts[j - 1] = token;
  slot.q_kind[j - 1] = kind;
  slot.draft_len = j;
  Drafted* head = reinterpret_cast<Drafted*>(drafted);
  head->replay = replay;
  head->count = j;
  reinterpret_cast<int*>(head + 1)[j - 1] = token;
  __threadfence_system();
}
