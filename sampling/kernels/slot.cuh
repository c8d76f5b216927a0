// What the device keeps of a request from one replay to the next, and the records it exchanges;
// for the kernels of sampling, of the round and of drafters.
#pragma once

#include "graft.cuh"
#include "native/records/exchange.h"

#define VERIFY_REJECTION 0
#define VERIFY_COUPLED 1
#define VERIFY_PER_TOKEN 2
#define VERIFY_RELAXED 3
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
#define ADJUST_MASKED 16   // kept as they are once adjusted and masked

#define REACH_FIRST 0.7f      // of a draft whose parent is reached, before any round
#define REACH_KEPT 0.8f       // of the value before, by a round that has tested it
#define REACH_BACK 0.015625f  // of the way back to the first value, by a round that has not

// One request. Python reads this struct (sampling/state.py) and hands one over, whole, at joining.
struct Slot {
  int n;          // position of `last`
  int last;       // the last committed token
  int draft_len;  // drafts at hand
  int cut;        // drafts that were, too, but have no place in this round
  int active;
  int epoch;  // generation of the slot; its mask rows carry it
  int limit;  // tokens are produced at positions below it
  int room;   // positions that it may have pages for; `limit`, and more for drafts that branch
  int verify;
  int sample;  // index among the samples drawn with one seed
  unsigned long long seed;
  float temperature;  // below 1e-5: greedy
  float top_p;        // 1: off
  float min_p;        // 0: off
  int top_k;          // 0: off
  int stops;
  int stop_ids[MAX_STOP_IDS];
  // Drafts are the rows 1 .. draft_len of a tree whose row 0 is `last`; in a chain draft j hangs on
  // row j - 1.
  int drafts[MAX_DRAFTS];               // target ids
  int parent[MAX_DRAFTS];               // row that each hangs on, a smaller one
  unsigned long long path[MAX_DRAFTS];  // the drafts down to each and itself; bit j - 1 is draft j
  int q_kind[MAX_DRAFTS];               // DRAFT_*
  float reach[MAX_DRAFTS];              // how often each is accepted, by past rounds; never rises
  int adjust;                           // ADJUST_*; 0: nothing, and what follows is not read
  int earliest;
  int logprobs;  // best ids told with each token
  float presence;
  float frequency;
  float repetition;
  int relaxed_k;  // VERIFY_RELAXED: see sampling/kernels/sample.cu
  float relaxed_delta;
  int relaxed_until;  // id behind which the request is coupled; -1: none
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

__device__ __forceinline__ const unsigned int* mask_of(const int* masks, const ExchangeLayout& x,
                                                       int slot, int j) {
  return reinterpret_cast<const unsigned int*>(masks) +
         (static_cast<long long>(j) * x.slots + slot) * x.words;
}

__device__ __forceinline__ int* record_of(int* exchange, const ExchangeLayout& x, int slot,
                                          int at) {
  return exchange + static_cast<long long>(slot) * x.stride + at;
}

// Tokens that a round's result has room for; behind them stand the rows that decided them.
__device__ __forceinline__ int row_width(int row_words) {
  return (row_words - static_cast<int>(sizeof(RoundRow)) / 4) / 2;
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

// Of a row of the target's forward, by its entry in the map: its batch row, and the draft that it
// feeds; 0: the last token. The rows of a batch row stand together. What is left over follows the
// last one's, as drafts that are not there.
__device__ __forceinline__ int map_entry(int b, int j) {
  return b << 16 | (j < 0xffff ? j : 0xffff);
}
__device__ __forceinline__ int batch_row(int entry) { return entry >> 16; }
__device__ __forceinline__ int draft_row(int entry) { return entry & 0xffff; }

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

// Whether each row has a token of its own in any case, and drafts are drawn with its noise.
__device__ __forceinline__ bool is_coupled(const Slot& slot) {
  return slot.verify == VERIFY_COUPLED || slot.verify == VERIFY_RELAXED;
}

// Whether the first `count` drafts are tested: a chain of which some draft was drawn from a table.
// (It is the prefix that says so: what stands before the first of them was not drawn.) Else each
// row has a token of its own, which for points accepts as much as a test would.
__device__ __forceinline__ bool is_testing(const Slot& slot, int count) {
  bool chain = !is_coupled(slot) && slot.temperature >= GREEDY_TEMPERATURE;
  bool drawn = false;
  for (int j = 0; j < count; ++j) {
    chain = chain && slot.parent[j] == j;
    drawn = drawn || slot.q_kind[j] == DRAFT_DENSE;
  }
  return chain && drawn;
}

// Whether draft j (from 1) is to be made: decided by the prefix, never by what would be drawn.
__device__ __forceinline__ bool is_drafting(const Slot& slot, const RoundRow& row, int j) {
  return row.count > 0 && slot.active && slot.draft_len == j - 1 && slot.n + j < slot.limit &&
         !(j > 1 && is_stop(slot, slot.drafts[j - 2]));
}

// Drafts on the way from `last` to row j, itself included.
__device__ __forceinline__ unsigned long long path_of(const Slot& slot, int j) {
  return j == 0 ? 0 : slot.path[j - 1];
}

// How many those are: row j stands at position n + depth.
__device__ __forceinline__ int depth_of(const Slot& slot, int j) {
  return __popcll(path_of(slot, j));
}

// The draft under row j that is this token, among the first `count`; 0: none.
__device__ __forceinline__ int child_of(const Slot& slot, int count, int j, int token) {
  for (int c = j + 1; c <= count; ++c) {
    if (slot.parent[c - 1] == j && slot.drafts[c - 1] == token) return c;
  }
  return 0;
}

// One thread: draft j of a slot, in its state and in the record that the grammar worker reads. A
// system fence is to follow.
__device__ __forceinline__ void keep_draft(Slot& slot, int j, int parent, int token, int kind,
                                           int replay, int* exchange, const ExchangeLayout& x,
                                           int index) {
  slot.drafts[j - 1] = token;
  slot.parent[j - 1] = parent;
  slot.path[j - 1] = path_of(slot, parent) | 1ull << (j - 1);
  slot.q_kind[j - 1] = kind;
  slot.draft_len = j;
  Drafted* head = reinterpret_cast<Drafted*>(record_of(exchange, x, index, x.drafted));
  head->replay = replay;
  head->count = j;
  int* ids = reinterpret_cast<int*>(head + 1);
  ids[j - 1] = token;
  ids[x.drafts + j - 1] = parent;
}
