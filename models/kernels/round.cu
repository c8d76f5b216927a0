// The bookkeeping kernels of a round: which token, slot and position each row of the target forward
// and of the drafter's forwards stands for. A row that has no work carries slot -1 and position -1.
#include "slot.cuh"

// Writes the device's clock into column `part` of the timeline entry of a replay.
__device__ __forceinline__ void stamp(long long* timeline, int stride, int entries, int replay,
                                      int part) {
  const int entry = static_cast<int>(static_cast<unsigned int>(replay) % entries);
  timeline[entry * stride + part] = static_cast<long long>(global_timer_ns());
}

// Draft j of batch row b as a number of 62 bits, the greater the sooner it is given a place: by
// what past rounds say of how likely it is accepted; of equals the one of fewer drafts before it.
__device__ __forceinline__ unsigned long long precedence(const Slot& slot, int b, int j) {
  const float reach = slot.reach[j - 1];
  const unsigned long long likely = __float_as_uint(reach);  // in order, as none is negative
  return likely << 32 | static_cast<unsigned int>(0xffff - j) << 16 |
         static_cast<unsigned int>(0xffff - b);
}

// Lays out tokens begin..end-1 of a prompt, as six arrays of `rows` rows: the token, the one
// behind, slot and position, which are -1 of padding: for the target, which is not fed token
// `last`, and again for the drafter, which is. One block.
extern "C" __global__ void prompt_rows(const int* tokens, int slot, int begin, int end, int last,
                                       int rows, int* out) {
  for (int r = static_cast<int>(threadIdx.x); r < rows; r += static_cast<int>(blockDim.x)) {
    const int p = begin + r;
    const bool own = p < end;
    const bool fed = own && p < last;
    const int row[] = {own ? tokens[p] : 0, fed ? tokens[p + 1] : 0, fed ? slot : -1,
                       fed ? p : -1,        own ? slot : -1,         own ? p : -1};
    for (int i = 0; i < 6; ++i) out[i * rows + r] = row[i];
  }
}

// Opens replay `*replay + 1`: takes the slots from the input ring, gives their drafts the rows that
// the round has, and lays these out. Every batch row has one that feeds `last`, at position n; the
// others feed drafts, at n + depth. Where there are more drafts than rows, those that are most
// likely to be accepted have a place: always the first ones of a slot, and whether draft j is one
// of them depends on what stood before it and on other slots, never on j itself or what follows.
// The others are cut, and the grammar is told. One block.
//
// An entry without this replay's stamp was never published for it: every row is then padding, so a
// replay nobody announced changes nothing. The timeline's first stamp is when it ends.
extern "C" __global__ void round_begin(int* replay, const int* ring_rows, int ring_rows_stride,
                                       const int* ring_stamp, int ring_stamp_stride,
                                       int ring_entries, Slot* slots, int slot_count, int batch,
                                       int rows, int* exchange, const ExchangeLayout layout,
                                       int* row_slot, int* first, int* map, int* token, int* slot,
                                       int* pos, unsigned long long* tree, long long* timeline,
                                       int timeline_stride, int timeline_entries) {
  __shared__ int drafts, above;
  const int tid = static_cast<int>(threadIdx.x);
  const int step = static_cast<int>(blockDim.x);
  const int now = *replay + 1;
  const int entry = static_cast<int>(static_cast<unsigned int>(now) % ring_entries);
  const bool published = ring_stamp[entry * ring_stamp_stride] == now;
  const int places = rows - batch;
  const int most = layout.rows - 1;
  if (tid == 0) drafts = 0;
  __syncthreads();  // every thread has read the old number before it changes
  if (tid == 0) *replay = now;
  for (int b = tid; b < batch; b += step) {
    int s = published ? ring_rows[entry * ring_rows_stride + b] : -1;
    if (s < 0 || s >= slot_count || !slots[s].active) s = -1;
    row_slot[b] = s;
    if (s < 0) continue;
    slots[s].cut = 0;
    atomicAdd(&drafts, slots[s].draft_len);
  }
  __syncthreads();
  if (drafts > places) {
    unsigned long long least = 0;  // what `places` drafts reach, found bit by bit
    for (int bit = 61; bit >= 0; --bit) {
      const unsigned long long tried = least | 1ull << bit;
      if (tid == 0) above = 0;
      __syncthreads();
      int reaching = 0;
      for (int c = tid; c < batch * most; c += step) {
        const int s = row_slot[c / most];
        const int j = c % most + 1;
        if (s < 0 || j > slots[s].draft_len) continue;
        reaching += precedence(slots[s], c / most, j) >= tried ? 1 : 0;
      }
      if (reaching != 0) atomicAdd(&above, reaching);
      __syncthreads();
      const bool found = above == places;
      if (above >= places) least = tried;
      __syncthreads();
      if (found) break;
    }
    for (int b = tid; b < batch; b += step) {
      const int s = row_slot[b];
      for (int j = s < 0 ? 0 : slots[s].draft_len; j > 0; --j) {
        if (precedence(slots[s], b, j) >= least) break;
        ++slots[s].cut;
      }
    }
    __syncthreads();
    for (int b = tid; b < batch; b += step) {
      const int s = row_slot[b];
      if (s < 0 || slots[s].cut == 0) continue;
      slots[s].draft_len -= slots[s].cut;
      int* drafted = record_of(exchange, layout, s, layout.drafted);
      reinterpret_cast<Drafted*>(drafted)->count = slots[s].draft_len;
      __threadfence_system();
    }
    __syncthreads();
  }
  for (int b = tid; b < batch; b += step) {
    int r = b;
    for (int a = 0; a < b; ++a) r += row_slot[a] < 0 ? 0 : slots[row_slot[a]].draft_len;
    first[b] = r;
    const int own = row_slot[b] < 0 ? 0 : slots[row_slot[b]].draft_len;
    const int end = b == batch - 1 ? rows : r + 1 + own;
    for (int j = 0; r + j < end; ++j) map[r + j] = map_entry(b, j);
  }
  __syncthreads();
  for (int r = tid; r < rows; r += step) {
    const int s = row_slot[batch_row(map[r])];
    const int j = draft_row(map[r]);
    const bool used = s >= 0 && j <= slots[s].draft_len;
    token[r] = !used ? 0 : j == 0 ? slots[s].last : slots[s].drafts[j - 1];
    slot[r] = used ? s : -1;
    pos[r] = used ? slots[s].n + depth_of(slots[s], j) : -1;
    if (tree != nullptr) tree[r] = used ? path_of(slots[s], j) : 0;
  }
  if (tid == 0) stamp(timeline, timeline_stride, timeline_entries, now, 0);
}

// Lays out the tokens that verification committed: row i of a batch row is its token i, at position
// old_n + shift + i. `last[b]` is the row of the last of them.
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

extern "C" __global__ void stamp_time(const int* replay, long long* timeline, int stride,
                                      int entries, int part) {
  stamp(timeline, stride, entries, *replay, part);
}
