// Target rows: mask, filters, distribution, and the token that greedy or coupled decoding wants.
//
// One block per row r = b * width + j. Row j of batch row b holds the logits after position n + j
// of slot row_slot[b] and decides position n + j + 1 under the slot's mask row j. Rows that nobody
// will test (padding, inactive, beyond the drafts) and rows without a valid stamp are left: row_ok
// = 0.
#include "draw.cuh"
#include "slot.cuh"

extern "C" __global__ void sample_target(const float* logits, int vocab_size, int token_limit,
                                         const int* row_slot, int width, const int* n,
                                         const int* draft_len, const int* active, const int* epoch,
                                         const unsigned long long* seed, const int* sample,
                                         const float* temperature, const int* top_k,
                                         const float* top_p, const float* min_p, const int* verify,
                                         const unsigned int* mask, int mask_stride, int mask_words,
                                         const int* row_state, int row_state_stride, float* probs,
                                         int* target_tok, int* row_ok) {
  __shared__ Scratch scratch;
  const int r = static_cast<int>(blockIdx.x);
  const int b = r / width;
  const int j = r % width;
  const int slot = row_slot[b];
  const bool leader = threadIdx.x == 0;

  int state = ROW_NOT_READY;
  if (slot >= 0 && active[slot] && j <= draft_len[slot]) {
    state = stamped_state(row_state + static_cast<long long>(slot) * row_state_stride + 4 * j,
                          epoch[slot], n[slot] + j);
  }
  if (state != ROW_FREE && state != ROW_READY) {
    if (leader) {
      target_tok[r] = -1;
      row_ok[r] = state == ROW_DEAD_END ? ROW_NO_TOKEN : state == ROW_ERROR ? ROW_BAD_LOGIT : 0;
    }
    return;
  }

  Row row;
  row.logits = logits + static_cast<long long>(r) * vocab_size;
  row.size = vocab_size;
  row.mask = nullptr;
  if (state == ROW_READY) {
    const unsigned int* bits =
        mask + static_cast<long long>(slot) * mask_stride + static_cast<long long>(j) * mask_words;
    row.mask = stage_mask(bits, mask_words, scratch);
  }
  row.token_limit = token_limit;
  row.map = nullptr;

  int status;
  int token = -1;
  if (temperature[slot] < GREEDY_TEMPERATURE) {
    float best_logit;
    status = row_best<false, false>(row, nullptr, scratch, &token, &best_logit);
  } else {
    float* work = probs + static_cast<long long>(r) * vocab_size;
    const Filter filter = {temperature[slot], top_k[slot], top_p[slot], min_p[slot]};
    status = row_distribution<false>(row, filter, work, scratch);
    if (status == ROW_OK && verify[slot] == VERIFY_COUPLED) {
      const Noise noise = {seed[slot], n[slot] + j + 1,
                           PURPOSE_NOISE | static_cast<u32>(sample[slot]) << 8};
      token = draw_column(vocab_size, nullptr, noise, scratch, [work](int i) { return work[i]; });
    }
  }
  if (leader) {
    target_tok[r] = token;
    row_ok[r] = status;
  }
}
