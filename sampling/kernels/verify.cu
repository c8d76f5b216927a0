// Chain verification: walk the drafts, draw the correction or the bonus, commit to the slot.
//
// One block per batch row. Thread 0 walks; a draw from a distribution is made by the whole block.
// Acceptance (Leviathan, Kalman, Matias, "Fast inference from transformers via speculative
// decoding", 2023): draft d with probability q(d) is accepted iff u q(d) < p(d), else the token
// comes from max(p - q, 0). A sampled draft is always tested, an illegal one has p = 0 and is
// refused; the walk may end only AFTER an accepted token (row not ready, stop id, limit), then
// without a bonus.
#include "draw.cuh"
#include "slot.cuh"

#define DRAW_NONE 0
#define DRAW_TARGET 1    // p of the row
#define DRAW_RESIDUAL 2  // max(p - q, 0)
#define DRAW_WITHOUT 3   // p without the refused draft

struct Walk {
  int count;     // tokens committed so far
  int accepted;  // drafts among them
  int reason;
  int draw;  // DRAW_*: what remains to be drawn by the block
  int row;   // j of the row it is drawn from
};

extern "C" __global__ void verify_chain(
    const int* row_slot, int width, int draft_stride, int vocab_size, int draft_vocab,
    const int* t2d, const float* probs, const int* target_tok, const int* row_ok, int* n, int* last,
    const int* drafts, int* draft_len, int* active, const int* limit, const int* stop_ids,
    const int* stop_count, const unsigned long long* seed, const int* sample,
    const float* temperature, const int* verify, const float* q, const int* q_kind, int* faults,
    const int* replay_number, int* committed, int committed_stride, int* drafted,
    int drafted_stride, int entries, int* out_slot, int out_slot_stride, int* out_count,
    int out_count_stride, int* out_reason, int out_reason_stride, int* out_accepted,
    int out_accepted_stride, int* out_draft_len, int out_draft_len_stride, int* out_tokens,
    int out_tokens_stride, int out_width, int* count_of, int* accepted_of, int* old_n,
    int* committed_tok, int committed_tok_width) {
  __shared__ Scratch scratch;
  __shared__ Walk walk;
  const int b = static_cast<int>(blockIdx.x);
  const int slot = row_slot[b];
  const int replay = *replay_number;
  const int entry = static_cast<int>(static_cast<unsigned int>(replay) % entries);
  const bool leader = threadIdx.x == 0;

  if (slot < 0 || !active[slot]) {
    if (leader) {
      count_of[b] = 0;
      accepted_of[b] = 0;
      old_n[b] = slot < 0 ? 0 : n[slot];
      out_slot[static_cast<long long>(entry) * out_slot_stride + b] = slot;
      out_count[static_cast<long long>(entry) * out_count_stride + b] = 0;
      out_reason[static_cast<long long>(entry) * out_reason_stride + b] = REASON_NONE;
      out_accepted[static_cast<long long>(entry) * out_accepted_stride + b] = 0;
      out_draft_len[static_cast<long long>(entry) * out_draft_len_stride + b] = 0;
      if (slot >= 0) {
        int* record = committed + static_cast<long long>(slot) * committed_stride;
        record[0] = replay;
        record[1] = 0;
      }
      __threadfence_system();
    }
    return;
  }

  const int position = n[slot];  // of `last`
  const int tested = draft_len[slot] < width - 1 ? draft_len[slot] : width - 1;
  const int end = limit[slot];
  const int* stops = stop_ids + slot * MAX_STOP_IDS;
  const int stops_count = stop_count[slot];
  const bool sampled = temperature[slot] >= GREEDY_TEMPERATURE;
  const bool rejection = sampled && verify[slot] == VERIFY_REJECTION;
  const u32 sample_bits = static_cast<u32>(sample[slot]) << 8;
  int* tokens = committed_tok + b * committed_tok_width;

  if (leader) {
    walk = {0, 0, REASON_NONE, DRAW_NONE, 0};
    for (int j = 0; j <= tested; ++j) {
      if (position + j + 1 >= end) {
        walk.reason = REASON_LENGTH;
        break;
      }
      const int r = b * width + j;
      if (row_ok[r] != ROW_OK) {
        // Behind an accepted draft the round ends here; the next one opens with this very row.
        if (j == 0 && row_ok[r] == ROW_NO_TOKEN) walk.reason = REASON_DEAD_END;
        if (j == 0 && row_ok[r] == ROW_BAD_LOGIT) walk.reason = REASON_ERROR;
        break;
      }
      walk.row = j;
      if (j == tested) {
        if (rejection) {
          walk.draw = DRAW_TARGET;
        } else {
          tokens[walk.count++] = target_tok[r];
        }
        break;
      }
      const int d = drafts[slot * draft_stride + j];
      const bool known = d >= 0 && d < vocab_size;
      bool accept;
      if (rejection) {
        const float p = known ? probs[static_cast<long long>(r) * vocab_size + d] : 0.0f;
        const Noise noise = {seed[slot], position + j + 1, PURPOSE_COIN | sample_bits};
        const float u = uniform24(noise_words(noise, 0u).x[0]);
        if (q_kind[slot * draft_stride + j] == DRAFT_POINT) {
          walk.draw = DRAW_WITHOUT;
          accept = u < p;
        } else {
          const int column = !known ? -1 : t2d ? t2d[d] : d < draft_vocab ? d : -1;
          const float qd =
              column < 0
                  ? 0.0f
                  : q[static_cast<long long>(slot * draft_stride + j) * draft_vocab + column];
          walk.draw = DRAW_RESIDUAL;
          // A draft its own table calls impossible was not drawn from that table: refuse, count.
          if (!(qd > 0.0f)) atomicAdd(faults, 1);
          accept = qd > 0.0f && fmul(u, qd) < p;
        }
      } else {
        accept = d == target_tok[r];
        if (!accept) tokens[walk.count++] = target_tok[r];
      }
      if (!accept) break;
      walk.draw = DRAW_NONE;
      tokens[walk.count++] = d;
      walk.accepted += 1;
      if (is_stop(stops, stops_count, d)) {
        walk.reason = REASON_STOP;
        break;
      }
    }
  }
  block_sync();

  if (walk.draw != DRAW_NONE) {
    const int j = walk.row;
    const float* p = probs + static_cast<long long>(b * width + j) * vocab_size;
    Noise noise = {seed[slot], position + j + 1, PURPOSE_RESIDUAL | sample_bits};
    int token = -1;
    if (walk.draw == DRAW_RESIDUAL) {
      const float* table = q + static_cast<long long>(slot * draft_stride + j) * draft_vocab;
      token = draw_column(vocab_size, nullptr, noise, scratch, [=](int i) {
        if (!(p[i] > 0.0f)) return 0.0f;
        const int column = t2d ? t2d[i] : i < draft_vocab ? i : -1;
        return column < 0 ? p[i] : fadd(p[i], -table[column]);
      });
    } else if (walk.draw == DRAW_WITHOUT) {
      const int d = drafts[slot * draft_stride + j];
      token = draw_column(vocab_size, nullptr, noise, scratch,
                          [=](int i) { return i == d ? 0.0f : p[i]; });
    } else {
      noise.purpose = PURPOSE_TARGET | sample_bits;
    }
    // Nothing left of p once q is taken away: equal up to rounding, so p itself is right.
    if (token < 0) {
      token = draw_column(vocab_size, nullptr, noise, scratch, [p](int i) { return p[i]; });
    }
    if (leader) tokens[walk.count++] = token;
  }

  if (!leader) return;
  const int count = walk.count;
  int reason = walk.reason;
  if (count > 0 && reason == REASON_NONE) {
    if (is_stop(stops, stops_count, tokens[count - 1])) {
      reason = REASON_STOP;
    } else if (position + count + 1 >= end) {
      reason = REASON_LENGTH;
    }
  }
  if (count > 0) {
    n[slot] = position + count;
    last[slot] = tokens[count - 1];
    draft_len[slot] = 0;
    int* record = drafted + static_cast<long long>(slot) * drafted_stride;
    record[0] = replay;
    record[1] = 0;
  }
  if (reason != REASON_NONE) active[slot] = 0;

  count_of[b] = count;
  accepted_of[b] = walk.accepted;
  old_n[b] = position;
  int* record = committed + static_cast<long long>(slot) * committed_stride;
  record[0] = replay;
  record[1] = count;
  for (int i = 0; i < count; ++i) record[2 + i] = tokens[i];
  out_slot[static_cast<long long>(entry) * out_slot_stride + b] = slot;
  out_count[static_cast<long long>(entry) * out_count_stride + b] = count;
  out_reason[static_cast<long long>(entry) * out_reason_stride + b] = reason;
  out_accepted[static_cast<long long>(entry) * out_accepted_stride + b] = walk.accepted;
  out_draft_len[static_cast<long long>(entry) * out_draft_len_stride + b] = tested;
  int* out = out_tokens + static_cast<long long>(entry) * out_tokens_stride + b * out_width;
  for (int i = 0; i < count; ++i) out[i] = tokens[i];
  __threadfence_system();
}

// After all batch rows: mark the entry's unused rows and publish its stamp to the host.
extern "C" __global__ void publish_round(const int* replay_number, int entries, int rows,
                                         int out_rows, int* out_slot, int out_slot_stride,
                                         int* stamp, int stamp_stride) {
  const int replay = *replay_number;
  const int entry = static_cast<int>(static_cast<unsigned int>(replay) % entries);
  for (int b = rows; b < out_rows; ++b) {
    out_slot[static_cast<long long>(entry) * out_slot_stride + b] = -1;
  }
  __threadfence_system();
  store_release_system(stamp + static_cast<long long>(entry) * stamp_stride, replay);
}
