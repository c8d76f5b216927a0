// Tokens that are sampled without masks, checked by the grammar, and sampled again under the mask
// if they are illegal. This is exact: a token that wins without the mask and is legal also wins
// under the mask.
#include "target.cuh"

// The scores of a race have rounding errors that depend on the mask: the weights of tokens are
// relative to the best legal token and to the sum of the legal weights. A token with a score close
// to the winner's could therefore win under the mask. Scores whose ratio is below this number are
// close. The relative error of a score is below 4e-6, because the weight of a token that wins is at
// least exp(-26) of the best weight, and its exponent has a relative error of 2^-23.
#define CLOSE_SCORES 1.00003f

// Writes the Sampled record of each row whose token was sampled without a mask or may lead to such
// a row. A row without a usable token, or whose race was close, gets the id -1 and is sampled
// again.
extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    publish_sampled(int vocab_size, const int* row_slot, const int* map, const Slot* slots,
                    const int* row_state, CrossBlockScratch* cross_block, const float* probs,
                    const int* target_tok, int* exchange, const ExchangeLayout layout,
                    const int* replay_number) {
  __shared__ Scratch scratch;
  const int r = static_cast<int>(blockIdx.x);
  const int state = row_state[r];
  if (state != ROW_UNCHECKED && state != ROW_READY) return;
  const int j = draft_row(map[r]);
  const int index = row_slot[batch_row(map[r])];
  const Slot& slot = slots[index];
  const bool leader = threadIdx.x == 0;
  int token = target_tok[r];  // -1 if the row has no usable token
  if (state == ROW_UNCHECKED && token >= 0 && slot.temperature >= GREEDY_TEMPERATURE) {
    const Noise noise = target_noise(slot, j);
    const float* p = probs + static_cast<long long>(r) * vocab_size;
    const u64 race = draw_packed(own_slice(vocab_size), nullptr, noise, scratch,
                                 [=](int i) { return i == token ? 0.0f : p[i]; });
    if (leader) atomicMax(&cross_block[r].race, race);
    if (!is_last(cross_block[r], scratch)) return;
    block_sync();
    const float second = __uint_as_float(static_cast<u32>(cross_block[r].race >> 32));
    const float first = fdiv(p[token], exponential(noise_word(noise, static_cast<u32>(token))));
    block_sync();
    if (leader) cross_block[r].race = 0;
    if (!(fmul(second, CLOSE_SCORES) < first)) token = -1;
  } else if (blockIdx.y > 0) {
    return;
  }
  if (!leader) return;
  Sampled* sampled = reinterpret_cast<Sampled*>(record_of(exchange, layout, index, layout.sampled));
  sampled[j] = {*replay_number, token};
  __threadfence_system();
}

// Samples the tokens again whose rows the check step has filled. Rows that it has accepted keep
// their token. Rows that it has not reached get none. One block per row. The mask is read from host
// memory, because few rows are filled.
extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    resample_target(const float* logits, int vocab_size, int token_limit, const int* row_slot,
                    const int* map, const Slot* slots, const int* masks,
                    const ExchangeLayout layout, const int* row_state,
                    CrossBlockScratch* cross_block, float* probs, int* target_tok, int* row_ok,
                    const int* exchange, const int* replay_number) {
  __shared__ Scratch scratch;
  __shared__ int state;
  const int r = static_cast<int>(blockIdx.x);
  if (row_state[r] != ROW_UNCHECKED) return;
  if (threadIdx.x == 0) {  // one thread reads host memory
    const int j = draft_row(map[r]);
    const int index = row_slot[batch_row(map[r])];
    const Slot& slot = slots[index];
    const RowStamp* stamp = stamp_of(exchange, layout, index, j);
    state = stamped_state(stamp, slot.epoch, slot.n + depth_of(slot, j));
    const bool outdated = state == ROW_CHECKED && stamp->detail != *replay_number;
    if (state == ROW_UNCHECKED || outdated) state = ROW_NOT_READY;
  }
  block_sync();
  if (state == ROW_CHECKED) return;
  const Target target = {logits, vocab_size, token_limit, row_slot, map,        slots,
                         masks,  layout,     cross_block, probs,    target_tok, row_ok};
  sample_row(target, r, state, STEP_BEST, STEP_DRAW, scratch);
}
