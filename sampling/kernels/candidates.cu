// The ids a drafter would like best for draft j, in order, for the grammar to test one by one.
//
// One block per batch row; acts on the slots that sample_draft acts on. Without a mask in hand the
// order is that of the draw to come: by logit for greedy requests, for others by weight / E, the
// race that the target's draw runs with the same noise. Columns that the filters would take away
// come after all others: the mask, not known yet, may take those away too.
#include "best.cuh"
#include "slot.cuh"

extern "C" __global__ void draft_candidates(const float* logits, int draft_vocab, int token_limit,
                                            const int* d2t, const int* row_slot, int j,
                                            const Slot* slots, const RoundRow* rows, int row_words,
                                            float* q, int most_drafts, int* exchange,
                                            const ExchangeLayout layout, const int* replay_number) {
  __shared__ Scratch scratch;
  const int tid = static_cast<int>(threadIdx.x);
  const int b = static_cast<int>(blockIdx.x);
  const int index = row_slot[b];
  if (index < 0 || !is_drafting(slots[index], *round_row(rows, row_words, b), j)) return;
  const Slot& slot = slots[index];
  const int position = slot.n + j;  // being drafted
  if (is_unconstrained(stamp_of(exchange, layout, index, 0), slot.epoch)) return;

  const Row row = {logits + static_cast<long long>(b) * draft_vocab, draft_vocab, nullptr,
                   token_limit, d2t};
  // There is no table, for the draft is a point: its room holds the scores.
  float* score = q + (static_cast<long long>(index) * most_drafts + j - 1) * draft_vocab;
  int best_column;
  float best_logit;
  int status = d2t ? row_best<true, true>(row, score, scratch, &best_column, &best_logit)
                   : row_best<false, true>(row, score, scratch, &best_column, &best_logit);
  if (status != ROW_OK) return;
  if (slot.temperature >= GREEDY_TEMPERATURE) {
    const Filter filter = {slot.temperature, slot.top_k, slot.top_p, slot.min_p};
    status = d2t ? row_distribution<true>(row, filter, score, scratch)
                 : row_distribution<false>(row, filter, score, scratch);
    if (status != ROW_OK) return;
    const float minus_infinity = __uint_as_float(0xff800000u);
    const float inverse_temperature = fdiv(1.0f, filter.temperature);
    const Noise noise = {slot.seed, position, PURPOSE_NOISE | static_cast<u32>(slot.sample) << 8};
    for (int i = tid; i < draft_vocab; i += BLOCK) {
      const int id = d2t ? d2t[i] : i;
      if (id < 0 || id >= token_limit || !(row.logits[i] > minus_infinity)) {
        score[i] = minus_infinity;
        continue;
      }
      const float e = exponential(noise_words(noise, static_cast<u32>(id) >> 2).x[id & 3]);
      if (score[i] > 0.0f) {
        score[i] = fdiv(score[i], e);
      } else {
        const float scaled = fmul(fadd(row.logits[i], -best_logit), inverse_temperature);
        score[i] = -fdiv(e, exp_nonpositive(scaled));  // weight 0: -inf
      }
    }
  }

  Candidates* head =
      reinterpret_cast<Candidates*>(record_of(exchange, layout, index, layout.candidate_ids));
  int* ids = reinterpret_cast<int*>(head + 1);
  BestFirst order(score, draft_vocab);
  int found = 0;
  for (; found < layout.candidates; ++found) {
    const int column = order.next(scratch);
    if (column < 0) break;
    if (tid == 0) ids[found] = d2t ? d2t[column] : column;
  }
  if (tid != 0) return;
  *head = {*replay_number, j, found};
  __threadfence_system();
}
