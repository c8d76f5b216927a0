// Draft j of a chain: mask row j - 1 through the draft vocabulary, filters, draw.
//
// One block per batch row. Acts only on slots that committed tokens in this replay, are still
// active and have j - 1 drafts. Whether position j is drafted depends on the prefix alone (row
// stamp, stop id, limit, dead end of the pruned vocabulary, broken logits), never on what would be
// drawn.
//
// Where candidates were probed, `answers` holds the first legal one (int4 {replay, j, id, 0}): it
// is the draft, as a point mass. With -1 none was legal and row j - 1 was filled: the best of the
// row is the draft, a point mass too. Requests without a grammar are not probed and draw from q.
// Where the row says that the grammar forces a token, that is the draft, whatever the drafter
// thinks and whether its vocabulary has it or not.
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
    int* drafted, int drafted_stride, const int* answers, int answers_stride) {
  __shared__ Scratch scratch;
  const int b = static_cast<int>(blockIdx.x);
  const int slot = row_slot[b];
  if (slot < 0 || count_of[b] == 0 || !active[slot] || draft_len[slot] != j - 1) return;
  const int position = n[slot] + j;  // being drafted
  if (position >= limit[slot]) return;
  const int index = slot * draft_stride + j - 1;
  if (j > 1 && is_stop(stop_ids + slot * MAX_STOP_IDS, stop_count[slot], drafts[index - 1])) return;

  int token = -1;
  if (answers) {
    const int* answer = answers + static_cast<long long>(slot) * answers_stride;
    if (answer[0] == *replay_number && answer[1] == j) token = answer[2];
  }
  if (token < 0 && masked) {
    token = forced_token(row_state + static_cast<long long>(slot) * row_state_stride + 4 * (j - 1),
                         epoch[slot], position - 1);
  }
  if (token >= 0) {
    if (threadIdx.x == 0) {
      int* record = drafted + static_cast<long long>(slot) * drafted_stride;
      keep_draft(index, j, token, DRAFT_POINT, *replay_number, drafts, q_kind, draft_len + slot,
                 record);
    }
    return;
  }

  Row row;
  row.logits = logits + static_cast<long long>(b) * draft_vocab;
  row.size = draft_vocab;
  row.mask = nullptr;
  row.token_limit = token_limit;
  row.map = d2t;
  int state = ROW_FREE;
  if (masked) {
    state = stamped_state(row_state + static_cast<long long>(slot) * row_state_stride + 4 * (j - 1),
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
  const bool coupled = verify[slot] == VERIFY_COUPLED;
  const bool probed = answers && state == ROW_READY;
  if (temperature[slot] < GREEDY_TEMPERATURE || (probed && !coupled)) {
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
    const Noise noise = {seed[slot], position,
                         (coupled ? PURPOSE_NOISE : PURPOSE_DRAFT) | static_cast<u32>(sample[slot])
                                                                         << 8};
    column = draw_column(draft_vocab, d2t, noise, scratch, [table](int i) { return table[i]; });
    kind = coupled ? DRAFT_POINT : DRAFT_DENSE;
  }
  if (threadIdx.x != 0) return;
  int* record = drafted + static_cast<long long>(slot) * drafted_stride;
  keep_draft(index, j, d2t ? d2t[column] : column, kind, *replay_number, drafts, q_kind,
             draft_len + slot, record);
}
