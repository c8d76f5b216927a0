// The state of a running request that stays on the device between replays (struct Slot), and
// functions that access the records that device and host exchange (native/records/exchange.h). The
// kernels of sampling, rounds and drafters include this file.
#pragma once

#include "graft.cuh"
#include "native/records/exchange.h"

// Values of Slot.verify, the verification mode.
#define VERIFY_REJECTION 0
#define VERIFY_COUPLED 1
#define VERIFY_PER_TOKEN 2
#define VERIFY_RELAXED 3

// Values of Slot.q_kind, the distribution that a draft was sampled from.
#define DRAFT_DENSE 0  // the stored table q
#define DRAFT_POINT 1  // a point mass: argmax, coupled, probed, forced or proposed

#define GREEDY_TEMPERATURE 1e-5f
#define MAX_STOP_IDS 64
#define MAX_DRAFTS 64
#define MAX_LOGPROBS 20

// Bits of Slot.adjust, the adjustments of a request's logits.
#define ADJUST_BIAS 1
#define ADJUST_COUNTS 2    // penalties that depend on token counts
#define ADJUST_STOPS 4     // stop ids are illegal below position `earliest_stop`
#define ADJUST_LOGPROBS 8  // logits are stored, and log probabilities are reported
#define ADJUST_MASKED 16   // logits are stored after adjustment and masking, not before

// Constants for Slot.accept_prob, the moving average of how often each draft is accepted.
#define ACCEPT_PROB_INITIAL 0.7f  // initial value of draft 1; that of draft j is its j-th power
#define ACCEPT_PROB_DECAY 0.8f    // weight of the old value in a round that tested the draft
#define ACCEPT_PROB_RECOVERY 0.015625f  // step towards the initial value in any other round

// State of one running request, in device memory. Python accesses this struct by field name
// (sampling/state.py). SlotState.join passes a new one to the kernel slot_join by value.
struct Slot {
  int n;          // position of `last`
  int last;       // last committed token
  int draft_len;  // number of drafts to verify
  int cut;        // number of further drafts that this round cannot verify for lack of rows
  int active;
  int epoch;     // number of the slot assignment; stamps of mask rows contain it
  int limit;     // exclusive upper bound of the positions of tokens
  int capacity;  // exclusive upper bound of the positions with pages; at least `limit`
  int verify;    // VERIFY_*
  int sample;    // index among the completions sampled with one seed
  unsigned long long seed;
  float temperature;  // below GREEDY_TEMPERATURE: greedy
  float top_p;        // 1: disabled
  float min_p;        // 0: disabled
  int top_k;          // 0: disabled
  int num_stop_ids;
  int stop_ids[MAX_STOP_IDS];
  // Drafts are rows 1 to draft_len of a tree whose row 0 is `last` (a chain is a tree too). The
  // following arrays store the data of row j at index j - 1.
  int drafts[MAX_DRAFTS];  // target ids
  int parent[MAX_DRAFTS];  // parent row, smaller than j; j - 1 in a chain
  unsigned long long
      path[MAX_DRAFTS];           // bit i - 1: draft i is on the path to row j, or row j itself
  int q_kind[MAX_DRAFTS];         // DRAFT_DENSE or DRAFT_POINT
  float accept_prob[MAX_DRAFTS];  // non-increasing
  int adjust;                     // ADJUST_* bits
  int earliest_stop;              // with ADJUST_STOPS: lowest position of a stop id
  int logprobs;                   // number of most likely ids to report with each token
  float presence;
  float frequency;
  float repetition;
  // Parameters of VERIFY_RELAXED, see relaxed_token() in sample.cu.
  int relaxed_k;
  float relaxed_delta;
  int relaxed_until;  // id after which verification is coupled; -1: none
};

// Log probability of a committed token, its rank among all ids (1: most likely), and the most
// likely ids with their log probabilities.
struct Logprobs {
  float logprob;
  int rank;
  int ids[MAX_LOGPROBS];
  float logprobs[MAX_LOGPROBS];
};

// Returns the stamp of mask row j. A load from host memory takes about a microsecond on a GPU, so
// all fields are loaded at once.
__device__ __forceinline__ RowStamp read_stamp(const int* exchange, const ExchangeLayout& x,
                                               int slot, int j) {
  static_assert(sizeof(RowStamp) == sizeof(int4), "one load reads a stamp");
  const int* stamps = exchange + static_cast<long long>(slot) * x.stride + x.stamps;
  const int4 words = reinterpret_cast<const int4*>(stamps)[j];
  return {words.x, words.y, words.z, words.w};
}

// Returns the grammar's answer to the candidates of a slot. The words that follow the struct are
// read separately.
__device__ __forceinline__ Answer read_answer(const int* exchange, const ExchangeLayout& x,
                                              int slot) {
  static_assert(sizeof(Answer) <= sizeof(int4), "one load reads an answer");
  const int* answer = exchange + static_cast<long long>(slot) * x.stride + x.answer;
  const int4 words = *reinterpret_cast<const int4*>(answer);
  return {words.x, words.y, words.z};
}

// Returns the words that follow the Answer record of a slot.
__device__ __forceinline__ const int* answer_words(const int* exchange, const ExchangeLayout& x,
                                                   int slot) {
  return exchange + static_cast<long long>(slot) * x.stride + x.answer + sizeof(Answer) / 4;
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

// Returns the maximum number of tokens in the result of a batch row (see RoundRow).
__device__ __forceinline__ int row_width(int row_words) {
  return (row_words - static_cast<int>(sizeof(RoundRow)) / 4) / 2;
}

// Returns the result of batch row b. The tokens of the row follow the struct in memory.
__device__ __forceinline__ RoundRow* round_row(RoundRow* rows, int row_words, int b) {
  return reinterpret_cast<RoundRow*>(reinterpret_cast<int*>(rows) + b * row_words);
}
__device__ __forceinline__ const RoundRow* round_row(const RoundRow* rows, int row_words, int b) {
  return reinterpret_cast<const RoundRow*>(reinterpret_cast<const int*>(rows) + b * row_words);
}

// Returns the state of a mask row for the token after `position`: ROW_NOT_READY if the stamp
// belongs to another request (epoch) or position. For a request without a grammar, the state of
// every mask row is ROW_FREE at every position.
__device__ __forceinline__ int stamped_state(const RowStamp& stamp, int epoch, int position) {
  if (stamp.epoch != epoch) return ROW_NOT_READY;
  if (stamp.state == ROW_FREE && stamp.detail != 0) return ROW_FREE;
  return stamp.position == position ? stamp.state : ROW_NOT_READY;
}

// Returns the entry of the row map for a forward row. The upper 16 bits are the batch row b. The
// lower 16 bits are the number j of the draft that is the input of the forward row (0: the last
// committed token). The forward rows of a batch row are contiguous. Unused forward rows come last:
// they belong to the last batch row and continue its numbers j above its draft_len. A number that
// needs more than 16 bits becomes 0xffff.
__device__ __forceinline__ int map_entry(int b, int j) {
  return b << 16 | (j < 0xffff ? j : 0xffff);
}
__device__ __forceinline__ int batch_row(int entry) { return entry >> 16; }
__device__ __forceinline__ int draft_row(int entry) { return entry & 0xffff; }

// Returns whether the slot's request has no grammar. `first` is the stamp of the slot's mask row 0,
// which does not change while a round drafts, unlike the stamps of the other mask rows.
__device__ __forceinline__ bool is_unconstrained(const RowStamp& first, int epoch) {
  return first.state == ROW_FREE && first.epoch == epoch && first.detail != 0;
}

// Returns the token that the grammar forces after `position`; -1 if it forces none.
__device__ __forceinline__ int forced_token(const RowStamp& stamp, int epoch, int position) {
  if (stamped_state(stamp, epoch, position) != ROW_READY) return -1;
  return stamp.detail - 1;
}

__device__ __forceinline__ bool is_stop(const Slot& slot, int token) {
  bool found = false;
  for (int i = 0; i < slot.num_stop_ids; ++i) found = found || slot.stop_ids[i] == token;
  return found;
}

// Returns whether drafts and target tokens are sampled with the same random numbers, so that no
// acceptance tests are needed. This is the case in the modes coupled and relaxed.
__device__ __forceinline__ bool is_coupled(const Slot& slot) {
  return slot.verify == VERIFY_COUPLED || slot.verify == VERIFY_RELAXED;
}

// Returns whether the first `count` drafts are verified by acceptance tests. This is the case if
// they are a chain, at least one of them was sampled from a stored distribution (DRAFT_DENSE), and
// the request is neither greedy nor in one of the modes of is_coupled. Otherwise a target token is
// sampled for every row, and a draft is accepted if it equals this token.
//
// Verification is exact although the drafts decide which of the two methods is used. Whether the
// chain has a draft of the kind DRAFT_DENSE depends only on the tokens before the first such draft.
// The drafts before it are of the kind DRAFT_POINT, and both methods accept them with the same
// probability.
__device__ __forceinline__ bool is_testing(const Slot& slot, int count) {
  bool chain = !is_coupled(slot) && slot.temperature >= GREEDY_TEMPERATURE;
  bool has_dense = false;
  for (int j = 0; j < count; ++j) {
    chain = chain && slot.parent[j] == j;
    has_dense = has_dense || slot.q_kind[j] == DRAFT_DENSE;
  }
  return chain && has_dense;
}

// Returns whether draft j (from 1) is to be generated. The condition uses only tokens before draft
// j. If it depended on the token that would be sampled as draft j, verification would not be exact.
__device__ __forceinline__ bool is_drafting(const Slot& slot, const RoundRow& row, int j) {
  return row.count > 0 && slot.active && slot.draft_len == j - 1 && slot.n + j < slot.limit &&
         !(j > 1 && is_stop(slot, slot.drafts[j - 2]));
}

// Returns the drafts on the path from `last` to row j, including row j: bit i - 1 stands for draft
// i.
__device__ __forceinline__ unsigned long long path_of(const Slot& slot, int j) {
  return j == 0 ? 0 : slot.path[j - 1];
}

// Returns the depth of row j in the draft tree. The position of row j is n + depth.
__device__ __forceinline__ int depth_of(const Slot& slot, int j) {
  return __popcll(path_of(slot, j));
}

// Returns the row of the child of row j whose draft is `token`, among the first `count` drafts; 0
// if there is none.
__device__ __forceinline__ int child_of(const Slot& slot, int count, int j, int token) {
  for (int c = j + 1; c <= count; ++c) {
    if (slot.parent[c - 1] == j && slot.drafts[c - 1] == token) return c;
  }
  return 0;
}

// Appends draft j to the slot and to the record that the grammar worker reads. Called by one
// thread, which executes a system-scope fence afterwards.
__device__ __forceinline__ void append_draft(Slot& slot, int j, int parent, int token, int kind,
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
