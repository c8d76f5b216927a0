// Verification: walk the tree of drafts, commit to the slot.
//
// The last block of a batch row walks, its thread 0: where a child holds the token of its row the
// walk goes there, else that token is the last. With a token drawn for each row that is exact on
// any tree, and on one that was made without chance no other rule accepts more. Where the drafts of
// a chain are tested (below), their tests say what the tokens are. The walk
// may also end AFTER an accepted token (row not ready, stop id, limit), then without a bonus.
#include "row.cuh"
#include "slot.cuh"

// Which drafts of a chain pass their test, all rows at once.
//
// Row r, row j of batch row b by the map, tests draft j, of which it needs the weight P_j of the
// chain down to it, and what is left for the next draft. For i drafts before the end g
//
//   P_0 = 1    P_i = min(1, P_{i-1} p_i(d_i) / q_i(d_i))
//   R_i = sum max(P_i p_{i+1} - q_{i+1}, 0)    h_i = R_i / (R_i + 1 - P_i)    h_g = P_g
//
// and draft i passes with chance h_i: block verification (Sun et al., ICLR 2025, arXiv 2403.10444).
// The LAST draft that passes is the last accepted one, and the token behind it comes from
// max(P p - q, 0). Behind i drafts it goes on with probability P_i whatever the chain's length, so
// the chain may end anywhere, if only its prefix says so: at a row that is not ready as at a stop
// id.
//
// A draft that was not drawn is a point with q = 1. Chains mix both: no less is accepted than by
// tests one by one, and more where a draft was drawn behind another draft, of either kind.
//
// VERIFY_PER_TOKEN: draft j passes alone, with chance min(1, p / q), and the FIRST that fails ends
// the chain (Leviathan, Kalman, Matias, "Fast inference from transformers via speculative
// decoding", 2023). In either, an illegal draft has p = 0 and never passes, nor does any behind it.
extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    test_drafts(const int* row_slot, const int* map, int vocab_size, int draft_vocab,
                const int* t2d, const float* probs, const int* row_ok, const Slot* slots,
                const float* q, int most_drafts, float* weights, int* passed, Meeting* meetings,
                int* faults) {
  __shared__ Scratch scratch;
  const int r = static_cast<int>(blockIdx.x);
  const int j = draft_row(map[r]);
  const int first = r - j;
  const int index = row_slot[batch_row(map[r])];
  if (index < 0 || !slots[index].active) return;
  const Slot& slot = slots[index];
  const int most = slot.draft_len;
  if (j > most || !is_testing(slot, most)) return;

  int end = 0;
  while (end < most && row_ok[first + end] == ROW_OK) ++end;
  const bool per_token = slot.verify == VERIFY_PER_TOKEN;
  const float* tables = q + static_cast<long long>(index) * most_drafts * draft_vocab;
  float weight = j > end ? 0.0f : 1.0f;
  for (int i = per_token && j > 0 ? j - 1 : 0; i < j && j <= end; ++i) {
    const int d = slot.drafts[i];
    const bool known = d >= 0 && d < vocab_size;
    const float p = known ? probs[static_cast<long long>(first + i) * vocab_size + d] : 0.0f;
    const int column = known ? column_of(t2d, draft_vocab, d) : -1;
    const float qd = slot.q_kind[i] == DRAFT_POINT ? 1.0f
                     : column < 0 ? 0.0f
                                  : tables[static_cast<long long>(i) * draft_vocab + column];
    // A draft its own table calls impossible was not drawn from that table: refuse, count.
    if (!(qd > 0.0f) && i == j - 1 && threadIdx.x == 0 && blockIdx.y == 0) {
      atomicAdd(faults, 1);
    }
    const float mass = fmul(weight, p);
    weight = !(qd > 0.0f) ? 0.0f : mass >= qd ? 1.0f : fdiv(mass, qd);
  }

  // Passes where u < h = win / (win + lose).
  float win = weight;
  float lose = fadd(1.0f, -weight);
  if (!per_token && j < end && weight > 0.0f && weight < 1.0f) {
    const float* p = probs + static_cast<long long>(r) * vocab_size;
    const float* table = tables + static_cast<long long>(j) * draft_vocab;
    if (slot.q_kind[j] == DRAFT_POINT) table = nullptr;
    const Left left = {weight, p, table, slot.drafts[j], t2d, draft_vocab};
    const Slice own = own_slice(vocab_size);
    u64 sum = 0;
    for (int i = own.begin + static_cast<int>(threadIdx.x); i < own.end; i += BLOCK) {
      const float mass = left(i);
      if (mass > 0.0f) sum += fixed_point(mass);
    }
    sum = block_reduce(sum, scratch, Sum());
    if (threadIdx.x == 0) atomicAdd(&meetings[r].sum, sum);
    if (!is_last(meetings[r], scratch)) return;
    win = from_fixed_point(meetings[r].sum);
    block_sync();
    if (threadIdx.x == 0) meetings[r].sum = 0;
  }
  if (threadIdx.x != 0) return;
  const Noise noise = {slot.seed, slot.n + j, PURPOSE_COIN | static_cast<u32>(slot.sample) << 8,
                       slot.n};
  const float u = uniform24(noise_words(noise, 0u).x[0]);
  weights[r] = per_token ? 1.0f : weight;
  passed[r] = fmul(u, fadd(win, lose)) < win;
}

// What tests say of the rows: the accepted drafts, then a token from what is left for the refused
// one. Rows behind it have none. All blocks of the batch row draw that token.
__device__ __forceinline__ bool settle(const Slot& slot, int tested, int vocab_size,
                                       int draft_vocab, const int* t2d, const float* probs,
                                       const int* row_ok, const float* tables, const float* weights,
                                       const int* passed, int* target_tok, Meeting& meeting,
                                       Scratch& scratch) {
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
    for (int j = 0; j < last; ++j) target_tok[j] = slot.drafts[j];
    scratch.token = last;
  }
  block_sync();
  const int j = scratch.token;
  if (j == tested || row_ok[j] != ROW_OK) return is_last(meeting, scratch);
  const float* p = probs + static_cast<long long>(j) * vocab_size;
  const float* table = tables + static_cast<long long>(j) * draft_vocab;
  if (slot.q_kind[j] == DRAFT_POINT) table = nullptr;
  const Left left = {weights[j], p, table, slot.drafts[j], t2d, draft_vocab};
  const Noise noise = {slot.seed, slot.n + j + 1,
                       PURPOSE_RESIDUAL | static_cast<u32>(slot.sample) << 8, slot.n};
  const u64 race = draw_packed(own_slice(vocab_size), nullptr, noise, scratch, left);
  if (leader) atomicMax(&meeting.race, race);
  if (!is_last(meeting, scratch)) return false;
  int token = drawn(meeting.race);
  // Nothing left of p: equal to q up to rounding, so p itself is right.
  if (token < 0) {
    token = draw_column(vocab_size, nullptr, noise, scratch, [p](int i) { return p[i]; });
  }
  block_sync();
  if (leader) {
    target_tok[j] = token;
    meeting.race = 0;
  }
  return true;
}

// How often each of `most` drafts is accepted, after a round that tested the first of them. No more
// often than the one before: so what is reached most often is always a beginning.
__device__ __forceinline__ void keep_reach(Slot& slot, int most, int tested, u64 reached) {
  float above = 1.0f;
  float first = 1.0f;
  for (int j = 1; j <= most; ++j) {
    float reach = slot.reach[j - 1];
    const float seen = reached >> (j - 1) & 1 ? 1.0f : 0.0f;
    first = fmul(first, REACH_FIRST);
    reach = j <= tested ? fadd(seen, fmul(REACH_KEPT, fadd(reach, -seen)))
                        : fadd(reach, fmul(REACH_BACK, fadd(first, -reach)));
    above = reach < above ? reach : above;
    slot.reach[j - 1] = above;
  }
}

extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    verify_drafts(const int* row_slot, const int* first_row, int vocab_size, int draft_vocab,
                  const int* t2d, const float* probs, const int* row_ok, Slot* slots,
                  const float* q, int most_drafts, const float* weights, const int* passed,
                  Meeting* meetings, int* target_tok, int* exchange, const ExchangeLayout layout,
                  const int* replay_number, RoundRow* rows, int row_words) {
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
      *result = {index, 0, REASON_NONE, 0, 0, 0, index < 0 ? 0 : slots[index].n};
      if (index >= 0) {
        int* record = record_of(exchange, layout, index, layout.committed);
        *reinterpret_cast<Committed*>(record) = {replay, 0};
      }
    }
    return;
  }

  Slot& slot = slots[index];
  const int position = slot.n;  // of `last`
  const int tested = slot.draft_len;
  const int first = first_row[b];
  const bool last =
      !is_testing(slot, tested)
          ? is_last(meetings[b], scratch)
          : settle(slot, tested, vocab_size, draft_vocab, t2d,
                   probs + static_cast<long long>(first) * vocab_size, row_ok + first,
                   q + static_cast<long long>(index) * most_drafts * draft_vocab, weights + first,
                   passed + first, target_tok + first, meetings[b], scratch);
  if (!leader || !last) return;

  int count = 0;
  int accepted = 0;
  int reason = REASON_NONE;
  int j = 0;
  u64 reached = 0;
  do {
    const int ok = row_ok[first + j];
    const int token = target_tok[first + j];
    if (ok != ROW_OK || token < 0) {
      // Behind an accepted draft the round ends here; the next one opens with this very row.
      if (j == 0 && ok != 0) reason = ok == ROW_NO_TOKEN ? REASON_DEAD_END : REASON_ERROR;
      break;
    }
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
    if (j > 0) reached |= 1ull << (j - 1);
  } while (j > 0 && reason == REASON_NONE);

  if (count > 0) {
    slot.n = position + count;
    slot.last = tokens[count - 1];
    slot.draft_len = 0;
    keep_reach(slot, layout.rows - 1, tested, reached);
    int* drafted = record_of(exchange, layout, index, layout.drafted);
    *reinterpret_cast<Drafted*>(drafted) = {replay, 0};
  }
  if (reason != REASON_NONE) slot.active = 0;
  *result = {index, count, reason, accepted, tested, slot.cut, position};
  int* record = record_of(exchange, layout, index, layout.committed);
  *reinterpret_cast<Committed*>(record) = {replay, count};
  for (int i = 0; i < count; ++i) record[sizeof(Committed) / 4 + i] = tokens[i];
  __threadfence_system();
}
