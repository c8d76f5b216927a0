// Kernels of a generation loop: a WHILE node of a graph whose body is one round.
//
// The host shares these words with a running loop. They are in pinned memory:
//
//   end_loop   number of the first replay of the loop that the host asks to end
//   released   number of the last replay whose entry of the output ring the host has released
//   last       one word per entry of the output ring: 1 if the replay is the last one of its loop
//
// A loop whose results the host does not read ends when the output ring is full. It therefore ends
// within a bounded time even if the host does nothing.
#include "conditional.cuh"
#include "sampling/kernels/slot.cuh"

// State of the running loop, in device memory. A round reads the slots of its batch rows from an
// entry of an input ring, if the stamp of the entry equals the number of the replay. The rounds of
// a loop have a ring with one entry, whose stamp is the field `next`.
struct Loop {
  int first;       // first replay of the loop
  int next;        // replay that the body runs next, if the host has published its entry
  int max_rounds;  // maximum number of replays
};

// Begins a loop at replay `*replay + 1`: copies the entry of the input ring for this replay to
// `loop`, `row_slot` and `reserved`. If the host has not published the entry, the loop runs only
// this replay, in which all rows are padding. One block.
extern "C" __global__ void loop_begin(const int* replay, const int* ring_rows, int ring_rows_stride,
                                      const int* ring_stamp, int ring_stamp_stride,
                                      int ring_entries, const int* ring_reserved,
                                      int ring_reserved_stride, const int* ring_max_rounds,
                                      int ring_max_rounds_stride, int batch, Loop* loop,
                                      int* row_slot, int* reserved) {
  const int first = replay_after(*replay);
  const int entry = static_cast<int>(static_cast<unsigned int>(first) % ring_entries);
  __shared__ int published;
  if (threadIdx.x == 0) {
    published = load_acquire_system(ring_stamp + entry * ring_stamp_stride) == first;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    const int max_rounds = published ? ring_max_rounds[entry * ring_max_rounds_stride] : 1;
    *loop = {first, published ? first : *replay, max_rounds};
  }
  for (int b = static_cast<int>(threadIdx.x); b < batch; b += static_cast<int>(blockDim.x)) {
    row_slot[b] = published ? ring_rows[entry * ring_rows_stride + b] : -1;
    reserved[b] = published ? ring_reserved[entry * ring_reserved_stride + b] : 0;
  }
}

// Decides after verification whether the loop runs another replay. It does if
//
// - a request is active;
// - the pages of each active request suffice for the next replay: they have room for min(n + 1 +
//   ahead, limit) + slack positions, where n and limit are fields of `Slot`;
// - the output ring will have a free entry;
// - the loop has run fewer than `max_rounds` replays;
// - the host has not asked the loop to end.
//
// `reserved` is, for each batch row, the number of positions that have pages. Before the results of
// the replay are published, its entry of `last` is set to 0 if the loop continues and to 1 if it
// ends. One block.
extern "C" __global__ void loop_decide(const int* replay, const int* row_slot, int batch,
                                       const Slot* slots, int slot_count, const int* reserved,
                                       int ahead, int slack, const int* end_loop,
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
      load_acquire_system(end_loop) != first && replays_since(next, first) < loop->max_rounds;
  const bool goes_on = active != 0 && unable == 0 && has_entry && wanted;
  loop->next = goes_on ? next : now;
  last[static_cast<unsigned int>(now) % ring_entries * last_stride] = goes_on ? 0 : 1;
  __threadfence_system();
  cudaGraphSetConditional(condition, goes_on ? 1u : 0u);
}
