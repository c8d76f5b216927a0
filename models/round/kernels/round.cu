// Begins a round: assigns token, slot and position to each row of the target forward pass. An
// unused row has slot -1 and position -1.
#include "sampling/kernels/slot.cuh"
#include "timing.cuh"

constexpr int PRIORITY_BITS = 62;
constexpr int HELD = 4;  // priorities that a thread keeps in registers

// Returns the priority of draft j of batch row b. Drafts with greater priority get forward rows
// first. The upper 32 bits are the acceptance probability in past rounds; it is at most 1.0, so
// bits 62 and 63 are 0. The lower bits prefer smaller j and then smaller b, so no two priorities
// are equal.
__device__ __forceinline__ unsigned long long priority(const Slot& slot, int b, int j) {
  const float accept_prob = slot.accept_prob[j - 1];
  // The bits of non-negative floats, read as integers, are ordered like the floats.
  const unsigned long long bits = __float_as_uint(accept_prob);
  return bits << 32 | static_cast<unsigned int>(0xffff - j) << 16 |
         static_cast<unsigned int>(0xffff - b);
}

// Begins replay `*replay + 1`: reads the slot of each batch row from the input ring, and assigns
// forward rows to their last tokens and drafts. One block.
//
// Every batch row has a forward row for its last token, at position n. The other forward rows are
// for drafts, at position n + depth. If there are more drafts than rows, the drafts with the
// greatest acceptance probabilities get rows (see priority()). These are always the first drafts of
// a slot, because no draft of a slot has a greater acceptance probability than the drafts before
// it. The other drafts are dropped: the slot's draft_len is reduced, and so is the number of drafts
// that the grammar worker reads (Drafted::count).
//
// Whether a draft gets a row depends on acceptance in earlier rounds and on other slots, but not on
// the draft's token. The choice therefore does not change the distribution of the output.
//
// If the host has not published an entry of the input ring for this replay, every row is padding,
// and the replay changes nothing. At its end, the kernel writes the first time stamp of the
// timeline.
extern "C" __global__ void round_begin(int* replay, const int* ring_rows, int ring_rows_stride,
                                       const int* ring_stamp, int ring_stamp_stride,
                                       int ring_entries, Slot* slots, int slot_count, int batch,
                                       int rows, int* exchange, const ExchangeLayout layout,
                                       int* row_slot, int* first, int* map, int* token, int* slot,
                                       int* pos, unsigned long long* ancestors, long long* timeline,
                                       int timeline_stride, int timeline_entries) {
  __shared__ int drafts, published;
  __shared__ int num_above[PRIORITY_BITS];
  const int tid = static_cast<int>(threadIdx.x);
  const int step = static_cast<int>(blockDim.x);
  const int now = replay_after(*replay);
  const int entry = static_cast<int>(static_cast<unsigned int>(now) % ring_entries);
  const int draft_rows = rows - batch;
  const int max_drafts = layout.rows - 1;
  for (int bit = tid; bit < PRIORITY_BITS; bit += step) num_above[bit] = 0;
  if (tid == 0) {
    drafts = 0;
    published = load_acquire_system(ring_stamp + entry * ring_stamp_stride) == now;
  }
  __syncthreads();  // all threads must read the old replay number before it is overwritten
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
  if (drafts > draft_rows) {
    // Returns the priority of a draft by its index; 0 if there is no such draft.
    const auto priority_of = [&](int c) -> unsigned long long {
      const int b = c / max_drafts;
      const int j = c % max_drafts + 1;
      const int s = b < batch ? row_slot[b] : -1;
      return s < 0 || j > slots[s].draft_len ? 0 : priority(slots[s], b, j);
    };
    // The search below compares every priority once per bit. Each thread therefore keeps its first
    // HELD priorities in registers.
    unsigned long long held[HELD];
#pragma unroll
    for (int k = 0; k < HELD; ++k) held[k] = priority_of(tid + k * step);
    unsigned long long threshold = 0;  // lowest priority that gets a row, found bitwise
    for (int bit = PRIORITY_BITS - 1; bit >= 0; --bit) {
      const unsigned long long tried = threshold | 1ull << bit;
      int own_above = 0;
#pragma unroll
      for (int k = 0; k < HELD; ++k) own_above += held[k] >= tried;
      for (int c = tid + HELD * step; c < batch * max_drafts; c += step) {
        own_above += priority_of(c) >= tried;
      }
      if (own_above != 0) atomicAdd(&num_above[bit], own_above);
      __syncthreads();
      if (num_above[bit] >= draft_rows) threshold = tried;
      if (num_above[bit] == draft_rows) break;
    }
    for (int b = tid; b < batch; b += step) {
      const int s = row_slot[b];
      for (int j = s < 0 ? 0 : slots[s].draft_len; j > 0; --j) {
        if (priority(slots[s], b, j) >= threshold) break;
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
    token[r] = 0;
    if (used) token[r] = j == 0 ? slots[s].last : slots[s].drafts[j - 1];
    slot[r] = used ? s : -1;
    pos[r] = used ? slots[s].n + depth_of(slots[s], j) : -1;
    if (ancestors != nullptr) ancestors[r] = used ? path_of(slots[s], j) : 0;
  }
  if (tid == 0) stamp(timeline, timeline_stride, timeline_entries, now, 0);
}
