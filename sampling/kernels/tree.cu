// A tree of drafts, level by level: the likeliest children of the likeliest nodes, and of all that
// were seen the likeliest (Li et al., "EAGLE-2", 2024).
//
// The nodes that a drafter is fed are rows 1, 2, .. of a tree of their own, `branch` to a level
// after the first, and stand in the slot's `drafts`, `parent` and `path` until the last level
// chooses what is verified. A child's score is its parent's plus its log probability among what the
// grammar allows; so a child never beats its parent, and the earlier of equals wins: whatever is
// chosen, its parent is.
#include "best.cuh"
#include "slot.cuh"

// Children that were seen, of all levels; [most] for each batch row, in the order of levels, of
// nodes within a level, and of a node's likelihoods.
struct Seen {
  int branch;
  int levels;
  int most;        // branch + (levels - 1) * branch^2
  int candidates;  // of a node, whose legality may be asked for
  int nodes;       // drafts to verify, at most
};

__device__ __forceinline__ int seen_before(const Seen& seen, int level) {
  return level == 1 ? 0 : seen.branch + (level - 2) * seen.branch * seen.branch;
}

// The row that node f of a level was fed as; 0: the slot's last token, whose children are level 1.
__device__ __forceinline__ int fed_row(const Seen& seen, int level, int f) {
  return level == 1 ? 0 : (level - 2) * seen.branch + f + 1;
}

// Whether the grammar is asked about a slot's nodes; all threads, by way of a shared word, for host
// memory is read once.
__device__ __forceinline__ bool is_asked(int probed, const int* exchange,
                                         const ExchangeLayout& layout, int index, const Slot& slot,
                                         int& said) {
  if (threadIdx.x == 0) {
    said = probed && !is_unconstrained(stamp_of(exchange, layout, index, 0), slot.epoch);
  }
  block_sync();
  const bool asked = said != 0;
  block_sync();
  return asked;
}

// Row by row of the fed nodes: the ids it would like best, and their log probabilities, by the
// target's own race with the noise of the position for coupled requests.
extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    tree_candidates(const float* logits, int draft_vocab, int token_limit, const int* d2t,
                    const int* row_slot, int level, int probed, const Seen seen, Meeting* meetings,
                    const Slot* slots, const RoundRow* rows, int row_words, float* work,
                    int* top_id, float* top_value, float* others, int* exchange,
                    const ExchangeLayout layout, const int* replay_number) {
  __shared__ Scratch scratch;
  const int tid = static_cast<int>(threadIdx.x);
  const int fed = level == 1 ? 1 : seen.branch;
  const int r = static_cast<int>(blockIdx.x);
  const int b = r / fed;
  const int f = r % fed;
  const int index = row_slot[b];
  const int to = (b * seen.branch + f) * seen.candidates;
  const bool first = tid == 0 && blockIdx.y == 0;
  if (first) top_id[to] = -1;
  if (index < 0 || !is_drafting(slots[index], *round_row(rows, row_words, b), 1)) return;
  const Slot& slot = slots[index];
  const int position = slot.n + level;  // being drafted
  const bool asked = is_asked(probed, exchange, layout, index, slot, scratch.token);
  Candidates* head =
      reinterpret_cast<Candidates*>(record_of(exchange, layout, index, layout.candidate_ids));
  int* ids = reinterpret_cast<int*>(head + 1) + f * seen.candidates;
  if (asked && first) {
    ids[0] = -1;
    if (f == 0) *head = {*replay_number, level, fed};
  }
  const int node = fed_row(seen, level, f);
  if (node > 0 && slot.drafts[node - 1] < 0) return;

  const Row row = {logits + static_cast<long long>(r) * draft_vocab, draft_vocab, nullptr,
                   token_limit, d2t};
  float* score = work + static_cast<long long>(r) * draft_vocab;
  int best_column;
  const int status = row_sample(row, false, {}, false, {}, score, meetings[r], STEP_BEST, STEP_DRAW,
                                scratch, &best_column);
  if (status != ROW_OK) return;
  const float best_logit = row.logits[best_column] + 0.0f;
  block_sync();
  const bool sampled = slot.temperature >= GREEDY_TEMPERATURE;
  const float inverse_temperature = sampled ? fdiv(1.0f, slot.temperature) : 1.0f;
  const Noise noise = {slot.seed, position, PURPOSE_NOISE | static_cast<u32>(slot.sample) << 8};
  const float minus_infinity = __uint_as_float(0xff800000u);
  u64 top = 0;  // positive floats are ordered as their bits
  for (int i = tid; i < draft_vocab; i += BLOCK) {
    if (!(score[i] > minus_infinity)) continue;
    float weight = exp_nonpositive(fmul(fadd(score[i], -best_logit), inverse_temperature));
    const int id = d2t ? d2t[i] : i;
    if (sampled) {
      weight = fdiv(weight, exponential(noise_word(noise, static_cast<u32>(id))));
    }
    score[i] = weight;
    top = __float_as_uint(weight) > top ? __float_as_uint(weight) : top;
  }
  top = block_reduce(top, scratch, Max());
  const float most = __uint_as_float(static_cast<u32>(top));
  u64 sum = 0;
  for (int i = tid; i < draft_vocab; i += BLOCK) {
    if (score[i] > minus_infinity) sum += fixed_point(fdiv(score[i], most));
  }
  sum = block_reduce(sum, scratch, Sum());
  const float whole = from_fixed_point(sum);
  const float log_sum = log_positive(whole);

  BestFirst order(score, draft_vocab);
  for (int c = 0; c < seen.candidates; ++c) {
    const int column = order.next(scratch);
    if (tid == 0) {
      const float share = column < 0 ? 0.0f : fdiv(score[column], most);
      const bool any = share > 1e-30f;
      top_id[to + c] = !any ? -1 : d2t ? d2t[column] : column;
      top_value[to + c] = any ? fadd(log_positive(share), -log_sum) : 0.0f;
      if (asked) ids[c] = top_id[to + c];
      sum -= fixed_point(share);
    }
    if (column < 0) break;
  }
  if (tid == 0) others[b * seen.branch + f] = fdiv(from_fixed_point(sum), whole);
  if (asked && tid == 0) __threadfence_system();
}

// The children of node f that are legal, `branch` at most; their scores are those of a distribution
// from which what is known to be illegal was taken: what is left is summed, for what is taken may
// be all but a little. `others` have the ids that are no candidates.
__device__ inline void add_children(const Seen& seen, const int* ids, const float* values,
                                    float others, u32 legal, int parent, float score, int* token,
                                    int* under, float* total) {
  float left = others;
  int found = 0;
  for (int c = 0; c < seen.candidates && ids[c] >= 0; ++c) {
    const bool tested = found < seen.branch;
    const bool may = tested && (legal >> c & 1u);
    const float p = exp_nonpositive(values[c]);
    if (may || !tested) left = fadd(left, p);
    if (!may) continue;
    token[found] = ids[c];
    total[found++] = p;
  }
  for (int i = 0; i < seen.branch; ++i) {
    under[i] = parent;
    if (i >= found) {
      token[i] = -1;
      total[i] = __uint_as_float(0xff800000u);
      continue;
    }
    const float share = fdiv(total[i], left);  // a lone one's is 1 exactly
    total[i] = share < 1.0f ? fadd(score, log_positive(share)) : score;
  }
}

// Whether i comes before j: the higher score, of equals the earlier.
__device__ __forceinline__ bool is_before(const float* total, int i, int j) {
  return total[i] > total[j] || (total[i] == total[j] && i < j);
}

// One block per batch row: the children of a level, and the nodes that are fed next; at the last
// level the drafts. With a plan, int32 [most], these are not the best: of each child it says which
// of the next level's nodes it is, `branch` for a draft that is fed to nobody, -1 for no draft.
extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    tree_grow(const int* row_slot, int level, int probed, const Seen seen, Slot* slots,
              const RoundRow* rows, int row_words, const int* top_id, const float* top_value,
              const float* others, int* seen_token, int* seen_parent, float* seen_score,
              int* fed_as, int* chosen, const int* plan, int* exchange, const ExchangeLayout layout,
              const int* replay_number) {
  __shared__ int said;
  __shared__ int best[MAX_DRAFTS];  // which children the drafts are; -1: there is none
  const int tid = static_cast<int>(threadIdx.x);
  const int b = static_cast<int>(blockIdx.x);
  const int index = row_slot[b];
  if (index < 0 || !is_drafting(slots[index], *round_row(rows, row_words, b), 1)) return;
  Slot& slot = slots[index];
  const bool asked = is_asked(probed, exchange, layout, index, slot, said);
  const Answer* answer =
      reinterpret_cast<const Answer*>(record_of(exchange, layout, index, layout.answer));
  if (tid == 0) said = answer->replay == *replay_number && answer->draft == level;
  block_sync();
  const bool answered = said != 0;
  int* token = seen_token + b * seen.most;
  int* parent = seen_parent + b * seen.most;
  float* total = seen_score + b * seen.most;
  int* fed = fed_as + b * MAX_DRAFTS;  // which child each fed row is
  const float minus_infinity = __uint_as_float(0xff800000u);

  const int first = seen_before(seen, level);
  const int count = level == 1 ? 1 : seen.branch;
  for (int f = tid; f < count; f += BLOCK) {
    const int row = fed_row(seen, level, f);
    const int at = (b * seen.branch + f) * seen.candidates;
    const u32 legal = !asked ? ~0u : answered ? reinterpret_cast<const u32*>(answer + 1)[f] : 0u;
    const int to = first + f * seen.branch;
    add_children(seen, top_id + at, top_value + at, others[b * seen.branch + f], legal, row,
                 row == 0 ? 0.0f : total[fed[row - 1]], token + to, parent + to, total + to);
  }
  block_sync();

  const int end = first + count * seen.branch;
  if (level < seen.levels) {
    const auto goes_on = [&](int i) {
      return total[i] > minus_infinity && !is_stop(slot, token[i]) &&
             slot.n + level + 1 < slot.limit;
    };
    const int base = fed_row(seen, level + 1, 0);
    for (int f = tid; f < seen.branch; f += BLOCK) slot.drafts[base + f - 1] = -1;
    block_sync();
    for (int i = first + tid; i < end; i += BLOCK) {
      if (!goes_on(i)) continue;
      int rank = plan == nullptr ? 0 : plan[i];
      for (int j = first; plan == nullptr && j < end; ++j) {
        rank += goes_on(j) && is_before(total, j, i);
      }
      if (rank < 0 || rank >= seen.branch) continue;
      const int row = base + rank;
      fed[row - 1] = i;
      slot.drafts[row - 1] = token[i];
      slot.parent[row - 1] = parent[i];
      slot.path[row - 1] = path_of(slot, parent[i]) | 1ull << (row - 1);
    }
    block_sync();
    if (tid != 0) return;
    Drafted* head = reinterpret_cast<Drafted*>(record_of(exchange, layout, index, layout.drafted));
    int* ids = reinterpret_cast<int*>(head + 1);
    const int rows_fed = base + seen.branch - 1;
    for (int j = base; j <= rows_fed; ++j) {
      ids[j - 1] = slot.drafts[j - 1];
      ids[layout.drafts + j - 1] = slot.drafts[j - 1] < 0 ? 0 : slot.parent[j - 1];
    }
    *head = {*replay_number, rows_fed};
    __threadfence_system();
    return;
  }

  // The best first, of which a round may have a place for the first alone.
  int* row_of = chosen + b * seen.most;
  for (int f = tid; f < seen.nodes; f += BLOCK) best[f] = -1;
  block_sync();
  for (int i = tid; i < end; i += BLOCK) {
    if (!(total[i] > minus_infinity) || (plan != nullptr && plan[i] < 0)) continue;
    int rank = 0;
    for (int j = 0; j < end; ++j) {
      rank += plan == nullptr ? is_before(total, j, i) : j < i && plan[j] >= 0;
    }
    if (rank < seen.nodes) best[rank] = i;
  }
  block_sync();
  if (tid != 0) return;
  int kept = 0;
  for (int f = 0; f < seen.nodes; ++f) {
    const int i = best[f];
    if (i < 0 || slot.n + kept + 1 >= slot.room) continue;
    const int on = parent[i] == 0 ? 0 : row_of[fed[parent[i] - 1]];
    row_of[i] = ++kept;
    keep_draft(slot, kept, on, token[i], DRAFT_POINT, *replay_number, exchange, layout, index);
  }
  if (kept == 0) {
    int* head = record_of(exchange, layout, index, layout.drafted);
    *reinterpret_cast<Drafted*>(head) = {*replay_number, 0};
  }
  __threadfence_system();
}
