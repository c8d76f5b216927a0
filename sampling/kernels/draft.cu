// Draft j of a chain: mask row j - 1 through the draft vocabulary, filters, draw.
//
// One block per batch row. Acts only on slots that committed tokens in this replay, are still
// active and have j - 1 drafts. Whether position j is drafted depends on the prefix alone (row
// stamp, stop id, limit, dead end of the pruned vocabulary, broken logits), never on what would be
// drawn.
#include "draw.cuh"
#include "slot.cuh"

extern "C" __global__ void sample_draft(
    const float* logits, int draft_vocab, int token_limit, const int* d2t, const int* row_slot,
    int j, int masked, int draft_stride, const int* count_of, const int* n, int* drafts,
    int* draft_len, const int* active, const int* epoch, const int* limit, const int* stop_ids,
    const int* stop_count, const unsigned long long* seed, const int* sample,
    const float* temperature, const int* top_k, const float* top_p, const float* min_p,
    const int* verify, float* q, int* q_kind, const unsigned int* mask, int mask_stride,
    int mask_words, const int* row_state, int row_state_stride, const int* replay_number,
    int* drafted, int drafted_stride) {
  __shared__ Scratch scratch;
  const int b = static_cast<int>(blockIdx.x);
  const int slot = row_slot[b];
  if (slot < 0 || count_of[b] == 0 || !active[slot] || draft_len[slot] != j - 1) return;
  const int position = n[slot] + j;  // being drafted
  if (position >= limit[slot]) return;
  const int index = slot * draft_stride + j - 1;
  if (j > 1 && is_stop(stop_ids + slot * MAX_STOP_IDS, stop_count[slot], drafts[index - 1])) return;

  Row row;
  row.logits = logits + static_cast<long long>(b) * draft_vocab;
  row.size = draft_vocab;
  row.mask = nullptr;
  row.token_limit = token_limit;
  row.map = d2t;
  if (masked) {
    const int state =
        stamped_state(row_state + static_cast<long long>(slot) * row_state_stride + 4 * (j - 1),
                      epoch[slot], position - 1);
    if (state != ROW_FREE && state != ROW_READY) return;
    if (state == ROW_READY) {
      const unsigned int* bits = mask + static_cast<long long>(slot) * mask_stride +
                                 static_cast<long long>(j - 1) * mask_words;
      row.mask = stage_mask(bits, mask_words, scratch);
    }
  }

  int column = -1;
  int kind = DRAFT_POINT;
  if (temperature[slot] < GREEDY_TEMPERATURE) {
    float best_logit;
    const int status = d2t ? row_best<true, false>(row, nullptr, scratch, &column, &best_logit)
                           : row_best<false, false>(row, nullptr, scratch, &column, &best_logit);
    if (status != ROW_OK) return;
  } else {
    float* table = q + static_cast<long long>(index) * draft_vocab;
    const Filter filter = {temperature[slot], top_k[slot], top_p[slot], min_p[slot]};
    const int status = d2t ? row_distribution<true>(row, filter, table, scratch)
                           : row_distribution<false>(row, filter, table, scratch);
    if (status != ROW_OK) return;
    const bool coupled = verify[slot] == VERIFY_COUPLED;
    const Noise noise = {seed[slot], position,
                         (coupled ? PURPOSE_NOISE : PURPOSE_DRAFT) | static_cast<u32>(sample[slot])
                                                                         << 8};
    column = draw_column(draft_vocab, d2t, noise, scratch, [table](int i) { return table[i]; });
    kind = coupled ? DRAFT_POINT : DRAFT_DENSE;
  }
  if (threadIdx.x != 0) return;
  const int token = d2t ? d2t[column] : column;
  drafts[index] = token;
  q_kind[index] = kind;
  draft_len[slot] = j;
  int* record = drafted + static_cast<long long>(slot) * drafted_stride;
  record[0] = *replay_number;
  record[1] = j;
  record[1 + j] = token;
  __threadfence_system();
}
