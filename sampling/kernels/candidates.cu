// The ids a drafter would like best for draft j, in order, for the grammar to test one by one.
//
// One block per batch row; acts on the slots that sample_draft acts on. Without a mask in hand the
// order is that of the draw to come: by logit for greedy requests and for rejection sampling, whose
// draft is then a point mass and best the likeliest; for coupled verification by weight / E, the
// race that the target's draw runs with the same noise. Columns that the filters would take away
// come after all others: the mask, not known yet, may take those away too.
#include "draw.cuh"
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

extern "C" __global__ void draft_candidates(
    const float* logits, int draft_vocab, int token_limit, const int* d2t, const int* row_slot,
    int j, int draft_stride, const int* count_of, const int* n, const int* drafts,
    const int* draft_len, const int* active, const int* epoch, const int* limit,
    const int* stop_ids, const int* stop_count, const unsigned long long* seed, const int* sample,
    const float* temperature, const int* top_k, const float* top_p, const float* min_p,
    const int* verify, float* q, const int* row_state, int row_state_stride,
    const int* replay_number, int most, int* candidates, int candidates_stride) {
  __shared__ Scratch scratch;
  const int tid = static_cast<int>(threadIdx.x);
  const int b = static_cast<int>(blockIdx.x);
  const int slot = row_slot[b];
  if (slot < 0 || count_of[b] == 0 || !active[slot] || draft_len[slot] != j - 1) return;
  const int position = n[slot] + j;  // being drafted
  if (position >= limit[slot]) return;
  const int index = slot * draft_stride + j - 1;
  if (j > 1 && is_stop(stop_ids + slot * MAX_STOP_IDS, stop_count[slot], drafts[index - 1])) return;
  if (is_unconstrained(row_state + static_cast<long long>(slot) * row_state_stride, epoch[slot])) {
    return;
  }

  Row row;
  row.logits = logits + static_cast<long long>(b) * draft_vocab;
  row.size = draft_vocab;
  row.mask = nullptr;
  row.token_limit = token_limit;
  row.map = d2t;
  float* score = q + static_cast<long long>(index) * draft_vocab;  // no table: the draft is a point
  int best_column;
  float best_logit;
  int status = d2t ? row_best<true, true>(row, score, scratch, &best_column, &best_logit)
                   : row_best<false, true>(row, score, scratch, &best_column, &best_logit);
  if (status != ROW_OK) return;
  if (temperature[slot] >= GREEDY_TEMPERATURE && verify[slot] == VERIFY_COUPLED) {
    const Filter filter = {temperature[slot], top_k[slot], top_p[slot], min_p[slot]};
    status = d2t ? row_distribution<true>(row, filter, score, scratch)
                 : row_distribution<false>(row, filter, score, scratch);
    if (status != ROW_OK) return;
    const float minus_infinity = __uint_as_float(0xff800000u);
    const float inverse_temperature = fdiv(1.0f, filter.temperature);
    const Noise noise = {seed[slot], position, PURPOSE_NOISE | static_cast<u32>(sample[slot]) << 8};
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

  // The best of what is left, `most` times; ties go to the smaller column.
  int* record = candidates + static_cast<long long>(slot) * candidates_stride;
  u64 own[PARTS];
  for (int p = 0; p < PARTS; ++p) own[p] = best_below(score, tid * PARTS + p, draft_vocab, ~0ull);
  int found = 0;
  for (; found < most; ++found) {
    u64 best = 0;
    for (int p = 0; p < PARTS; ++p) best = own[p] > best ? own[p] : best;
    const u64 packed = block_reduce(best, scratch, Max());
    if (packed == 0) break;
    for (int p = 0; p < PARTS; ++p) {
      if (own[p] == packed) own[p] = best_below(score, tid * PARTS + p, draft_vocab, packed);
    }
    const int column = static_cast<int>(0xffffffffu - static_cast<u32>(packed));
    if (tid == 0) record[3 + found] = d2t ? d2t[column] : column;
  }
  if (tid != 0) return;
  record[0] = *replay_number;
  record[1] = j;
  record[2] = found;
  __threadfence_system();
}
