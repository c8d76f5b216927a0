// Adjustments of a request's logits: bias, allowed and banned ids, and penalties. They apply to the
// rows of the target and of the drafter, so that drafts are ids that the target may generate.
//
// The table of a slot is int [2][vocab_size]. Row 0 has the bits of each id's float bias, which is
// -inf for a banned id. Row 1 has twice the number of times that the id was generated, plus 1 if
// the id occurs in the prompt.
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

// Returns the adjusted logit of an id with logit `x`. The id occurs `drafted` times among the
// drafts on the path to the row. SamplingParams in sampling/params.py documents the formula.
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

// Adjusts, in place, a slice of the logits that follow a node of the slot's draft tree. The bits of
// `path` are the drafts on the path to the node, which count as generated tokens. `drafted` is
// shared memory for MAX_DRAFTS values. All threads take part, and a barrier follows the last write.
__device__ inline void adjust_slice(float* x, const Slice& own, const Columns& columns,
                                    const Slot& slot, u64 path, const int* table, int vocab_size,
                                    float* drafted) {
  const int tid = static_cast<int>(threadIdx.x);
  const auto own_column = [&](int t) {
    if (!(path >> t & 1)) return -1;
    const int column = column_of(columns.t2d, columns.size, slot.drafts[t]);
    return column >= own.begin && column < own.end ? column : -1;
  };
  // Compute the logits of the ids of drafts on `path` separately, because these drafts increase the
  // token counts.
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
// parameters are the same as for adjust_slice. At positions below `earliest_stop`, stop ids are
// illegal. The target allows them there if no other id is legal; in this case, no draft is made.
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
