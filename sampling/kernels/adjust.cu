// Adjusts the target's logits (logit bias, penalties), stores them for log probabilities, and
// publishes the results of a round.
//
// Row r of the logits (forward row: the output for one input token of the target) belongs to batch
// row b (one request of the batch) and to draft j of this request, or to its last committed token
// if j is 0, see map_entry. adjust_logits also copies the state of the mask row (token bitmask) of
// each forward row from host memory to `row_state`, which later kernels read. It does nothing else
// for requests whose logits need no adjustment.
#include "adjust.cuh"
#include "best.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    adjust_logits(float* logits, int vocab_size, int token_limit, const int* row_slot,
                  const int* map, const Slot* slots, const int* masks, const ExchangeLayout layout,
                  const int* exchange, int* row_state, CrossBlockScratch* cross_block,
                  const int* tables, float* raw) {
  __shared__ Scratch scratch;
  __shared__ float drafted[MAX_DRAFTS];
  const int r = static_cast<int>(blockIdx.x);
  const int j = draft_row(map[r]);
  const int index = row_slot[batch_row(map[r])];
  const int tid = static_cast<int>(threadIdx.x);
  const bool used = index >= 0 && slots[index].active && j <= slots[index].draft_len;
  const bool adjusts = used && slots[index].adjust != 0;
  // The stamp of a mask row (its state, see RowStamp) is in host memory, from which a load takes
  // about a microsecond on a GPU. If a row has no adjustments, only its first block reads the
  // stamp, in order to write `row_state`.
  if (blockIdx.y > 0 && !adjusts) return;
  const int position = used ? slots[index].n + depth_of(slots[index], j) : 0;
  if (tid == 0) {
    scratch.token = ROW_NOT_READY;
    if (used) {
      const RowStamp stamp = read_stamp(exchange, layout, index, j);
      scratch.token = stamped_state(stamp, slots[index].epoch, position);
    }
    if (blockIdx.y == 0) row_state[r] = scratch.token;
  }
  if (!adjusts) return;
  const Slot& slot = slots[index];
  block_sync();
  const int state = scratch.token;
  const u64 path = path_of(slot, j);
  const Slice own = own_slice(vocab_size);
  const long long first = static_cast<long long>(r) * vocab_size;
  float* x = logits + first;
  if ((slot.adjust & (ADJUST_LOGPROBS | ADJUST_MASKED)) == ADJUST_LOGPROBS) {
    for (int i = own.begin + tid; i < own.end; i += BLOCK) raw[first + i] = x[i];
  }
  if (slot.adjust & (ADJUST_BIAS | ADJUST_COUNTS)) {
    const int* table = table_of(tables, vocab_size, index);
    adjust_slice(x, own, {vocab_size, nullptr, nullptr}, slot, path, table, vocab_size, drafted);
  }
  const u32* mask = state == ROW_READY ? mask_of(masks, layout, index, j) : nullptr;
  const Row row = {x, vocab_size, mask, token_limit, nullptr};
  const bool masked = slot.adjust & ADJUST_MASKED;
  for (int i = own.begin + tid; masked && i < own.end; i += BLOCK) {
    raw[first + i] = legal<false>(row, legal_word<false>(row, i & ~31), i) ? x[i] : MINUS_INFINITY;
  }
  if (position + 1 >= slot.earliest_stop) return;
  // Here the next token is at a position below `earliest_stop`. Stop ids are illegal there, unless
  // no other id is legal, for example because the text that the grammar describes is complete.
  u64 other = 0;
  for (int i = own.begin + tid; i < own.end && other == 0; i += BLOCK) {
    const u32 word = legal_word<false>(row, i & ~31);
    if (legal<false>(row, word, i) && x[i] > MINUS_INFINITY && !is_stop(slot, i)) other = 1;
  }
  other = block_reduce(other, scratch, Max());
  CrossBlockScratch& shared = cross_block[r];
  if (tid == 0) atomicMax(&shared.best, other);
  if (!is_last(shared, scratch)) return;
  for (int s = tid; s < slot.num_stop_ids && shared.best != 0; s += BLOCK) {
    if (slot.stop_ids[s] >= vocab_size) continue;
    x[slot.stop_ids[s]] = MINUS_INFINITY;
    if (masked) raw[first + slot.stop_ids[s]] = MINUS_INFINITY;
  }
  block_sync();
  if (tid == 0) shared.best = 0;
}

// Records token i (from 0) that verification has committed for a batch row: adds 1 to the count of
// the token, which penalties use, and writes its log probability and rank and the most likely ids
// to `logprobs_out`, the replay's entry of the output ring. `r` is i plus the index of the batch
// row's first forward row.
__device__ __forceinline__ void record_token(int r, const float* raw, int vocab_size,
                                             const int* row_slot, const int* map, const Slot* slots,
                                             const RoundRow* rows, int row_words, int* tables,
                                             int* logprobs_out, const OutputLayout& out,
                                             Scratch& scratch) {
  const int b = batch_row(map[r]);
  const int i = draft_row(map[r]);
  const int index = row_slot[b];
  if (index < 0 || (slots[index].adjust & (ADJUST_COUNTS | ADJUST_LOGPROBS)) == 0) return;
  const Slot& slot = slots[index];
  const RoundRow* row = round_row(rows, row_words, b);
  if (i >= row->count) return;
  const bool leader = threadIdx.x == 0;
  const int* tokens = reinterpret_cast<const int*>(row + 1);
  const int token = tokens[i];
  if (leader && (slot.adjust & ADJUST_COUNTS)) {
    atomicAdd(tables + (static_cast<long long>(index) * 2 + 1) * vocab_size + token, 2);
  }
  if ((slot.adjust & ADJUST_LOGPROBS) == 0) return;

  const long long decided_by = r - i + tokens[row_width(row_words) + i];
  const Row stored = {raw + decided_by * vocab_size, vocab_size, nullptr, 0, nullptr};
  Logprobs* logprobs = reinterpret_cast<Logprobs*>(logprobs_out + b * out.row) + i;
  BestFirst order(stored.logits, vocab_size, KEY_NEGATIVE_INFINITY);
  float best = 0.0f;
  float log_sum = 0.0f;
  for (int k = 0; k == 0 || k < slot.logprobs; ++k) {
    const int id = order.next(scratch);
    if (k == 0) {
      best = stored.logits[id];
      const u64 own = rank_key(stored.logits[token], token);
      u64 sum = 0;
      u64 rank = 0;
      for (int c = static_cast<int>(threadIdx.x); c < vocab_size; c += BLOCK) {
        sum += fixed_point(exp_nonpositive(fadd(stored.logits[c], -best)));
        rank += rank_key(stored.logits[c], c) >= own;
      }
      sum = block_reduce(sum, scratch, Sum());
      rank = block_reduce(rank, scratch, Sum());
      log_sum = log_positive(from_fixed_point(sum));
      if (leader) {
        logprobs->logprob = fadd(fadd(stored.logits[token], -best), -log_sum);
        logprobs->rank = static_cast<int>(rank);
      }
    }
    if (leader && k < slot.logprobs) {
      logprobs->ids[k] = id;
      logprobs->logprobs[k] = fadd(fadd(stored.logits[id], -best), -log_sum);
    }
  }
  if (leader) __threadfence_system();
}

// Publishes the results of a round to the host, after verification. One block per forward row
// (input row of the target): the block of the i-th forward row of a batch row records the i-th
// committed token of the batch row. The last block to finish copies the results of all batch rows
// to the output ring, into the entry of this replay, and sets the unused rows of the entry to -1.
// Then it stores the replay number as the stamp of the entry, for which the host waits.
extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    publish_round(const float* raw, int vocab_size, const int* row_slot, const int* map,
                  const Slot* slots, const RoundRow* rows, int row_words, int* tables, int batch,
                  const int* replay_number, int* logprobs, const OutputLayout logprobs_layout,
                  int* ring, const OutputLayout out, CrossBlockScratch* cross_block, int* stamp,
                  int stamp_stride) {
  __shared__ Scratch scratch;
  const int replay = *replay_number;
  const int entry = static_cast<int>(static_cast<unsigned int>(replay) % out.entries);
  logprobs += static_cast<long long>(entry) * logprobs_layout.stride;
  record_token(static_cast<int>(blockIdx.x), raw, vocab_size, row_slot, map, slots, rows, row_words,
               tables, logprobs, logprobs_layout, scratch);
  if (!is_last(*cross_block, scratch, gridDim.x)) return;
  const int* results = reinterpret_cast<const int*>(rows);
  int* out_rows = ring + static_cast<long long>(entry) * out.stride;
  for (int i = threadIdx.x; i < out.rows * out.row; i += BLOCK) {
    out_rows[i] = i < batch * out.row ? results[i] : -1;
  }
  __threadfence_system();
  block_sync();
  if (threadIdx.x == 0) store_release_system(stamp + entry * stamp_stride, replay);
}
