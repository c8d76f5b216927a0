// Sampling of target tokens, and of the drafts of a chain. Tokens are sampled by the Gumbel-max
// trick in the form of an exponential race, see row.cuh.
#include "adjust.cuh"

// Relaxed acceptance, which is not exact: chooses the target token of row j. `token` is the token
// that the target has sampled. If `token` equals a draft that follows row j (a child of row j in
// the draft tree), or if the path to row j contains the id `relaxed_until`, `token` is returned.
// Otherwise, a draft that follows row j may replace `token` if it is among the `relaxed_k` most
// likely tokens and its probability is at most `relaxed_delta` below the highest probability. The
// most likely such draft is returned, or `token` if there is none. The probabilities `p` are
// masked, so a draft that the grammar forbids is never accepted.
__device__ inline int relaxed_token(const Slot& slot, int draft_len, int j, const float* p,
                                    int vocab_size, int token, Scratch& scratch) {
  bool strict = child_of(slot, draft_len, j, token) > 0;
  for (int i = 0; i < j; ++i) {
    strict = strict || ((path_of(slot, j) >> i & 1) && slot.drafts[i] == slot.relaxed_until);
  }
  if (strict) return token;
  u64 top = 0;  // the bits of positive floats are ordered like the floats
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

// Applies mask and filters to the rows of the target's logits, and samples a token for each row.
//
// Row r of the logits is the target's output for one input token: draft j of batch row b, or its
// last committed token if j is 0 (see map_entry). The position of the input token is Slot::n plus
// its depth in the draft tree. The kernel samples the token after it under mask row j (token
// bitmask). If draft j + 1 is verified by rejection sampling (test_drafts), the row gets no token
// here.
//
// `row_ok` receives the status ROW_* of row_sample. It is 0 for rows without a request (padding,
// inactive slots, rows beyond the drafts) and rows whose mask row is not ready. The state of the
// mask row is read from `row_state`, to which adjust_logits has copied it, and not again from host
// memory, so that both kernels use the same state.
extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT)
    sample_target(const float* logits, int vocab_size, int token_limit, const int* row_slot,
                  const int* map, const Slot* slots, const int* masks, const ExchangeLayout layout,
                  const int* row_state, CrossBlockScratch* cross_block, int from, int to,
                  float* probs, int* target_tok, int* row_ok) {
  __shared__ Scratch scratch;
  const int r = static_cast<int>(blockIdx.x);
  const int j = draft_row(map[r]);
  const int index = row_slot[batch_row(map[r])];
  const bool leader = threadIdx.x == 0;

  const int state = row_state[r];
  if (state != ROW_FREE && state != ROW_READY) {
    if (leader && to == STEP_DRAW && blockIdx.y == 0) {
      target_tok[r] = -1;
      row_ok[r] = 0;
      if (state == ROW_DEAD_END) row_ok[r] = ROW_NO_TOKEN;
      if (state == ROW_ERROR) row_ok[r] = ROW_BAD_LOGIT;
    }
    return;
  }
  const Slot& slot = slots[index];

  const Row row = {logits + static_cast<long long>(r) * vocab_size, vocab_size,
                   state == ROW_READY ? mask_of(masks, layout, index, j) : nullptr, token_limit,
                   nullptr};

  int token = -1;
  float* work = probs + static_cast<long long>(r) * vocab_size;
  const int draft_len = slot.draft_len;
  const bool relaxed = slot.verify == VERIFY_RELAXED && j < draft_len;
  const bool greedy = slot.temperature < GREEDY_TEMPERATURE;
  const Filter filter = greedy ? Filter{1.0f, 0, 1.0f, 0.0f}
                               : Filter{slot.temperature, slot.top_k, slot.top_p, slot.min_p};
  const Noise noise = {slot.seed, slot.n + depth_of(slot, j) + 1,
                       PURPOSE_NOISE | static_cast<u32>(slot.sample) << 8};
  const bool tested = !greedy && j < draft_len && is_testing(slot, draft_len);
  const bool filtered = !greedy || relaxed;
  const int status =
      row_sample(row, filtered, filter, !greedy && !tested, noise, filtered ? work : nullptr,
                 cross_block[r], from, to, scratch, &token);
  if (status == 0) return;
  bool replaced = false;
  if (status == ROW_OK && relaxed) {
    const int sampled = token;
    token = relaxed_token(slot, draft_len, j, work, vocab_size, sampled, scratch);
    replaced = token != sampled;
  }
  if (leader) {
    target_tok[r] = tested ? -1 : token;
    row_ok[r] = replaced ? ROW_RELAXED : status;
  }
}

// What sample_draft reads from host memory for one batch row.
struct DraftInput {
  int known;          // token of the draft; -1: it is sampled
  int state;          // ROW_* of the mask row under which it is sampled
  int unconstrained;  // whether the request has no grammar
};

// Reads the data for draft j of a slot from host memory.
__device__ __forceinline__ DraftInput read_draft_input(const int* exchange,
                                                       const ExchangeLayout& layout, int index,
                                                       const Slot& slot, int j, int replay) {
  const RowStamp stamp = read_stamp(exchange, layout, index, j - 1);
  const RowStamp first = read_stamp(exchange, layout, index, 0);
  const Answer answer = read_answer(exchange, layout, index);
  DraftInput input = {-1, ROW_FREE, is_unconstrained(first, slot.epoch)};
  if (is_probe_mode(layout.mode) && answer.replay == replay && answer.draft == j) {
    input.known = answer.id;
  }
  if (is_masked_mode(layout.mode)) {
    const int before = slot.n + j - 1;  // position of the token before the draft
    if (input.known < 0) input.known = forced_token(stamp, slot.epoch, before);
    input.state = stamped_state(stamp, slot.epoch, before);
  }
  return input;
}

// Samples draft j of a chain, for each slot that committed tokens in this replay, is still active
// and has j - 1 drafts. If drafts are masked (is_masked_mode), only tokens that mask row j - 1
// allows can be drafts.
//
// Whether draft j is generated depends only on the tokens before it: on the state of the mask row,
// stop ids, the length limit, and the drafter's legal logits. It never depends on the token that
// would be sampled.
//
// In probe modes (is_probe_mode), the grammar has tested candidate ids in the order of their scores
// (candidates.cu), in which the target will prefer them too. The draft is the first legal
// candidate, and verification treats it as a point mass. If no candidate was legal (Answer.id is
// -1), the grammar has filled mask row j - 1 instead, and the draft is sampled under this row.
// Requests without a grammar are not probed; their drafts are sampled from the drafter's
// distribution.
//
// If drafts are masked and the grammar forces a token, this token is the draft, even if the
// drafter's vocabulary does not contain it.
//
// If several blocks share a row, each of the steps of row_sample (STEP_*) has its own launch. The
// launch that runs the first step, STEP_BEST, reads the DraftInput of each batch row from host
// memory and stores it in `inputs`, from which the launches of later steps read it.
extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT)
    sample_draft(float* logits, int draft_vocab, int token_limit, const int* d2t, const int* t2d,
                 const int* row_slot, int j, const int* masks, const int* tables, int vocab_size,
                 CrossBlockScratch* cross_block, Slot* slots, const RoundRow* rows, int row_words,
                 float* q, int max_drafts, int* exchange, const ExchangeLayout layout,
                 const int* replay_number, DraftInput* inputs, int from, int to) {
  __shared__ Scratch scratch;
  __shared__ float drafted[MAX_DRAFTS];
  __shared__ DraftInput input;
  const int b = static_cast<int>(blockIdx.x);
  const int index = row_slot[b];
  if (index < 0 || !is_drafting(slots[index], *round_row(rows, row_words, b), j)) return;
  Slot& slot = slots[index];
  const int position = slot.n + j;  // position of the draft
  const bool probed = is_probe_mode(layout.mode);
  const bool leader = threadIdx.x == 0;

  if (leader && from == STEP_BEST) {  // one thread reads host memory
    input = read_draft_input(exchange, layout, index, slot, j, *replay_number);
    if (blockIdx.y == 0) inputs[b] = input;
  } else if (leader) {
    input = inputs[b];
  }
  block_sync();
  const int state = input.state;
  int token = input.known;
  int kind = DRAFT_POINT;
  if (token >= 0 || (state != ROW_FREE && state != ROW_READY)) {
    if (!skip_row(cross_block[b], from, to, scratch) || token < 0) return;
  } else {
    float* x = logits + static_cast<long long>(b) * draft_vocab;
    // If the grammar tests candidates for this slot (probed), the kernel draft_candidates has
    // already adjusted the logits.
    if (from == STEP_BEST && (!probed || input.unconstrained)) {
      adjust_draft(x, own_slice(draft_vocab), {draft_vocab, d2t, t2d}, slot, path_of(slot, j - 1),
                   position, table_of(tables, vocab_size, index), vocab_size, drafted);
    }
    const u32* mask = state == ROW_READY ? mask_of(masks, layout, index, j - 1) : nullptr;
    const Row row = {x, draft_vocab, mask, token_limit, d2t};
    const bool greedy = slot.temperature < GREEDY_TEMPERATURE;
    const bool coupled = is_coupled(slot) || (probed && !input.unconstrained);
    if (!greedy && !coupled) kind = DRAFT_DENSE;
    float* table = q + (static_cast<long long>(index) * max_drafts + j - 1) * draft_vocab;
    const Filter filter = {slot.temperature, slot.top_k, slot.top_p, slot.min_p};
    const u32 purpose = coupled ? PURPOSE_NOISE : PURPOSE_DRAFT;
    const Noise noise = {slot.seed, position, purpose | static_cast<u32>(slot.sample) << 8,
                         coupled ? 0 : slot.n};
    const int status = row_sample(row, !greedy, filter, !greedy, noise, greedy ? nullptr : table,
                                  cross_block[b], from, to, scratch, &token);
    if (status != ROW_OK) return;
    if (d2t) token = d2t[token];
  }
  if (leader) {
    append_draft(slot, j, j - 1, token, kind, *replay_number, exchange, layout, index);
    __threadfence_system();
  }
}
