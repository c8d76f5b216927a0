// Verification of drafts: accept a path of the draft tree and commit its tokens to the slot.
//
// Every row of a draft tree whose mask row (token bitmask) is ready has a target token, the token
// that the target samples after this row. Starting at row 0, verify_drafts moves from a row to its
// child whose draft equals the row's token. It stops at the first row without such a child; the
// token of this row is the bonus token. This is exact on any tree. For a tree that was built
// without randomness, no other exact rule accepts more drafts.
//
// A chain of drafts that were sampled from a stored distribution q is verified differently, by
// rejection sampling (test_drafts). Each draft is tested with a random number. If a draft is
// rejected, the token in its place is sampled from the residual distribution. The results of the
// tests determine the target tokens.
//
// A round may also end directly AFTER an accepted draft, without a bonus token. This happens if the
// next mask row is not ready, if the draft is a stop id, and at the length limit.
#include "row.cuh"
#include "slot.cuh"

// Tests all drafts of a chain in parallel. The blocks with the same blockIdx.x test one draft: the
// forward row r = blockIdx.x belongs to batch row b and its draft j (see map_entry).
//
// Draft i passes its test with probability h_i. The LAST draft that passes is the last accepted
// draft, and the next token is sampled from the residual max(P p - q, 0). This is block
// verification (Sun et al., ICLR 2025, arXiv 2403.10444):
//
//   P_0 = 1    P_i = min(1, P_{i-1} p_i(d_i) / q_i(d_i))
//   R_i = sum over ids x of max(P_i p_{i+1}(x) - q_{i+1}(x), 0)
//   h_i = R_i / (R_i + 1 - P_i) for i < g    h_g = P_g
//
// Here d_i is draft i, and p_i and q_i are the target and draft distributions of its token. Only
// the first g drafts are tested: drafts 1 to g have a target distribution (row_ok), draft g + 1 has
// none or does not exist.
//
// At least i drafts are accepted with probability P_i, whatever the length of the chain. The chain
// may therefore end at any row, for example at a row that is not ready or at a stop id. The row at
// which the chain ends must depend only on the preceding tokens.
//
// A draft that was not sampled from a stored distribution is a point mass with q = 1. A chain may
// contain both kinds of drafts. On average, block verification accepts at least as many drafts as
// per-token tests, and more if a sampled draft follows another draft.
//
// With VERIFY_PER_TOKEN, draft j passes independently with probability min(1, p / q), and the FIRST
// draft that fails ends the chain (Leviathan, Kalman, Matias, "Fast inference from transformers via
// speculative decoding", 2023).
//
// In both modes an illegal draft has p = 0, so neither it nor a draft after it is accepted.
extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    test_drafts(const int* row_slot, const int* map, int vocab_size, int draft_vocab,
                const int* t2d, const float* probs, const int* row_ok, const Slot* slots,
                const float* q, int max_drafts, float* weights, int* passed,
                CrossBlockScratch* cross_block, int* faults) {
  __shared__ Scratch scratch;
  const int r = static_cast<int>(blockIdx.x);
  const int j = draft_row(map[r]);
  const int first = r - j;
  const int index = row_slot[batch_row(map[r])];
  if (index < 0 || !slots[index].active) return;
  const Slot& slot = slots[index];
  const int draft_len = slot.draft_len;
  if (j > draft_len || !is_testing(slot, draft_len)) return;

  int end = 0;
  while (end < draft_len && row_ok[first + end] == ROW_OK) ++end;
  const bool per_token = slot.verify == VERIFY_PER_TOKEN;
  const float* tables = q + static_cast<long long>(index) * max_drafts * draft_vocab;
  float weight = j > end ? 0.0f : 1.0f;
  for (int i = per_token && j > 0 ? j - 1 : 0; i < j && j <= end; ++i) {
    const int d = slot.drafts[i];
    const bool known = d >= 0 && d < vocab_size;
    const float p = known ? probs[static_cast<long long>(first + i) * vocab_size + d] : 0.0f;
    const int column = known ? column_of(t2d, draft_vocab, d) : -1;
    const float qd = slot.q_kind[i] == DRAFT_POINT ? 1.0f
                     : column < 0 ? 0.0f
                                  : tables[static_cast<long long>(i) * draft_vocab + column];
    // A draft with q = 0 cannot have been sampled from its table of draft probabilities. It is
    // rejected and counted as a fault.
    if (!(qd > 0.0f) && i == j - 1 && threadIdx.x == 0 && blockIdx.y == 0) {
      atomicAdd(faults, 1);
    }
    const float mass = fmul(weight, p);
    weight = !(qd > 0.0f) ? 0.0f : mass >= qd ? 1.0f : fdiv(mass, qd);
  }

  // The draft passes its test if a uniform random number in [0, 1) is less than win / (win + lose).
  float win = weight;
  float lose = fadd(1.0f, -weight);
  if (!per_token && j < end && weight > 0.0f && weight < 1.0f) {
    const float* p = probs + static_cast<long long>(r) * vocab_size;
    const float* table = tables + static_cast<long long>(j) * draft_vocab;
    if (slot.q_kind[j] == DRAFT_POINT) table = nullptr;
    const Residual residual = {weight, p, table, slot.drafts[j], t2d, draft_vocab};
    const Slice own = own_slice(vocab_size);
    u64 sum = 0;
    for (int i = own.begin + static_cast<int>(threadIdx.x); i < own.end; i += BLOCK) {
      const float mass = residual(i);
      if (mass > 0.0f) sum += fixed_point(mass);
    }
    sum = block_reduce(sum, scratch, Sum());
    if (threadIdx.x == 0) atomicAdd(&cross_block[r].sum, sum);
    if (!is_last(cross_block[r], scratch)) return;
    win = from_fixed_point(cross_block[r].sum);
    block_sync();
    if (threadIdx.x == 0) cross_block[r].sum = 0;
  } else if (blockIdx.y > 0) {
    return;  // every block has computed the same weights; the first one stores the result
  }
  if (threadIdx.x != 0) return;
  const Noise noise = {slot.seed, slot.n + j, PURPOSE_COIN | static_cast<u32>(slot.sample) << 8,
                       slot.n};
  const float u = uniform24(noise_words(noise, 0u).x[0]);
  weights[r] = per_token ? 1.0f : weight;
  passed[r] = fmul(u, fadd(win, lose)) < win;
}

// Converts the test results of a chain into target tokens: the accepted drafts, then one token
// sampled from the residual distribution of the first rejected draft. Later rows get no token.
//
// All blocks of a batch row take part in the sampling. Returns true in the last block to finish,
// which then sees all target tokens, and false in the others.
__device__ __forceinline__ bool apply_test_results(
    const Slot& slot, int tested, int vocab_size, int draft_vocab, const int* t2d,
    const float* probs, const int* row_ok, const float* tables, const float* weights,
    const int* passed, int* target_tok, CrossBlockScratch& cross_block, Scratch& scratch) {
  const bool leader = threadIdx.x == 0;
  if (leader) {
    int last = 0;
    for (int j = 1; j <= tested; ++j) {
      if (passed[j]) {
        last = j;
      } else if (slot.verify == VERIFY_PER_TOKEN) {
        break;
      }
    }
    for (int j = 0; j < last && blockIdx.y == 0; ++j) target_tok[j] = slot.drafts[j];
    scratch.token = last;
  }
  block_sync();
  const int j = scratch.token;
  if (j == tested || row_ok[j] != ROW_OK) return is_last(cross_block, scratch);
  const float* p = probs + static_cast<long long>(j) * vocab_size;
  const float* table = tables + static_cast<long long>(j) * draft_vocab;
  if (slot.q_kind[j] == DRAFT_POINT) table = nullptr;
  const Residual residual = {weights[j], p, table, slot.drafts[j], t2d, draft_vocab};
  const Noise noise = {slot.seed, slot.n + j + 1,
                       PURPOSE_RESIDUAL | static_cast<u32>(slot.sample) << 8, slot.n};
  const u64 race = draw_packed(own_slice(vocab_size), nullptr, noise, scratch, residual);
  if (leader) atomicMax(&cross_block.race, race);
  if (!is_last(cross_block, scratch)) return false;
  int token = drawn(cross_block.race);
  // The residual is empty if p equals q up to rounding. In this case the token is sampled from p,
  // which is correct.
  if (token < 0) {
    token = draw_column(vocab_size, nullptr, noise, scratch, [p](int i) { return p[i]; });
  }
  block_sync();
  if (leader) {
    target_tok[j] = token;
    cross_block.race = 0;
  }
  return true;
}

// Updates slot.accept_prob, the moving average of how often each of `max_drafts` drafts is
// accepted, after a round that tested the first `tested` of them. Bit j - 1 of `accepted` is draft
// j. Values are kept non-increasing, so the most likely drafts always form a prefix.
__device__ __forceinline__ void update_accept_prob(Slot& slot, int max_drafts, int tested,
                                                   u64 accepted) {
  float previous = 1.0f;
  float initial = 1.0f;
  for (int j = 1; j <= max_drafts; ++j) {
    float prob = slot.accept_prob[j - 1];
    const float outcome = accepted >> (j - 1) & 1 ? 1.0f : 0.0f;
    initial = fmul(initial, ACCEPT_PROB_INITIAL);
    prob = j <= tested ? fadd(outcome, fmul(ACCEPT_PROB_DECAY, fadd(prob, -outcome)))
                       : fadd(prob, fmul(ACCEPT_PROB_RECOVERY, fadd(initial, -prob)));
    previous = prob < previous ? prob : previous;
    slot.accept_prob[j - 1] = previous;
  }
}

// Commits the accepted tokens of every batch row, and writes its RoundRow (result for the host) and
// its Committed record (input of the grammar worker).
//
// blockIdx.x is the batch row; gridDim.y blocks share it. Thread 0 of the last block to finish
// follows the accepted path and writes the results. The fence at the end makes them visible to the
// host.
extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    verify_drafts(const int* row_slot, const int* first_row, int vocab_size, int draft_vocab,
                  const int* t2d, const float* probs, const int* row_ok, Slot* slots,
                  const float* q, int max_drafts, const float* weights, const int* passed,
                  CrossBlockScratch* cross_block, int* target_tok, int* exchange,
                  const ExchangeLayout layout, const int* replay_number, RoundRow* rows,
                  int row_words) {
  __shared__ Scratch scratch;
  const int b = static_cast<int>(blockIdx.x);
  const int index = row_slot[b];
  const int replay = *replay_number;
  const bool leader = threadIdx.x == 0;
  RoundRow* result = round_row(rows, row_words, b);
  int* tokens = reinterpret_cast<int*>(result + 1);
  int* decided_by = tokens + row_width(row_words);

  if (index < 0 || !slots[index].active) {
    if (leader && blockIdx.y == 0) {
      *result = {index, 0, REASON_NONE, 0, 0, 0, 0, index < 0 ? 0 : slots[index].n};
      if (index >= 0) {
        int* record = record_of(exchange, layout, index, layout.committed);
        *reinterpret_cast<Committed*>(record) = {replay, 0};
      }
    }
    return;
  }

  Slot& slot = slots[index];
  const int position = slot.n;  // position of slot.last
  const int tested = slot.draft_len;
  const int first = first_row[b];
  const bool last =
      !is_testing(slot, tested)
          ? is_last(cross_block[b], scratch)
          : apply_test_results(slot, tested, vocab_size, draft_vocab, t2d,
                               probs + static_cast<long long>(first) * vocab_size, row_ok + first,
                               q + static_cast<long long>(index) * max_drafts * draft_vocab,
                               weights + first, passed + first, target_tok + first, cross_block[b],
                               scratch);
  if (!leader || !last) return;

  int count = 0;
  int accepted = 0;
  int relaxed = 0;
  int reason = REASON_NONE;
  int j = 0;
  u64 accepted_bits = 0;
  do {
    const int ok = row_ok[first + j];
    const int token = target_tok[first + j];
    if ((ok != ROW_OK && ok != ROW_RELAXED) || token < 0) {
      // A row without a usable token ends the round. This is an error only in row 0. If it happens
      // in a later row, which follows an accepted draft, the next round continues after this draft.
      if (j == 0 && ok != 0) reason = ok == ROW_NO_TOKEN ? REASON_DEAD_END : REASON_ERROR;
      break;
    }
    relaxed += ok == ROW_RELAXED;
    decided_by[count] = j;
    tokens[count++] = token;
    if (slot.verify == VERIFY_RELAXED && token == slot.relaxed_until) slot.verify = VERIFY_COUPLED;
    if (is_stop(slot, token)) {
      reason = REASON_STOP;
    } else if (position + count + 1 >= slot.limit) {
      reason = REASON_LENGTH;
    }
    j = child_of(slot, tested, j, token);
    accepted += j > 0;
    if (j > 0) accepted_bits |= 1ull << (j - 1);
  } while (j > 0 && reason == REASON_NONE);

  if (count > 0) {
    slot.n = position + count;
    slot.last = tokens[count - 1];
    slot.draft_len = 0;
    update_accept_prob(slot, layout.rows - 1, tested, accepted_bits);
    int* drafted = record_of(exchange, layout, index, layout.drafted);
    *reinterpret_cast<Drafted*>(drafted) = {replay, 0};
  }
  if (reason != REASON_NONE) slot.active = 0;
  *result = {index, count, reason, accepted, tested, slot.cut, relaxed, position};
  int* record = record_of(exchange, layout, index, layout.committed);
  *reinterpret_cast<Committed*>(record) = {replay, count};
  for (int i = 0; i < count; ++i) record[sizeof(Committed) / 4 + i] = tokens[i];
  __threadfence_system();
}
