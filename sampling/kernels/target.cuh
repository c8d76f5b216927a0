// Sampling of the target's token for one row of logits.
#pragma once

#include "row.cuh"
#include "slot.cuh"

// Relaxed acceptance, which is not exact: chooses the target token of row j. `token` is the token
// that the target has sampled. If it is a draft below row j, it is returned. Otherwise, a draft
// below row j is accepted in its place if two conditions hold: it is among the `relaxed_k` most
// likely tokens, and its probability is at most `relaxed_delta` below the highest probability. The
// most likely such draft is returned, or `token` if there is none. The probabilities `p` are
// masked, so a draft that the grammar forbids is never accepted.
__device__ inline int relaxed_token(const Slot& slot, int draft_len, int j, const float* p,
                                    int vocab_size, int token, Scratch& scratch) {
  bool strict = child_of(slot, draft_len, j, token) > 0;
  for (int i = 0; i < j; ++i) {
    strict = strict || ((path_of(slot, j) >> i & 1) && slot.drafts[i] == slot.relaxed_until);
  }
  if (strict) return token;
  u64 top = 0;  // positive floats are ordered like their bits
  for (int i = static_cast<int>(threadIdx.x); i < vocab_size; i += BLOCK) {
    top = __float_as_uint(p[i]) > top ? __float_as_uint(p[i]) : top;
  }
  top = block_reduce(top, scratch, Max());
  const float bound = fadd(__uint_as_float(static_cast<u32>(top)), -slot.relaxed_delta);
  float best = 0.0f;
  for (int c = j + 1; c <= draft_len; ++c) {
    const int d = slot.drafts[c - 1];
    if (slot.parent[c - 1] != j || d < 0 || d >= vocab_size) continue;
    if (!(p[d] > best) || p[d] < bound) continue;
    u64 better = 0;
    for (int i = static_cast<int>(threadIdx.x); i < vocab_size; i += BLOCK) {
      better += p[i] > p[d] || (p[i] == p[d] && i < d);
    }
    better = block_reduce(better, scratch, Sum());
    if (better >= static_cast<u64>(slot.relaxed_k)) continue;
    best = p[d];
    token = d;
  }
  return token;
}

// Rows of the target's logits, and the results of sampling. Forward row r belongs to batch row b
// and its draft j, see map_entry. Its logits are those after draft j, at position n + depth, and
// they decide the next token under mask row j.
struct Target {
  const float* logits;
  int vocab_size;
  int token_limit;
  const int* row_slot;
  const int* map;
  const Slot* slots;
  const int* masks;
  const ExchangeLayout& layout;
  CrossBlockScratch* cross_block;
  float* probs;
  int* target_tok;
  int* row_ok;
};

__device__ __forceinline__ Noise target_noise(const Slot& slot, int j) {
  return {slot.seed, slot.n + depth_of(slot, j) + 1,
          PURPOSE_NOISE | static_cast<u32>(slot.sample) << 8};
}

// Samples the token of forward row r in the steps `from` to `to`. `state` is the state of its mask
// row. A row gets row_ok = 0 if its mask row is not ready.
__device__ __forceinline__ void sample_row(const Target& target, int r, int state, int from, int to,
                                           Scratch& scratch) {
  const int j = draft_row(target.map[r]);
  const int index = target.row_slot[batch_row(target.map[r])];
  const bool leader = threadIdx.x == 0;
  if (state != ROW_FREE && state != ROW_READY && state != ROW_UNCHECKED) {
    if (leader && to == STEP_DRAW && blockIdx.y == 0) {
      target.target_tok[r] = -1;
      target.row_ok[r] = 0;
      if (state == ROW_DEAD_END) target.row_ok[r] = ROW_NO_TOKEN;
      if (state == ROW_ERROR) target.row_ok[r] = ROW_BAD_LOGIT;
    }
    return;
  }
  const Slot& slot = target.slots[index];
  const int vocab_size = target.vocab_size;
  const Row row = {target.logits + static_cast<long long>(r) * vocab_size, vocab_size,
                   state == ROW_READY ? mask_of(target.masks, target.layout, index, j) : nullptr,
                   target.token_limit, nullptr};

  int token = -1;
  float* work = target.probs + static_cast<long long>(r) * vocab_size;
  const int draft_len = slot.draft_len;
  const bool relaxed = slot.verify == VERIFY_RELAXED && j < draft_len;
  const bool greedy = slot.temperature < GREEDY_TEMPERATURE;
  const Filter filter = greedy ? Filter{1.0f, 0, 1.0f, 0.0f}
                               : Filter{slot.temperature, slot.top_k, slot.top_p, slot.min_p};
  const Noise noise = target_noise(slot, j);
  const bool tested = !greedy && j < draft_len && is_testing(slot, draft_len);
  const bool filtered = !greedy || relaxed;
  const int status =
      row_sample(row, filtered, filter, !greedy && !tested, noise, filtered ? work : nullptr,
                 target.cross_block[r], from, to, scratch, &token);
  if (status == 0) return;
  bool replaced = false;
  if (status == ROW_OK && relaxed) {
    const int sampled = token;
    token = relaxed_token(slot, draft_len, j, work, vocab_size, sampled, scratch);
    replaced = token != sampled;
  }
  if (leader) {
    target.target_tok[r] = tested ? -1 : token;
    target.row_ok[r] = replaced ? ROW_RELAXED : status;
  }
}
