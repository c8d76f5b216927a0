// Drafts that come all at once: what a drafter proposed, or the grammar's answer about all levels.
//
// One thread per batch row. A proposal may be anything: what cannot be a draft is left out, and
// what hangs on it. Siblings of one token are one draft.
#include "slot.cuh"

extern "C" __global__ void place_drafts(int batch, const int* row_slot, const int* proposal,
                                        const int* parents, int columns, int most_drafts,
                                        int vocab_size, Slot* slots, const RoundRow* rows,
                                        int row_words, int* exchange, const ExchangeLayout layout,
                                        const int* replay_number) {
  const int b = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (b >= batch || row_slot[b] < 0) return;
  const int index = row_slot[b];
  Slot& slot = slots[index];
  if (!is_drafting(slot, *round_row(rows, row_words, b), 1)) return;
  const int* ids = proposal + b * columns;
  const int* under = parents == nullptr ? nullptr : parents + b * columns;
  int count = columns;
  if (proposal == nullptr) {
    const Answer* answer =
        reinterpret_cast<const Answer*>(record_of(exchange, layout, index, layout.answer));
    ids = reinterpret_cast<const int*>(answer + 1);
    under = ids + layout.drafts;
    count = answer->replay == *replay_number ? answer->id : 0;
  }
  int row_of[MAX_DRAFTS + 1];  // of each that is proposed; -1: left out
  row_of[0] = 0;
  for (int i = 1; i <= count; ++i) {
    const int token = ids[i - 1];
    const int hangs_on = under == nullptr ? i - 1 : under[i - 1];
    row_of[i] = -1;
    if (token < 0 || token >= vocab_size || hangs_on < 0 || hangs_on >= i) continue;
    const int parent = row_of[hangs_on];
    if (parent < 0 || (parent > 0 && is_stop(slot, slot.drafts[parent - 1]))) continue;
    const int twin = child_of(slot, slot.draft_len, parent, token);
    if (twin != 0) row_of[i] = twin;
    if (twin != 0) continue;
    const int j = slot.draft_len + 1;
    if (j > most_drafts || slot.n + j >= slot.room) break;
    if (slot.n + depth_of(slot, parent) + 1 >= slot.limit) continue;
    row_of[i] = j;
    keep_draft(slot, j, parent, token, DRAFT_POINT, *replay_number, exchange, layout, index);
  }
  __threadfence_system();
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
