// Kernels that store all drafts of a request at once, not level by level. The drafts are ids that a
// drafter proposes, tokens that the grammar forces, or ids that the grammar has chosen among the
// candidates of all levels.
#include "row.cuh"
#include "slot.cuh"

// Stores proposed ids as the drafts of a slot. One block per batch row. All threads of the block
// load the proposal in parallel, because a load from host memory takes about a microsecond on a
// GPU; then one thread appends the drafts. If `proposal` is null, the proposal is the grammar's
// answer (Answer record of the slot).
//
// Proposals are not trusted: an id that cannot be a draft (outside the vocabulary, after a stop id,
// beyond the length limit, invalid parent) is skipped, and so are its descendants in the draft
// tree. Siblings with equal ids become one draft.
extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    add_proposed_drafts(const int* row_slot, const int* proposal, const int* parents, int columns,
                        int max_drafts, int vocab_size, Slot* slots, const RoundRow* rows,
                        int row_words, int* exchange, const ExchangeLayout layout,
                        const int* replay_number) {
  __shared__ int ids[MAX_DRAFTS];
  __shared__ int parent_of[MAX_DRAFTS];
  const int tid = static_cast<int>(threadIdx.x);
  const int b = static_cast<int>(blockIdx.x);
  const int index = row_slot[b];
  if (index < 0) return;
  Slot& slot = slots[index];
  if (!is_drafting(slot, *round_row(rows, row_words, b), 1)) return;
  const bool is_answer = proposal == nullptr;
  const int* own_ids = is_answer ? answer_words(exchange, layout, index) : proposal + b * columns;
  const int* own_parents = parents == nullptr ? nullptr : parents + b * columns;
  if (is_answer) own_parents = own_ids + layout.drafts;
  for (int i = tid; i < columns; i += BLOCK) {
    ids[i] = own_ids[i];
    parent_of[i] = own_parents == nullptr ? i : own_parents[i];
  }
  int count = columns;
  if (is_answer && tid == 0) {
    const Answer answer = read_answer(exchange, layout, index);
    count = answer.replay == *replay_number ? answer.id : 0;
  }
  block_sync();
  if (tid != 0) return;
  int row_of[MAX_DRAFTS + 1];  // row of each proposed id; -1: skipped
  row_of[0] = 0;
  for (int i = 1; i <= count; ++i) {
    const int token = ids[i - 1];
    row_of[i] = -1;
    if (token < 0 || token >= vocab_size) continue;
    if (parent_of[i - 1] < 0 || parent_of[i - 1] >= i) continue;
    const int parent = row_of[parent_of[i - 1]];
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

// Writes to `proposal` [batch, max_drafts], for each batch row, the tokens that the grammar forces.
// Element i is the token that the grammar forces at position n + i + 1, or -1 if it forces none
// there; n is the position of the last committed token. The token is read from the stamp of mask
// row i, which the grammar worker must have filled in this replay. One block per batch row.
extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    propose_forced(const int* row_slot, int max_drafts, const Slot* slots, const int* exchange,
                   const ExchangeLayout layout, int* proposal) {
  const int b = static_cast<int>(blockIdx.x);
  if (row_slot[b] < 0) return;
  const Slot& slot = slots[row_slot[b]];
  for (int j = static_cast<int>(threadIdx.x); j < max_drafts; j += BLOCK) {
    proposal[b * max_drafts + j] =
        forced_token(read_stamp(exchange, layout, row_slot[b], j), slot.epoch, slot.n + j);
  }
}
