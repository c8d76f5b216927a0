// The ids a drafter would like best for draft j, in order, for the grammar to test one by one.
//
// One block per batch row; acts on the slots that sample_draft acts on. Without a mask in hand the
// order is that of the draw to come: by logit for greedy requests and for rejection sampling, whose
// draft is then a point mass and best the likeliest; for coupled verification by weight / E, the
// race that the target's draw runs with the same noise. Columns that the filters would take away
// come after all others: the mask, not known yet, may take those away too.
#include "row.cuh"
#include "slot.cuh"

// A thread's columns fall into parts, and it knows the best of each: only the part that a column
// was taken from is looked through again. One part is enough where a block shares a row.
constexpr int PARTS = BLOCK == 1 ? 64 : 1;

// The largest (score, smaller column first) below `last` of one part; 0: none is left.
__device__ inline u64 best_below(const float* score, int first, int size, u64 last) {
  u64 best = 0;
  for (int i = first; i < size; i += BLOCK * PARTS) {
    const int key = order_key(score[i]);
    if (key <= KEY_NEGATIVE_INFINITY) continue;
    const u64 packed = (static_cast<u64>(static_cast<u32>(key) ^ 0x80000000u) << 32) |
                       (0xffffffffu - static_cast<u32>(i));
    if (packed < last && packed > best) best = packed;
  }
  return best;
}

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
  if (slot.temperature >= GREEDY_TEMPERATURE && slot.verify == VERIFY_COUPLED) {
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

  // The best of what is left, time and again; ties go to the smaller column.
  Candidates* head =
      reinterpret_cast<Candidates*>(record_of(exchange, layout, index, layout.candidate_ids));
  int* ids = reinterpret_cast<int*>(head + 1);
  u64 own[PARTS];
  for (int p = 0; p < PARTS; ++p) own[p] = best_below(score, tid * PARTS + p, draft_vocab, ~0ull);
  int found = 0;
  for (; found < layout.candidates; ++found) {
    u64 best = 0;
    for (int p = 0; p < PARTS; ++p) best = own[p] > best ? own[p] : best;
    const u64 packed = block_reduce(best, scratch, Max());
    if (packed == 0) break;
    for (int p = 0; p < PARTS; ++p) {
      if (own[p] == packed) own[p] = best_below(score, tid * PARTS + p, draft_vocab, packed);
    }
    const int column = static_cast<int>(0xffffffffu - static_cast<u32>(packed));
    if (tid == 0) ids[found] = d2t ? d2t[column] : column;
  }
  if (tid != 0) return;
  *head = {*replay_number, j, found};
  __threadfence_system();
}
