// Target rows: mask, filters, distribution, and the token of rows whose drafts are not tested.
//
// Row r is row j of batch row b by the map. It holds the logits after row j of slot row_slot[b],
// which stands at position n + depth, and decides the next one under mask row j. Rows that nobody
// will test (padding, inactive, beyond the drafts) and rows without a valid stamp are left:
// row_ok = 0. A row's state is what adjust_logits read.
#include "row.cuh"
#include "slot.cuh"

// Relaxed acceptance, which is not exact: a draft is as good as the row's token if its probability
// is among the best `relaxed_k` and at most `relaxed_delta` below the best. The likeliest such
// draft under row j, else `token`, which is the target's own. `p` is masked, so no draft is
// accepted that a grammar forbids.
__device__ inline int relaxed_token(const Slot& slot, int most, int j, const float* p,
                                    int vocab_size, int token, Scratch& scratch) {
  bool strict = child_of(slot, most, j, token) > 0;
  for (int i = 0; i < j; ++i) {
    strict = strict || ((path_of(slot, j) >> i & 1) && slot.drafts[i] == slot.relaxed_until);
  }
  if (strict) return token;
  u64 top = 0;  // positive floats are ordered as their bits
  for (int i = static_cast<int>(threadIdx.x); i < vocab_size; i += BLOCK) {
    top = __float_as_uint(p[i]) > top ? __float_as_uint(p[i]) : top;
  }
  top = block_reduce(top, scratch, Max());
  const float bound = fadd(__uint_as_float(static_cast<u32>(top)), -slot.relaxed_delta);
  float best = 0.0f;
  for (int c = j + 1; c <= most; ++c) {
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

extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    sample_target(const float* logits, int vocab_size, int token_limit, const int* row_slot,
                  const int* map, const Slot* slots, const int* masks, const ExchangeLayout layout,
                  const int* row_state, Meeting* meetings, int from, int to, float* probs,
                  int* target_tok, int* row_ok) {
  __shared__ Scratch scratch;
  const int r = static_cast<int>(blockIdx.x);
  const int j = draft_row(map[r]);
  const int index = row_slot[batch_row(map[r])];
  const bool leader = threadIdx.x == 0;

  const int state = row_state[r];
  if (state != ROW_FREE && state != ROW_READY) {
    if (leader && to == STEP_DRAW && blockIdx.y == 0) {
      target_tok[r] = -1;
      row_ok[r] = state == ROW_DEAD_END ? ROW_NO_TOKEN : state == ROW_ERROR ? ROW_BAD_LOGIT : 0;
    }
    return;
  }
  const Slot& slot = slots[index];

  const Row row = {logits + static_cast<long long>(r) * vocab_size, vocab_size,
                   state == ROW_READY ? mask_of(masks, layout, index, j) : nullptr, token_limit,
                   nullptr};

  int token = -1;
  float* work = probs + static_cast<long long>(r) * vocab_size;
  const int most = slot.draft_len;
  const bool relaxed = slot.verify == VERIFY_RELAXED && j < most;
  const bool greedy = slot.temperature < GREEDY_TEMPERATURE;
  const Filter filter = greedy ? Filter{1.0f, 0, 1.0f, 0.0f}
                               : Filter{slot.temperature, slot.top_k, slot.top_p, slot.min_p};
  const Noise noise = {slot.seed, slot.n + depth_of(slot, j) + 1,
                       PURPOSE_NOISE | static_cast<u32>(slot.sample) << 8};
  const bool tested = is_traversed(slot) || (!greedy && j < most && is_testing(slot, most));
  const bool filtered = !greedy || relaxed;
  const int status = row_sample(row, filtered, filter, !greedy && !tested, noise,
                                filtered ? work : nullptr, meetings[r], from, to, scratch, &token);
  if (status == 0) return;
  if (status == ROW_OK && relaxed) {
    token = relaxed_token(slot, most, j, work, vocab_size, token, scratch);
  }
  if (leader) {
    target_tok[r] = tested ? -1 : token;
    row_ok[r] = status;
  }
}
