// Drafts that come all at once: what a drafter proposed, or what the grammar forces.
//
// One thread per batch row. The conditions under which a position is drafted are those of
// sample_draft, so a proposal may be anything: what cannot be a draft ends the chain.
#include "slot.cuh"

extern "C" __global__ void place_drafts(int batch, const int* row_slot, const int* proposal,
                                        int most_drafts, int vocab_size, Slot* slots,
                                        const RoundRow* rows, int row_words, int* exchange,
                                        const ExchangeLayout layout, const int* replay_number) {
  const int b = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (b >= batch || row_slot[b] < 0) return;
  Slot& slot = slots[row_slot[b]];
  int* drafted = record_of(exchange, layout, row_slot[b], layout.drafted);
  for (int j = 1; j <= most_drafts; ++j) {
    const int token = proposal[b * most_drafts + j - 1];
    if (token < 0 || token >= vocab_size) return;
    if (!is_drafting(slot, *round_row(rows, row_words, b), j)) return;
    keep_draft(slot, j, token, DRAFT_POINT, *replay_number, drafted);
  }
}

// Proposes the tokens that mask rows 0, 1, .. force; they were made after this replay's commit.
extern "C" __global__ void propose_forced(int batch, const int* row_slot, int most_drafts,
                                          const Slot* slots, const int* exchange,
                                          const ExchangeLayout layout, int* proposal) {
  const int b = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (b >= batch || row_slot[b] < 0) return;
  const Slot& slot = slots[row_slot[b]];
  for (int j = 0; j < most_drafts; ++j) {
    proposal[b * most_drafts + j] =
        forced_token(stamp_of(exchange, layout, row_slot[b], j), slot.epoch, slot.n + j);
  }
}
