// Drafts that arrive all at once: a drafter's proposal, or the drafts that the grammar has chosen
// from the candidates of all levels.
//
// One thread per batch row. Proposals are not trusted: ids that cannot be drafts are skipped, with
// their descendants. Siblings with equal ids become one draft.
#include "slot.cuh"

extern "C" __global__ void add_proposed_drafts(int batch, const int* row_slot, const int* proposal,
                                               const int* parents, int columns, int max_drafts,
                                               int vocab_size, Slot* slots, const RoundRow* rows,
                                               int row_words, int* exchange,
                                               const ExchangeLayout layout,
                                               const int* replay_number) {
  const int b = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (b >= batch || row_slot[b] < 0) return;
  const int index = row_slot[b];
  Slot& slot = slots[index];
  if (!is_drafting(slot, *round_row(rows, row_words, b), 1)) return;
  const int* ids = proposal + b * columns;
  const int* parent_of = parents == nullptr ? nullptr : parents + b * columns;
  int count = columns;
  if (proposal == nullptr) {
    const Answer* answer =
        reinterpret_cast<const Answer*>(record_of(exchange, layout, index, layout.answer));
    ids = reinterpret_cast<const int*>(answer + 1);
    parent_of = ids + layout.drafts;
    count = answer->replay == *replay_number ? answer->id : 0;
  }
  int row_of[MAX_DRAFTS + 1];  // row of each proposed id; -1: skipped
  row_of[0] = 0;
  for (int i = 1; i <= count; ++i) {
    const int token = ids[i - 1];
    const int proposed_parent = parent_of == nullptr ? i - 1 : parent_of[i - 1];
    row_of[i] = -1;
    if (token < 0 || token >= vocab_size) continue;
    if (proposed_parent < 0 || proposed_parent >= i) continue;
    const int parent = row_of[proposed_parent];
    if (parent < 0 || (parent > 0 && is_stop(slot, slot.drafts[parent - 1]))) continue;
    const int existing = child_of(slot, slot.draft_len, parent, token);
    if (existing != 0) {
      row_of[i] = existing;
      continue;
    }
    const int j = slot.draft_len + 1;
    if (j > max_drafts || slot.n + j >= slot.capacity) break;
    if (slot.n + depth_of(slot, parent) + 1 >= slot.limit) continue;
    row_of[i] = j;
    append_draft(slot, j, parent, token, DRAFT_POINT, *replay_number, exchange, layout, index);
  }
  __threadfence_system();
}

// Writes the tokens that the grammar forces to `proposal`, for each batch row. Element j - 1 is the
// forced token of mask row j - 1, or -1 if the grammar forces none. The mask rows must have been
// filled by this replay's grammar step for the committed tokens.
extern "C" __global__ void propose_forced(int batch, const int* row_slot, int max_drafts,
                                          const Slot* slots, const int* exchange,
                                          const ExchangeLayout layout, int* proposal) {
  const int b = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (b >= batch || row_slot[b] < 0) return;
  const Slot& slot = slots[row_slot[b]];
  for (int j = 0; j < max_drafts; ++j) {
    proposal[b * max_drafts + j] =
        forced_token(stamp_of(exchange, layout, row_slot[b], j), slot.epoch, slot.n + j);
  }
}
