// Verification: walk the tree of drafts, draw the correction or the bonus, commit to the slot.
//
// One block per batch row. Thread 0 walks; a draw from a distribution is made by the whole block.
// Greedy and coupled requests have one token for every row: where a child holds it the walk goes
// there, else it is the last. That is exact on any tree, and on one that was made without chance no
// other rule accepts more. Rejection sampling tests the drafts of a chain.
//
// Acceptance (Leviathan, Kalman, Matias, "Fast inference from transformers via speculative
// decoding", 2023): draft d with probability q(d) is accepted iff u q(d) < p(d), else the token
// comes from max(p - q, 0). A sampled draft is always tested, an illegal one has p = 0 and is
// refused; the walk may end only AFTER an accepted token (row not ready, stop id, limit), then
// without a bonus.
#include "row.cuh"
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
  int row;   // j of the row where the walk is, or what is drawn comes from
};

extern "C" __global__ void verify_drafts(const int* row_slot, int width, int vocab_size,
                                         int draft_vocab, const int* t2d, const float* probs,
                                         const int* target_tok, const int* row_ok, Slot* slots,
                                         const float* q, int most_drafts, int* faults,
                                         int* exchange, const ExchangeLayout layout,
                                         const int* replay_number, RoundRow* rows, int row_words) {
  __shared__ Scratch scratch;
  __shared__ Walk walk;
  const int b = static_cast<int>(blockIdx.x);
  const int index = row_slot[b];
  const int replay = *replay_number;
  const bool leader = threadIdx.x == 0;
  RoundRow* result = round_row(rows, row_words, b);
  int* tokens = reinterpret_cast<int*>(result + 1);
  int* decided_by = tokens + row_width(row_words);

  if (index < 0 || !slots[index].active) {
    if (leader) {
      *result = {index, 0, REASON_NONE, 0, 0, index < 0 ? 0 : slots[index].n};
      if (index >= 0) {
        int* record = record_of(exchange, layout, index, layout.committed);
        *reinterpret_cast<Committed*>(record) = {replay, 0};
      }
    }
    return;
  }

  Slot& slot = slots[index];
  const int position = slot.n;  // of `last`
  const int tested = slot.draft_len < width - 1 ? slot.draft_len : width - 1;
  const bool sampled = slot.temperature >= GREEDY_TEMPERATURE;
  const bool rejection = sampled && slot.verify == VERIFY_REJECTION;
  const u32 sample_bits = static_cast<u32>(slot.sample) << 8;
  const float* tables = q + static_cast<long long>(index) * most_drafts * draft_vocab;

  if (leader) {
    walk = {0, 0, REASON_NONE, DRAW_NONE, 0};
    for (int depth = 0;; ++depth) {
      const int j = walk.row;
      if (position + depth + 1 >= slot.limit) {
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
      decided_by[depth] = j;
      if (!rejection) {
        const int token = target_tok[r];
        tokens[walk.count++] = token;
        const int child = child_of(slot, tested, j, token);
        if (child == 0) break;
        walk.accepted += 1;
        walk.row = child;
        if (is_stop(slot, token)) {
          walk.reason = REASON_STOP;
          break;
        }
        continue;
      }
      if (j == tested) {
        walk.draw = DRAW_TARGET;
        break;
      }
      const int d = slot.drafts[j];
      const bool known = d >= 0 && d < vocab_size;
      const float p = known ? probs[static_cast<long long>(r) * vocab_size + d] : 0.0f;
      const Noise noise = {slot.seed, position + j + 1, PURPOSE_COIN | sample_bits};
      const float u = uniform24(noise_words(noise, 0u).x[0]);
      bool accept;
      if (slot.q_kind[j] == DRAFT_POINT) {
        walk.draw = DRAW_WITHOUT;
        accept = u < p;
      } else {
        const int column = !known ? -1 : t2d ? t2d[d] : d < draft_vocab ? d : -1;
        const float qd =
            column < 0 ? 0.0f : tables[static_cast<long long>(j) * draft_vocab + column];
        walk.draw = DRAW_RESIDUAL;
        // A draft its own table calls impossible was not drawn from that table: refuse, count.
        if (!(qd > 0.0f)) atomicAdd(faults, 1);
        accept = qd > 0.0f && fmul(u, qd) < p;
      }
      if (!accept) break;
      walk.draw = DRAW_NONE;
      tokens[walk.count++] = d;
      walk.accepted += 1;
      walk.row = j + 1;
      if (is_stop(slot, d)) {
        walk.reason = REASON_STOP;
        break;
      }
    }
  }
  block_sync();

  if (walk.draw != DRAW_NONE) {
    const int j = walk.row;
    const float* p = probs + static_cast<long long>(b * width + j) * vocab_size;
    Noise noise = {slot.seed, position + j + 1, PURPOSE_RESIDUAL | sample_bits};
    int token = -1;
    if (walk.draw == DRAW_RESIDUAL) {
      const float* table = tables + static_cast<long long>(j) * draft_vocab;
      token = draw_column(vocab_size, nullptr, noise, scratch, [=](int i) {
        if (!(p[i] > 0.0f)) return 0.0f;
        const int column = t2d ? t2d[i] : i < draft_vocab ? i : -1;
        return column < 0 ? p[i] : fadd(p[i], -table[column]);
      });
    } else if (walk.draw == DRAW_WITHOUT) {
      const int d = slot.drafts[j];
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
    if (is_stop(slot, tokens[count - 1])) {
      reason = REASON_STOP;
    } else if (position + count + 1 >= slot.limit) {
      reason = REASON_LENGTH;
    }
  }
  if (count > 0) {
    slot.n = position + count;
    slot.last = tokens[count - 1];
    slot.draft_len = 0;
    int* drafted = record_of(exchange, layout, index, layout.drafted);
    *reinterpret_cast<Drafted*>(drafted) = {replay, 0};
  }
  if (reason != REASON_NONE) slot.active = 0;
  *result = {index, count, reason, walk.accepted, tested, position};
  int* record = record_of(exchange, layout, index, layout.committed);
  *reinterpret_cast<Committed*>(record) = {replay, count};
  for (int i = 0; i < count; ++i) record[sizeof(Committed) / 4 + i] = tokens[i];
  __threadfence_system();
}

// After all batch rows: copies their results to the replay's entry of the output ring, marks the
// entry's unused rows and publishes its stamp to the host. One block.
extern "C" __global__ void publish_round(const int* rows, int batch, const int* replay_number,
                                         int* ring, const OutputLayout out, int* stamp,
                                         int stamp_stride) {
  const int replay = *replay_number;
  const int entry = static_cast<int>(static_cast<unsigned int>(replay) % out.entries);
  int* to = ring + static_cast<long long>(entry) * out.stride;
  for (int i = threadIdx.x; i < out.rows * out.row; i += blockDim.x) {
    to[i] = i < batch * out.row ? rows[i] : -1;
  }
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) store_release_system(stamp + entry * stamp_stride, replay);
}
