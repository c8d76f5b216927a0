// Begins a round: assigns token, slot and position to each row of the target forward pass. A row
// without work has slot -1 and position -1.
#include "sampling/kernels/slot.cuh"
#include "timing.cuh"

// Draft j of batch row b as a number of 62 bits, the greater the sooner it is given a place: by
// what past rounds say of how likely it is accepted; of equals the one of fewer drafts before it.
__device__ __forceinline__ unsigned long long precedence(const Slot& slot, int b, int j) {
  const float reach = slot.reach[j - 1];
  const unsigned long long likely = __float_as_uint(reach);  // in order, as none is negative
  return likely << 32 | static_cast<unsigned int>(0xffff - j) << 16 |
         static_cast<unsigned int>(0xffff - b);
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
