// Adjustments of a request's logits: bias, allowed and banned ids, and penalties. They apply to the
// logits of the target and of the drafter, so that only ids that the target may generate are
// drafted.
//
// The `table` of a request slot is int [2][vocab_size]. table[0][id] contains the bits of the float
// bias of an id, which is -inf for a banned id. table[1][id] is twice the number of times that the
// request has generated the id, plus 1 if the id occurs in the prompt.
#pragma once

#include "row.cuh"
#include "slot.cuh"

#define MINUS_INFINITY __uint_as_float(0xff800000u)

// Columns of a row of logits. The maps are null if column i belongs to token id i.
struct Columns {
  int size;
  const int* d2t;  // target id of each column
  const int* t2d;  // column of each target id; -1: none
};

// Returns the adjusted logit of an id with logit `x`. `drafted` is how often the id occurs among
// the drafts that precede the position of the logit; they count as generated tokens. SamplingParams
// in sampling/params.py documents the formula.
__device__ __forceinline__ float adjusted(const Slot& slot, const int* table, int vocab_size,
                                          int id, float x, int drafted) {
  if (slot.adjust & ADJUST_BIAS) {
    const float bias = __uint_as_float(static_cast<u32>(table[id]));
    // A banned id gets -inf, even if x is NaN or +inf.
    x = bias == MINUS_INFINITY ? bias : fadd(x, bias);
  }
  if (slot.adjust & ADJUST_COUNTS) {
    const int known = table[vocab_size + id] + 2 * drafted;
    const int count = known >> 1;
    if (known > 0) x = x > 0.0f ? fdiv(x, slot.repetition) : fmul(x, slot.repetition);
    x = fadd(x, -fmul(slot.frequency, static_cast<float>(count)));
    if (count > 0) x = fadd(x, -slot.presence);
  }
  return x;
}

// Adjusts, in place, the columns `own` of a row of logits `x`, the row for the token after one node
// of the slot's draft tree. Bit t of `path` is set if slot.drafts[t] is on the path from the root
// to this node; these drafts count as generated tokens. `drafted` is shared memory for MAX_DRAFTS
// values. All threads take part, and a barrier follows the last write.
__device__ inline void adjust_slice(float* x, const Slice& own, const Columns& columns,
                                    const Slot& slot, u64 path, const int* table, int vocab_size,
                                    float* drafted) {
  const int tid = static_cast<int>(threadIdx.x);
  const auto own_column = [&](int t) {
    if (!(path >> t & 1)) return -1;
    const int column = column_of(columns.t2d, columns.size, slot.drafts[t]);
    return column >= own.begin && column < own.end ? column : -1;
  };
  // An id that is drafted on `path` has a higher token count than `table` contains. Its logit is
  // therefore computed here, and stored after the loop that adjusts all other ids.
  for (int t = tid; t < MAX_DRAFTS; t += BLOCK) {
    const int column = own_column(t);
    if (column < 0) continue;
    const int d = slot.drafts[t];
    int times = 0;
    for (int s = 0; s < MAX_DRAFTS; ++s) times += (path >> s & 1) && slot.drafts[s] == d;
    drafted[t] = adjusted(slot, table, vocab_size, d, x[column], times);
  }
  block_sync();
  for (int i = own.begin + tid; i < own.end; i += BLOCK) {
    const int id = columns.d2t == nullptr ? i : columns.d2t[i];
    if (id >= 0 && id < vocab_size) x[i] = adjusted(slot, table, vocab_size, id, x[i], 0);
  }
  block_sync();
  for (int t = 0; t < MAX_DRAFTS && tid == 0; ++t) {
    const int column = own_column(t);
    if (column >= 0) x[column] = drafted[t];
  }
  block_sync();
}

// Adjusts a slice of the drafter's logits for the token at `position`, in place. The other
// parameters are the same as for adjust_slice. At positions below `slot.earliest_stop`, the logits
// of stop ids become -inf. The target may generate a stop id there if no other id is legal; in this
// case the drafter makes no draft.
__device__ inline void adjust_draft(float* x, const Slice& own, const Columns& columns,
                                    const Slot& slot, u64 path, int position, const int* table,
                                    int vocab_size, float* drafted) {
  if (slot.adjust & (ADJUST_BIAS | ADJUST_COUNTS)) {
    adjust_slice(x, own, columns, slot, path, table, vocab_size, drafted);
  }
  if (position >= slot.earliest_stop) return;
  for (int s = static_cast<int>(threadIdx.x); s < slot.num_stop_ids; s += BLOCK) {
    if (slot.stop_ids[s] >= vocab_size) continue;
    const int column = column_of(columns.t2d, columns.size, slot.stop_ids[s]);
    if (column >= own.begin && column < own.end) x[column] = MINUS_INFINITY;
  }
  block_sync();
}

__device__ __forceinline__ const int* table_of(const int* tables, int vocab_size, int slot) {
  return tables + static_cast<long long>(slot) * 2 * vocab_size;
}
