// Which drafts of a chain pass their test, all rows at once.
//
// Row r, row j of batch row b by the map, tests draft j, of which it needs the weight P_j of the
// chain down to it, and what is left for the next draft. For i drafts before the end g
//
//   P_0 = 1    P_i = min(1, P_{i-1} p_i(d_i) / q_i(d_i))
//   R_i = sum max(P_i p_{i+1} - q_{i+1}, 0)    h_i = R_i / (R_i + 1 - P_i)    h_g = P_g
//
// and draft i passes with chance h_i: block verification (Sun et al., ICLR 2025, arXiv 2403.10444).
// The LAST draft that passes is the last accepted one, and the token behind it comes from
// max(P p - q, 0). Behind i drafts it goes on with probability P_i whatever the chain's length, so
// the chain may end anywhere, if only its prefix says so: at a row that is not ready as at a stop
// id.
//
// A draft that was not drawn is a point with q = 1. Chains mix both: no less is accepted than by
// tests one by one, and more where a draft was drawn behind another draft, of either kind.
//
// VERIFY_PER_TOKEN: draft j passes alone, with chance min(1, p / q), and the FIRST that fails ends
// the chain (Leviathan, Kalman, Matias, "Fast inference from transformers via speculative
// decoding", 2023). In either, an illegal draft has p = 0 and never passes, nor does any behind it.
#include "left.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    test_drafts(const int* row_slot, const int* map, int vocab_size, int draft_vocab,
                const int* t2d, const float* probs, const int* row_ok, const Slot* slots,
                const float* q, int most_drafts, float* weights, int* passed, Meeting* meetings,
                int* faults) {
  __shared__ Scratch scratch;
  const int r = static_cast<int>(blockIdx.x);
  const int j = draft_row(map[r]);
  const int first = r - j;
  const int index = row_slot[batch_row(map[r])];
  if (index < 0 || !slots[index].active) return;
  const Slot& slot = slots[index];
  const int most = slot.draft_len;
  if (j > most || !is_testing(slot, most)) return;

  int end = 0;
  while (end < most && row_ok[first + end] == ROW_OK) ++end;
  const bool per_token = slot.verify == VERIFY_PER_TOKEN;
  const float* tables = q + static_cast<long long>(index) * most_drafts * draft_vocab;
  float weight = j > end ? 0.0f : 1.0f;
  for (int i = per_token && j > 0 ? j - 1 : 0; i < j && j <= end; ++i) {
    const int d = slot.drafts[i];
    const bool known = d >= 0 && d < vocab_size;
    const float p = known ? probs[static_cast<long long>(first + i) * vocab_size + d] : 0.0f;
    const int column = known ? column_of(t2d, draft_vocab, d) : -1;
    const float qd = slot.q_kind[i] == DRAFT_POINT ? 1.0f
                     : column < 0 ? 0.0f
                                  : tables[static_cast<long long>(i) * draft_vocab + column];
    // A draft its own table calls impossible was not drawn from that table: refuse, count.
    if (!(qd > 0.0f) && i == j - 1 && threadIdx.x == 0 && blockIdx.y == 0) {
      atomicAdd(faults, 1);
    }
    const float mass = fmul(weight, p);
    weight = !(qd > 0.0f) ? 0.0f : mass >= qd ? 1.0f : fdiv(mass, qd);
  }

  // Passes where u < h = win / (win + lose).
  float win = weight;
  float lose = fadd(1.0f, -weight);
  if (!per_token && j < end && weight > 0.0f && weight < 1.0f) {
    const float* p = probs + static_cast<long long>(r) * vocab_size;
    const float* table = tables + static_cast<long long>(j) * draft_vocab;
    if (slot.q_kind[j] == DRAFT_POINT) table = nullptr;
    const Left left = {weight, p, table, slot.drafts[j], t2d, draft_vocab};
    const Slice own = own_slice(vocab_size);
    u64 sum = 0;
    for (int i = own.begin + static_cast<int>(threadIdx.x); i < own.end; i += BLOCK) {
      const float mass = left(i);
      if (mass > 0.0f) sum += fixed_point(mass);
    }
    sum = block_reduce(sum, scratch, Sum());
    if (threadIdx.x == 0) atomicAdd(&meetings[r].sum, sum);
    if (!is_last(meetings[r], scratch)) return;
    win = from_fixed_point(meetings[r].sum);
    block_sync();
    if (threadIdx.x == 0) meetings[r].sum = 0;
  }
  if (threadIdx.x != 0) return;
  const Noise noise = {slot.seed, slot.n + j, PURPOSE_COIN | static_cast<u32>(slot.sample) << 8,
                       slot.n};
  const float u = uniform24(noise_words(noise, 0u).x[0]);
  weights[r] = per_token ? 1.0f : weight;
  passed[r] = fmul(u, fadd(win, lose)) < win;
}
