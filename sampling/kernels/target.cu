// Target rows: mask, filters, distribution, and the token of rows whose drafts are not tested.
//
// One block per row r = b * width + j. Row j of batch row b holds the logits after row j of slot
// row_slot[b], which stands at position n + depth, and decides the next one under mask row j. Rows
// that nobody will test (padding, inactive, beyond the drafts) and rows without a valid stamp are
// left: row_ok = 0.
#include "row.cuh"
#include "slot.cuh"

extern "C" __global__ void sample_target(const float* logits, int vocab_size, int token_limit,
                                         const int* row_slot, int width, const Slot* slots,
                                         const int* exchange, const ExchangeLayout layout,
                                         float* probs, int* target_tok, int* row_ok) {
  __shared__ Scratch scratch;
  const int r = static_cast<int>(blockIdx.x);
  const int j = r % width;
  const int index = row_slot[r / width];
  const bool leader = threadIdx.x == 0;

  int state = ROW_NOT_READY;
  int position = 0;
  if (index >= 0 && slots[index].active && j <= slots[index].draft_len) {
    position = slots[index].n + depth_of(slots[index], j);
    state = stamped_state(stamp_of(exchange, layout, index, j), slots[index].epoch, position);
  }
  if (state != ROW_FREE && state != ROW_READY) {
    if (leader) {
      target_tok[r] = -1;
      row_ok[r] = state == ROW_DEAD_END ? ROW_NO_TOKEN : state == ROW_ERROR ? ROW_BAD_LOGIT : 0;
    }
    return;
  }
  const Slot& slot = slots[index];

  Row row = {logits + static_cast<long long>(r) * vocab_size, vocab_size, nullptr, token_limit,
             nullptr};
  if (state == ROW_READY) {
    row.mask = stage_mask(mask_of(exchange, layout, index, j), layout.words, scratch);
  }

  int status;
  int token = -1;
  if (slot.temperature < GREEDY_TEMPERATURE) {
    float best_logit;
    status = row_best<false, false>(row, nullptr, scratch, &token, &best_logit);
  } else {
    float* work = probs + static_cast<long long>(r) * vocab_size;
    const Filter filter = {slot.temperature, slot.top_k, slot.top_p, slot.min_p};
    status = row_distribution<false>(row, filter, work, scratch);
    const int most = slot.draft_len < width - 1 ? slot.draft_len : width - 1;
    if (status == ROW_OK && (j == most || !is_testing(slot, most))) {
      const Noise noise = {slot.seed, position + 1,
                           PURPOSE_NOISE | static_cast<u32>(slot.sample) << 8};
      token = draw_column(vocab_size, nullptr, noise, scratch, [work](int i) { return work[i]; });
    }
  }
  if (leader) {
    target_tok[r] = token;
    row_ok[r] = status;
  }
}
