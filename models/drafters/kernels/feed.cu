// Assigns token, slot and position to each row of a drafter's forward passes. A padding row has
// slot -1 and position -1.
#include "sampling/kernels/slot.cuh"

// Writes the tokens that verification has committed as input rows for the drafter. Row i of a
// request gets its committed token i (from 0), at position old_n + shift + i, where old_n is the
// position of the request's last token before the commit. With shift 1, this is the token's own
// position in the sequence; with shift 0, it is the position of the preceding token. `last[b]`
// receives the row of the last committed token of batch row b.
extern "C" __global__ void committed_rows(const int* row_slot, const Slot* slots,
                                          const RoundRow* rows, int row_words, const int* map,
                                          int count, int shift, int* token, int* slot, int* pos,
                                          int* last) {
  for (int r = threadIdx.x; r < count; r += blockDim.x) {
    const int b = batch_row(map[r]);
    const int i = draft_row(map[r]);
    const int s = row_slot[b];
    const RoundRow* row = round_row(rows, row_words, b);
    const bool used = s >= 0 && i < row->count && slots[s].active;
    token[r] = used ? reinterpret_cast<const int*>(row + 1)[i] : 0;
    slot[r] = used ? s : -1;
    pos[r] = used ? row->old_n + shift + i : -1;
    if (i == 0) last[b] = r + (row->count > 0 ? row->count - 1 : 0);
  }
}

// Writes input rows for the drafter: draft `j` of each chain, one per batch row, at position
// n + shift + j - 1, where n is the position of the last committed token (`Slot.n`). With shift 1,
// this is the draft's position in the sequence. A request whose chain has fewer than `j` drafts
// gets a padding row.
extern "C" __global__ void draft_rows(const int* row_slot, const Slot* slots, const RoundRow* rows,
                                      int row_words, int batch, int j, int shift, int* token,
                                      int* slot, int* pos) {
  for (int b = threadIdx.x; b < batch; b += blockDim.x) {
    const int s = row_slot[b];
    const int position = s < 0 ? 0 : slots[s].n + shift + j - 1;
    const bool used = s >= 0 && round_row(rows, row_words, b)->count > 0 && slots[s].active &&
                      slots[s].draft_len >= j && position < slots[s].limit;
    token[b] = used ? slots[s].drafts[j - 1] : 0;
    slot[b] = used ? s : -1;
    pos[b] = used ? position : -1;
  }
}

// Writes the draft-tree nodes of depth `level` - 1 as input rows, from which the drafter computes
// the logits for depth `level`, which is at least 2. Row b * branch + f is the f-th of these nodes
// of batch row b. `pos` receives n + shift + level - 2, where n is the position of the last
// committed token (`Slot.n`); with shift 1, this is the node's position in the sequence. `origin`
// receives, for each row, the input row of the node's parent in the call for the previous level.
extern "C" __global__ void node_rows(const int* row_slot, const Slot* slots, const RoundRow* rows,
                                     int row_words, int batch, int branch, int level, int shift,
                                     int* token, int* slot, int* pos, unsigned long long* ancestors,
                                     int* origin) {
  for (int r = threadIdx.x; r < batch * branch; r += blockDim.x) {
    const int b = r / branch;
    const int s = row_slot[b];
    const int j = (level - 2) * branch + r % branch + 1;
    const int position = s < 0 ? 0 : slots[s].n + shift + level - 2;
    const bool used = s >= 0 && round_row(rows, row_words, b)->count > 0 && slots[s].active &&
                      slots[s].drafts[j - 1] >= 0 && position < slots[s].limit;
    token[r] = used ? slots[s].drafts[j - 1] : 0;
    slot[r] = used ? s : -1;
    pos[r] = used ? position : -1;
    ancestors[r] = used ? slots[s].path[j - 1] : 0;
    origin[r] = !used ? 0 : level == 2 ? b : b * branch + (slots[s].parent[j - 1] - 1) % branch;
  }
}
