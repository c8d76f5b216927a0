// Tokens of rows: those of the target, and drafts of a chain.
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

// Target rows: mask, filters, distribution, and the token of rows whose drafts are not tested.
//
// Row r is row j of batch row b by the map. It holds the logits after row j of slot row_slot[b],
// which stands at position n + depth, and decides the next one under mask row j. Rows that nobody
// will test (padding, inactive, beyond the drafts) and rows without a valid stamp are left:
// row_ok = 0. A row's state is what adjust_logits read.
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
  const bool tested = !greedy && j < most && is_testing(slot, most);
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

// Draft j of a chain: mask row j - 1 through the draft vocabulary, filters, draw.
//
// Acts only on slots that committed tokens in this replay, are still
// active and have j - 1 drafts. Whether position j is drafted depends on the prefix alone (row
// stamp, stop id, limit, dead end of the pruned vocabulary, broken logits), never on what would be
// drawn.
//
// Drafts of a request whose candidates are probed are points, drawn like those of coupled requests
// by the race that the target's own draw runs: the slot's answer is the first legal candidate. With
// -1 none was legal and row j - 1 was filled: the draft is drawn under it. Requests without a
// grammar are not probed and draw from q. Where the row says that the grammar forces a token, that
// is the draft, whatever the drafter thinks and whether its vocabulary has it or not.
extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    sample_draft(const float* logits, int draft_vocab, int token_limit, const int* d2t,
                 const int* row_slot, int j, int masked, int probed, const int* masks,
                 Meeting* meetings, Slot* slots, const RoundRow* rows, int row_words, float* q,
                 int most_drafts, int* exchange, const ExchangeLayout layout,
                 const int* replay_number) {
  __shared__ Scratch scratch;
  __shared__ int known, state, unconstrained;
  const int b = static_cast<int>(blockIdx.x);
  const int index = row_slot[b];
  if (index < 0 || !is_drafting(slots[index], *round_row(rows, row_words, b), j)) return;
  Slot& slot = slots[index];
  const int position = slot.n + j;  // being drafted
  const bool leader = threadIdx.x == 0;

  if (leader) {  // host memory is read once
    const RowStamp* stamp = stamp_of(exchange, layout, index, j - 1);
    const Answer* answer =
        reinterpret_cast<const Answer*>(record_of(exchange, layout, index, layout.answer));
    const bool answered = probed && answer->replay == *replay_number && answer->draft == j;
    known = answered ? answer->id : -1;
    if (known < 0 && masked) known = forced_token(stamp, slot.epoch, position - 1);
    state = masked ? stamped_state(stamp, slot.epoch, position - 1) : ROW_FREE;
    unconstrained = is_unconstrained(stamp_of(exchange, layout, index, 0), slot.epoch);
  }
  block_sync();
  int token = known;
  int kind = DRAFT_POINT;
  if (token >= 0) {
    if (blockIdx.y > 0) return;
  } else {
    if (state != ROW_FREE && state != ROW_READY) return;
    const Row row = {logits + static_cast<long long>(b) * draft_vocab, draft_vocab,
                     state == ROW_READY ? mask_of(masks, layout, index, j - 1) : nullptr,
                     token_limit, d2t};
    const bool greedy = slot.temperature < GREEDY_TEMPERATURE;
    const bool coupled = is_coupled(slot) || (probed && !unconstrained);
    if (!greedy && !coupled) kind = DRAFT_DENSE;
    float* table = q + (static_cast<long long>(index) * most_drafts + j - 1) * draft_vocab;
    const Filter filter = {slot.temperature, slot.top_k, slot.top_p, slot.min_p};
    const u32 purpose = coupled ? PURPOSE_NOISE : PURPOSE_DRAFT;
    const Noise noise = {slot.seed, position, purpose | static_cast<u32>(slot.sample) << 8,
                         coupled ? 0 : slot.n};
    const int status = row_sample(row, !greedy, filter, !greedy, noise, greedy ? nullptr : table,
                                  meetings[b], STEP_BEST, STEP_DRAW, scratch, &token);
    if (status != ROW_OK) return;
    if (d2t) token = d2t[token];
  }
  if (leader) {
    keep_draft(slot, j, j - 1, token, kind, *replay_number, exchange, layout, index);
    __threadfence_system();
  }
}
