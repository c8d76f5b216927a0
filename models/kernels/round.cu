// The bookkeeping kernels of a round: which token, slot and position each row of the target
// forward, of the drafter's extend and of its single steps stands for. All state is read from
// slot-indexed arrays; a row that has no work carries slot -1 and position -1.
#include "graft.cuh"

// Opens replay `*replay + 1`: takes the row map from the input ring and lays out the target's rows.
// Row b * width + j feeds `last` (j = 0) or draft j at position n + j. One block.
//
// An entry without this replay's stamp was never published for it: every row is then padding, so a
// replay nobody announced changes nothing.
extern "C" __global__ void round_begin(int* replay, const int* ring_rows, int ring_rows_stride,
                                       const int* ring_stamp, int ring_stamp_stride,
                                       int ring_entries, const int* n, const int* last,
                                       const int* drafts, int drafts_stride, const int* draft_len,
                                       const int* active, const int* limit, int slots, int batch,
                                       int width, int* row_slot, int* token, int* slot, int* pos) {
  const int now = *replay + 1;
  const int entry = static_cast<int>(static_cast<unsigned int>(now) % ring_entries);
  const bool published = ring_stamp[entry * ring_stamp_stride] == now;
  __syncthreads();  // every thread has read the old number before it changes
  if (threadIdx.x == 0) *replay = now;
  for (int r = threadIdx.x; r < batch * width; r += blockDim.x) {
    const int b = r / width;
    const int j = r % width;
    int s = published ? ring_rows[entry * ring_rows_stride + b] : -1;
    if (s < 0 || s >= slots || active[s] == 0) s = -1;
    if (j == 0) row_slot[b] = s;
    const bool used = s >= 0 && j <= draft_len[s] && n[s] + j < limit[s];
    token[r] = !used ? 0 : j == 0 ? last[s] : drafts[s * drafts_stride + j - 1];
    slot[r] = used ? s : -1;
    pos[r] = used ? n[s] + j : -1;
  }
}

// Lays out the drafter's extend: row b * width + i pairs the target's feature at old_n + i with the
// committed token i, for i < count[b]. `gather[b]` is the row whose output predicts the first
// draft.
extern "C" __global__ void extend_rows(const int* row_slot, const int* active, const int* count,
                                       const int* committed, const int* old_n, int batch, int width,
                                       int* token, int* slot, int* pos, int* gather) {
  for (int r = threadIdx.x; r < batch * width; r += blockDim.x) {
    const int b = r / width;
    const int i = r % width;
    const int s = row_slot[b];
    const bool used = s >= 0 && i < count[b] && active[s] != 0;
    token[r] = used ? committed[r] : 0;
    slot[r] = used ? s : -1;
    pos[r] = used ? old_n[b] + i : -1;
    if (i == 0) gather[b] = b * width + (count[b] > 0 ? count[b] - 1 : 0);
  }
}

// Lays out drafter step `step` (2..K): feeds draft step-1 at drafter position n + step - 2, for
// slots that are still drafting in this round.
extern "C" __global__ void step_rows(const int* row_slot, const int* active, const int* count,
                                     const int* n, const int* drafts, int drafts_stride,
                                     const int* draft_len, const int* limit, int batch, int step,
                                     int* token, int* slot, int* pos) {
  for (int b = threadIdx.x; b < batch; b += blockDim.x) {
    const int s = row_slot[b];
    const bool used = s >= 0 && count[b] > 0 && active[s] != 0 && draft_len[s] >= step - 1 &&
                      n[s] + step - 2 < limit[s];
    token[b] = used ? drafts[s * drafts_stride + step - 2] : 0;
    slot[b] = used ? s : -1;
    pos[b] = used ? n[s] + step - 2 : -1;
  }
}

// Writes the device's clock into column `part` of the timeline entry of the current replay.
extern "C" __global__ void stamp_time(const int* replay, long long* timeline, int stride,
                                      int entries, int part) {
  const int entry = static_cast<int>(static_cast<unsigned int>(*replay) % entries);
  timeline[entry * stride + part] = static_cast<long long>(global_timer_ns());
}
