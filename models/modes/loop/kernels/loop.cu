// Kernels of a generation loop: a WHILE node of a graph whose body is one round.
//
// The host shares these words with a running loop. They are in pinned memory:
//
//   end_loop   the host stores the number of the first replay of the loop that it wants to end
//   released   number of the last replay whose entry of the output ring the host has released
//   last       one word per entry of the output ring: 1 if the replay is the last one of its loop
//
// A loop whose results the host does not read ends when the output ring is full. It therefore ends
// within a bounded time even if the host does nothing.
#include "conditional.cuh"
#include "sampling/kernels/slot.cuh"

// Replay numbers of the running loop, in device memory. The rounds of a loop read them as an input
// ring with one entry. The stamp of this entry is `next`.
struct Loop {
  int first;  // first replay of the loop
  int next;   // replay that the body runs next, if the host has published its entry; else another
};

// Begins a loop at replay `*replay + 1`: copies the slots of the batch rows from the input ring,
// whose next entry the host has published. The mask rows of unguided requests are marked as free,
// because a loop may run without the host step that marks them. If the entry was not published, all
// rows of the loop's first replay are padding. One block.
extern "C" __global__ void loop_begin(const int* replay, const int* ring_rows, int ring_rows_stride,
                                      const int* ring_stamp, int ring_stamp_stride,
                                      int ring_entries, int batch, const int* unguided,
                                      const Slot* slots, int slot_count, int* exchange,
                                      const ExchangeLayout layout, Loop* loop, int* row_slot) {
  const int first = replay_after(*replay);
  const int entry = static_cast<int>(static_cast<unsigned int>(first) % ring_entries);
  const bool published = load_acquire_system(ring_stamp + entry * ring_stamp_stride) == first;
  if (threadIdx.x == 0) *loop = {first, published ? first : *replay};
  for (int b = static_cast<int>(threadIdx.x); b < batch; b += static_cast<int>(blockDim.x)) {
    const int s = published ? ring_rows[entry * ring_rows_stride + b] : -1;
    row_slot[b] = s;
    if (s < 0 || s >= slot_count || unguided[b] == 0) continue;
    RowStamp* stamps = reinterpret_cast<RowStamp*>(record_of(exchange, layout, s, layout.stamps));
    for (int j = 0; j < layout.rows; ++j) stamps[j] = {ROW_FREE, slots[s].epoch, 0, 1};
  }
}

// Decides after verification whether the loop runs another replay. It does if
//
// - a request is active, and each active request has pages for `ahead` positions after its last
//   token or, if this is less, up to its limit, and for `slack` positions more. `reserved` is the
//   number of positions with pages, by batch row;
// - the output ring will have a free entry;
// - the loop has run fewer than `max_rounds` replays;
// - the host does not want the loop to end.
//
// The decision is stored in `last` before the results of the replay are published. One block.
extern "C" __global__ void loop_decide(const int* replay, const int* row_slot, int batch,
                                       const Slot* slots, int slot_count, const int* reserved,
                                       int ahead, int slack, int max_rounds, const int* end_loop,
                                       const int* released, int* last, int last_stride,
                                       int ring_entries, Loop* loop, unsigned long long condition) {
  __shared__ int active, unable;
  if (threadIdx.x == 0) active = unable = 0;
  __syncthreads();
  for (int b = static_cast<int>(threadIdx.x); b < batch; b += static_cast<int>(blockDim.x)) {
    const int s = row_slot[b];
    if (s < 0 || s >= slot_count || !slots[s].active) continue;
    const int end = slots[s].n + 1 + ahead;
    const int limit = slots[s].limit;
    atomicOr(&active, 1);
    if ((end < limit ? end : limit) + slack > reserved[b]) atomicOr(&unable, 1);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  const int now = *replay;
  const int first = loop->first;
  const int next = replay_after(now);
  const bool has_entry = replays_since(next, load_acquire_system(released)) < ring_entries;
  const bool wanted =
      load_acquire_system(end_loop) != first && replays_since(next, first) < max_rounds;
  const bool goes_on = active != 0 && unable == 0 && has_entry && wanted;
  loop->next = goes_on ? next : now;
  last[static_cast<unsigned int>(now) % ring_entries * last_stride] = goes_on ? 0 : 1;
  __threadfence_system();
  cudaGraphSetConditional(condition, goes_on ? 1u : 0u);
}
