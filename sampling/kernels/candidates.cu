// Lists the ids that may become draft j (the candidates), in descending order of preference. The
// grammar worker tests them in this order and stops at the first legal one.
//
// The kernel processes the same slots as sample_draft. Candidates are ordered as the target will
// prefer tokens: for greedy requests by logit, for sampled requests by weight / E, the score of the
// exponential race (row.cuh) with the random numbers that the target will use. Columns that top-k,
// top-p or min-p remove come last. They are candidates too, because the mask is not known yet and
// may remove all other columns.
//
// In a lattice mode (is_lattice_mode), the grammar tests the candidates of all draft levels in one
// step. Each batch row then has one list of candidates per level: row l * batch + b of `logits`
// belongs to level l + 1 of batch row b. The kernel also writes the probability of each candidate,
// and j is the maximum number of drafts. If the drafts are a tree, requests without a grammar also
// get candidates.
#include "adjust.cuh"
#include "best.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    draft_candidates(float* logits, int draft_vocab, int token_limit, const int* d2t,
                     const int* t2d, const int* row_slot, int batch, int j, const int* tables,
                     int vocab_size, CrossBlockScratch* cross_block, const Slot* slots,
                     const RoundRow* rows, int row_words, float* q, int max_drafts, int* exchange,
                     const ExchangeLayout layout, const int* replay_number) {
  __shared__ Scratch scratch;
  __shared__ float drafted[MAX_DRAFTS];
  const int tid = static_cast<int>(threadIdx.x);
  const int r = static_cast<int>(blockIdx.x);
  const int level = r / batch;  // from 0
  const bool lattice = is_lattice_mode(layout.mode);
  const int draft = lattice ? 1 : j;
  const int index = row_slot[r % batch];
  if (index < 0 || !is_drafting(slots[index], *round_row(rows, row_words, r % batch), draft))
    return;
  const Slot& slot = slots[index];
  const int position = slot.n + draft + level;  // position of the draft
  if (position >= slot.limit) return;
  if (tid == 0) {  // one thread reads host memory
    scratch.token = is_unconstrained(read_stamp(exchange, layout, index, 0), slot.epoch);
  }
  block_sync();
  if (scratch.token && layout.mode != DRAFT_MODE_TREE_LATTICE) {
    skip_row(cross_block[r], STEP_BEST, STEP_DRAW, scratch);
    return;
  }
  Candidates* head =
      reinterpret_cast<Candidates*>(record_of(exchange, layout, index, layout.candidate_ids));
  int* ids = reinterpret_cast<int*>(head + 1) + level * layout.candidates;
  float* shares = reinterpret_cast<float*>(ids + layout.levels * layout.candidates);
  if (lattice && tid == 0 && blockIdx.y == 0) {
    ids[0] = -1;
    const int levels = static_cast<int>(gridDim.x) / batch;
    const int left = slot.limit - position;
    if (level == 0) *head = {*replay_number, j, left < levels ? left : levels};
  }

  float* x = logits + static_cast<long long>(r) * draft_vocab;
  // In a lattice mode, where the candidates of all levels are found at once, `draft` is 1, because
  // the drafts of earlier levels are not known yet. Penalties then count committed tokens only.
  adjust_draft(x, own_slice(draft_vocab), {draft_vocab, d2t, t2d}, slot, path_of(slot, draft - 1),
               position, table_of(tables, vocab_size, index), vocab_size, drafted);
  const Row row = {x, draft_vocab, nullptr, token_limit, d2t};
  // The grammar chooses the draft among the candidates, so verification treats the draft as a point
  // mass and does not read its table of probabilities in `q`. The memory of this table stores the
  // scores of the candidates instead, one per id of the draft vocabulary.
  float* score = q + (static_cast<long long>(index) * max_drafts + draft - 1 + level) * draft_vocab;
  const bool sampled = slot.temperature >= GREEDY_TEMPERATURE;
  const Filter filter = {slot.temperature, slot.top_k, slot.top_p, slot.min_p};
  int best_column;
  const int status = row_sample(row, sampled, filter, false, {}, score, cross_block[r], STEP_BEST,
                                STEP_DRAW, scratch, &best_column);
  if (status != ROW_OK) return;
  block_sync();
  if (sampled) {
    const float best_logit = row.logits[best_column] + 0.0f;
    const float minus_infinity = __uint_as_float(0xff800000u);
    const float inverse_temperature = fdiv(1.0f, filter.temperature);
    const Noise noise = {slot.seed, position, PURPOSE_NOISE | static_cast<u32>(slot.sample) << 8};
    NoiseOfIds noise_of = {noise};
    for_each_four({0, draft_vocab}, [&](int i) {
      const int id = d2t ? d2t[i] : i;
      if (id < 0 || id >= token_limit || !(row.logits[i] > minus_infinity)) {
        score[i] = minus_infinity;
        return;
      }
      const float e = exponential(noise_of(static_cast<u32>(id)));
      if (score[i] > 0.0f) {
        score[i] = fdiv(score[i], e);
      } else {
        const float scaled = fmul(fadd(row.logits[i], -best_logit), inverse_temperature);
        score[i] = -fdiv(e, exp_nonpositive(scaled));  // weight 0: -inf
      }
    });
    block_sync();
  }

  BestFirst order(score, draft_vocab);
  int found = 0;
  float top = 0.0f;
  float sum = 1.0f;
  // Returns the weight of a column of the draft vocabulary with score x, relative to the weight of
  // the best column; 0 for columns that the filters remove.
  const auto relative = [&](float x) {
    if (!sampled) return exp_nonpositive(fadd(x, -top));
    return x > 0.0f ? fdiv(x, top) : 0.0f;
  };
  for (; found < layout.candidates; ++found) {
    const int column = order.next(scratch);
    if (column < 0) break;
    if (lattice && found == 0) {
      top = score[column];
      u64 fixed = 0;
      for (int i = tid; i < draft_vocab; i += BLOCK) fixed += fixed_point(relative(score[i]));
      sum = from_fixed_point(block_reduce(fixed, scratch, Sum()));
    }
    if (tid != 0) continue;
    ids[found] = d2t ? d2t[column] : column;
    if (lattice) shares[found] = fdiv(relative(score[column]), sum);
  }
  if (tid != 0) return;
  if (!lattice) *head = {*replay_number, j, found};
  if (lattice && found < layout.candidates) ids[found] = -1;
  __threadfence_system();
}
