// Draft j of a chain: mask row j - 1 through the draft vocabulary, filters, draw.
//
// Acts only on slots that committed tokens in this replay, are still
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

extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    sample_draft(const float* logits, int draft_vocab, int token_limit, const int* d2t,
                 const int* row_slot, int j, int masked, int probed, const int* masks,
                 Meeting* meetings, Slot* slots, const RoundRow* rows, int row_words, float* q,
                 int most_drafts, int* exchange, const ExchangeLayout layout,
                 const int* replay_number) {
  __shared__ Scratch scratch;
  __shared__ int known, state, unconstrained;
  const int b = static_cast<int>(blockIdx.x);
  const int index = row_slot[b];
  if (index < 0 || !is_drafting(slots[index], *round_row(rows, row_words, b), j)) return;
  Slot& slot = slots[index];
  const int position = slot.n + j;  // being drafted
  const bool leader = threadIdx.x == 0;

  if (leader) {  // host memory is read once
    const RowStamp* stamp = stamp_of(exchange, layout, index, j - 1);
    const Answer* answer =
        reinterpret_cast<const Answer*>(record_of(exchange, layout, index, layout.answer));
    const bool answered = probed && answer->replay == *replay_number && answer->draft == j;
    known = answered ? answer->id : -1;
    if (known < 0 && masked) known = forced_token(stamp, slot.epoch, position - 1);
    state = masked ? stamped_state(stamp, slot.epoch, position - 1) : ROW_FREE;
    unconstrained = is_unconstrained(stamp_of(exchange, layout, index, 0), slot.epoch);
  }
  block_sync();
  int token = known;
  int kind = DRAFT_POINT;
  if (token >= 0) {
    if (blockIdx.y > 0) return;
  } else {
    if (state != ROW_FREE && state != ROW_READY) return;
    const Row row = {logits + static_cast<long long>(b) * draft_vocab, draft_vocab,
                     state == ROW_READY ? mask_of(masks, layout, index, j - 1) : nullptr,
                     token_limit, d2t};
    const bool greedy = slot.temperature < GREEDY_TEMPERATURE;
    const bool coupled = is_coupled(slot) || (probed && !unconstrained);
    if (!greedy && !coupled) kind = DRAFT_DENSE;
    float* table = q + (static_cast<long long>(index) * most_drafts + j - 1) * draft_vocab;
    const Filter filter = {slot.temperature, slot.top_k, slot.top_p, slot.min_p};
    const u32 purpose = coupled ? PURPOSE_NOISE : PURPOSE_DRAFT;
    const Noise noise = {slot.seed, position, purpose | static_cast<u32>(slot.sample) << 8,
                         coupled ? 0 : slot.n};
    const int status = row_sample(row, !greedy, filter, !greedy, noise, greedy ? nullptr : table,
                                  meetings[b], STEP_BEST, STEP_DRAW, scratch, &token);
    if (status != ROW_OK) return;
    if (d2t) token = d2t[token];
  }
  if (leader) {
    keep_draft(slot, j, j - 1, token, kind, *replay_number, exchange, layout, index);
    __threadfence_system();
  }
}
