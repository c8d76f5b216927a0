// Draft j of a chain: mask row j - 1 through the draft vocabulary, filters, draw.
//
// One block per batch row. Acts only on slots that committed tokens in this replay, are still
// active and have j - 1 drafts. Whether position j is drafted depends on the prefix alone (row
// stamp, stop id, limit, dead end of the pruned vocabulary, broken logits), never on what would be
// drawn.
//
// Drafts of a request whose candidates are probed are points, drawn like those of coupled requests
// by the race that the target's own draw runs: the slot's answer is the first legal candidate. With
// -1 none was legal and row j - 1 was filled: the draft is drawn under it. Requests without a
// grammar are not probed and draw from q. Where the row says that the grammar forces a token, that
// is the draft, whatever the drafter thinks and whether its vocabulary has it or not.
#include "row.cuh"
#include "slot.cuh"

extern "C" __global__ void sample_draft(const float* logits, int draft_vocab, int token_limit,
                                        const int* d2t, const int* row_slot, int j, int masked,
                                        int probed, Slot* slots, const RoundRow* rows,
                                        int row_words, float* q, int most_drafts, int* exchange,
                                        const ExchangeLayout layout, const int* replay_number) {
  __shared__ Scratch scratch;
  const int b = static_cast<int>(blockIdx.x);
  const int index = row_slot[b];
  if (index < 0 || !is_drafting(slots[index], *round_row(rows, row_words, b), j)) return;
  Slot& slot = slots[index];
  const int position = slot.n + j;  // being drafted
  const RowStamp* stamp = stamp_of(exchange, layout, index, j - 1);

  int token = -1;
  if (probed) {
    const Answer* answer =
        reinterpret_cast<const Answer*>(record_of(exchange, layout, index, layout.answer));
    if (answer->replay == *replay_number && answer->draft == j) token = answer->id;
  }
  if (token < 0 && masked) token = forced_token(stamp, slot.epoch, position - 1);
  if (token >= 0) {
    if (threadIdx.x == 0) {
      keep_draft(slot, j, j - 1, token, DRAFT_POINT, *replay_number, exchange, layout, index);
      __threadfence_system();
    }
    return;
  }

  Row row = {logits + static_cast<long long>(b) * draft_vocab, draft_vocab, nullptr, token_limit,
             d2t};
  int state = ROW_FREE;
  if (masked) {
    state = stamped_state(stamp, slot.epoch, position - 1);
    if (state != ROW_FREE && state != ROW_READY) return;
    if (state == ROW_READY) {
      row.mask = stage_mask(mask_of(exchange, layout, index, j - 1), layout.words, scratch);
    }
  }

  int column = -1;
  int kind = DRAFT_POINT;
  const RowStamp* first = stamp_of(exchange, layout, index, 0);
  const bool coupled = is_coupled(slot) || (probed && !is_unconstrained(first, slot.epoch));
  if (slot.temperature < GREEDY_TEMPERATURE) {
    float best_logit;
    const int status = d2t ? row_best<true, false>(row, nullptr, scratch, &column, &best_logit)
                           : row_best<false, false>(row, nullptr, scratch, &column, &best_logit);
    if (status != ROW_OK) return;
  } else {
    float* table = q + (static_cast<long long>(index) * most_drafts + j - 1) * draft_vocab;
    const Filter filter = {slot.temperature, slot.top_k, slot.top_p, slot.min_p};
    const int status = d2t ? row_distribution<true>(row, filter, table, scratch)
                           : row_distribution<false>(row, filter, table, scratch);
    if (status != ROW_OK) return;
    const u32 purpose = coupled ? PURPOSE_NOISE : PURPOSE_DRAFT;
    const Noise noise = {slot.seed, position, purpose | static_cast<u32>(slot.sample) << 8,
                         coupled ? 0 : slot.n};
    column = draw_column(draft_vocab, d2t, noise, scratch, [table](int i) { return table[i]; });
    kind = coupled ? DRAFT_POINT : DRAFT_DENSE;
  }
  if (threadIdx.x == 0) {
    const int id = d2t ? d2t[column] : column;
    keep_draft(slot, j, j - 1, id, kind, *replay_number, exchange, layout, index);
    __threadfence_system();
  }
}
