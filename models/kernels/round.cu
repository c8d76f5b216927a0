// The bookkeeping kernels of a round: which token, slot and position each row of the target forward
// and of the drafter's forwards stands for. A row that has no work carries slot -1 and position -1.
#include "slot.cuh"

// Opens replay `*replay + 1`: takes the row map from the input ring and lays out the target's rows.
// Row b * width + j feeds `last` (j = 0) or draft j, at position n + depth. One block.
//
// An entry without this replay's stamp was never published for it: every row is then padding, so a
// replay nobody announced changes nothing.
extern "C" __global__ void round_begin(int* replay, const int* ring_rows, int ring_rows_stride,
                                       const int* ring_stamp, int ring_stamp_stride,
                                       int ring_entries, const Slot* slots, int slot_count,
                                       int batch, int width, int* row_slot, int* token, int* slot,
                                       int* pos, unsigned long long* tree) {
  const int now = *replay + 1;
  const int entry = static_cast<int>(static_cast<unsigned int>(now) % ring_entries);
  const bool published = ring_stamp[entry * ring_stamp_stride] == now;
  __syncthreads();  // every thread has read the old number before it changes
  if (threadIdx.x == 0) *replay = now;
  for (int r = threadIdx.x; r < batch * width; r += blockDim.x) {
    const int b = r / width;
    const int j = r % width;
    int s = published ? ring_rows[entry * ring_rows_stride + b] : -1;
    if (s < 0 || s >= slot_count || !slots[s].active) s = -1;
    if (j == 0) row_slot[b] = s;
    const bool used = s >= 0 && j <= slots[s].draft_len;
    token[r] = !used ? 0 : j == 0 ? slots[s].last : slots[s].drafts[j - 1];
    slot[r] = used ? s : -1;
    pos[r] = used ? slots[s].n + depth_of(slots[s], j) : -1;
    if (tree != nullptr) tree[r] = used ? path_of(slots[s], j) : 0;
  }
}

// Lays out the tokens that verification committed: row b * width + i is token i of batch row b, at
// position old_n + shift + i. `last[b]` is the row of the last of them.
extern "C" __global__ void committed_rows(const int* row_slot, const Slot* slots,
                                          const RoundRow* rows, int row_words, int batch, int width,
                                          int shift, int* token, int* slot, int* pos, int* last) {
  for (int r = threadIdx.x; r < batch * width; r += blockDim.x) {
    const int b = r / width;
    const int i = r % width;
    const int s = row_slot[b];
    const RoundRow* row = round_row(rows, row_words, b);
    const bool used = s >= 0 && i < row->count && slots[s].active;
    token[r] = used ? reinterpret_cast<const int*>(row + 1)[i] : 0;
    slot[r] = used ? s : -1;
    pos[r] = used ? row->old_n + shift + i : -1;
    if (i == 0) last[b] = b * width + (row->count > 0 ? row->count - 1 : 0);
  }
}

// Lays out draft `j` of every slot that is still drafting, at position n + shift + j - 1.
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

// Lays out the nodes of a tree that its drafter is fed at `level`, from 2 on: row b * branch + f is
// node f, at position n + shift + level - 2. `origin` is the row of the level before that it hangs
// on.
extern "C" __global__ void node_rows(const int* row_slot, const Slot* slots, const RoundRow* rows,
                                     int row_words, int batch, int branch, int level, int shift,
                                     int* token, int* slot, int* pos, unsigned long long* tree,
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
    tree[r] = used ? slots[s].path[j - 1] : 0;
    origin[r] = !used ? 0 : level == 2 ? b : b * branch + (slots[s].parent[j - 1] - 1) % branch;
  }
}

// Writes the device's clock into column `part` of the timeline entry of the current replay.
extern "C" __global__ void stamp_time(const int* replay, long long* timeline, int stride,
                                      int entries, int part) {
  const int entry = static_cast<int>(static_cast<unsigned int>(*replay) % entries);
  timeline[entry * stride + part] = static_cast<long long>(global_timer_ns());
}
