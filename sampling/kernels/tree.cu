// Draft trees that grow level by level: the most likely nodes of a level are fed to the drafter,
// and the most likely nodes of all levels become drafts (EAGLE-2, Li et al., 2024).
//
// The nodes that are fed to the drafter are rows 1, 2, .. of a temporary tree with `branch` rows
// per level. While the tree grows, these rows are stored in the slot's `drafts`, `parent` and
// `path`. The last level replaces them with the drafts.
//
// The score of a child is its parent's score plus its log probability among the legal tokens. A
// child therefore never has a higher score than its parent. Of nodes with equal scores, the earlier
// one is preferred. For both reasons, the parent of every chosen node is chosen too.
#include "adjust.cuh"
#include "best.cuh"

// Sizes of a tree. The children of all levels of a batch row are stored in arrays of `children`
// entries, ordered by level, by parent within a level, and by probability within a parent.
struct TreeSize {
  int branch;
  int levels;
  int children;    // branch + (levels - 1) * branch^2
  int candidates;  // per node
  int drafts;      // maximum drafts to verify
};

// Returns the index of the first child of a level in the arrays of children.
__device__ __forceinline__ int first_child(const TreeSize& tree, int level) {
  return level == 1 ? 0 : tree.branch + (level - 2) * tree.branch * tree.branch;
}

// Returns a row of the temporary tree (see above): that of node f among the nodes of level - 1 that
// are fed to the drafter. The children of this node are on `level`. For level 1, it is row 0, the
// slot's last token.
__device__ __forceinline__ int fed_row(const TreeSize& tree, int level, int f) {
  return level == 1 ? 0 : (level - 2) * tree.branch + f + 1;
}

// Returns whether the grammar tests the most likely children of each node (the candidates) before
// they become drafts of slot number `index`. Reads host memory, so only one thread should call this
// function.
__device__ __forceinline__ bool is_probed(const int* exchange, const ExchangeLayout& layout,
                                          int index, const Slot& slot) {
  return layout.mode == DRAFT_MODE_TREE_PROBE &&
         !is_unconstrained(read_stamp(exchange, layout, index, 0), slot.epoch);
}

// Finds, for each parent of the nodes of a level, the ids with the greatest weights as next token,
// and the logarithms of their shares of the total weight. For greedy requests, the weight of an id
// is its probability p. For sampled requests, it is p / E, where E is the exponential variate that
// the target will use for the same id and position (row.cuh). The blocks with one value of
// blockIdx.x process one row of logits.
extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    tree_candidates(float* logits, int draft_vocab, int token_limit, const int* d2t, const int* t2d,
                    const int* row_slot, int level, const TreeSize tree, const int* tables,
                    int vocab_size, CrossBlockScratch* cross_block, const Slot* slots,
                    const RoundRow* rows, int row_words, float* work, int* top_id, float* top_value,
                    float* others, int* exchange, const ExchangeLayout layout,
                    const int* replay_number) {
  __shared__ Scratch scratch;
  __shared__ float drafted[MAX_DRAFTS];
  __shared__ int probed;
  const int tid = static_cast<int>(threadIdx.x);
  const int fed = level == 1 ? 1 : tree.branch;
  const int r = static_cast<int>(blockIdx.x);
  const int b = r / fed;
  const int f = r % fed;
  const int index = row_slot[b];
  const int out = (b * tree.branch + f) * tree.candidates;
  const bool first = tid == 0 && blockIdx.y == 0;
  if (first) top_id[out] = -1;
  if (index < 0 || !is_drafting(slots[index], *round_row(rows, row_words, b), 1)) return;
  const Slot& slot = slots[index];
  const int position = slot.n + level;  // position of the draft
  if (tid == 0) probed = is_probed(exchange, layout, index, slot);
  block_sync();
  Candidates* head =
      reinterpret_cast<Candidates*>(record_of(exchange, layout, index, layout.candidate_ids));
  int* ids = reinterpret_cast<int*>(head + 1) + f * tree.candidates;
  if (probed && first) {
    ids[0] = -1;
    if (f == 0) *head = {*replay_number, level, fed};
  }
  const int node = fed_row(tree, level, f);
  if (node > 0 && slot.drafts[node - 1] < 0) return;

  float* x = logits + static_cast<long long>(r) * draft_vocab;
  adjust_draft(x, own_slice(draft_vocab), {draft_vocab, d2t, t2d}, slot, path_of(slot, node),
               position, table_of(tables, vocab_size, index), vocab_size, drafted);
  const Row row = {x, draft_vocab, nullptr, token_limit, d2t};
  float* score = work + static_cast<long long>(r) * draft_vocab;
  int best_column;
  const int status = row_sample(row, false, {}, false, {}, score, cross_block[r], STEP_BEST,
                                STEP_DRAW, scratch, &best_column);
  if (status != ROW_OK) return;
  const float best_logit = row.logits[best_column] + 0.0f;
  block_sync();
  const bool sampled = slot.temperature >= GREEDY_TEMPERATURE;
  const float inverse_temperature = sampled ? fdiv(1.0f, slot.temperature) : 1.0f;
  const Noise noise = {slot.seed, position, PURPOSE_NOISE | static_cast<u32>(slot.sample) << 8};
  const float minus_infinity = __uint_as_float(0xff800000u);
  u64 top = 0;  // the bits of positive floats are ordered like the floats
  NoiseOfIds noise_of = {noise};
  for_each_four({0, draft_vocab}, [&](int i) {
    if (!(score[i] > minus_infinity)) return;
    float weight = exp_nonpositive(fmul(fadd(score[i], -best_logit), inverse_temperature));
    const int id = d2t ? d2t[i] : i;
    if (sampled) weight = fdiv(weight, exponential(noise_of(static_cast<u32>(id))));
    score[i] = weight;
    top = __float_as_uint(weight) > top ? __float_as_uint(weight) : top;
  });
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
  for (int c = 0; c < tree.candidates; ++c) {
    const int column = order.next(scratch);
    if (tid == 0) {
      const float share = column < 0 ? 0.0f : fdiv(score[column], most);
      const bool any = share > 1e-30f;
      int id = -1;
      if (any) id = d2t ? d2t[column] : column;
      top_id[out + c] = id;
      top_value[out + c] = any ? fadd(log_positive(share), -log_sum) : 0.0f;
      if (probed) ids[c] = id;
      sum -= fixed_point(share);
    }
    if (column < 0) break;
  }
  if (tid == 0) others[b * tree.branch + f] = fdiv(from_fixed_point(sum), whole);
  if (probed && tid == 0) __threadfence_system();
}

// Writes the legal children of one parent, at most `branch`, and their scores (`total`). `ids` and
// `values` are the candidates and their log probabilities. Bit i of `legal` says whether candidate
// i is legal. `score` is the score of the parent.
//
// The probabilities of the children are normalized over all ids except for the candidates that the
// grammar has rejected. The normalizer is the mass of the other candidates plus `others`, the mass
// of the ids that are not candidates. The normalizer is not computed as 1 minus the mass of the
// rejected candidates, because these may have almost all of the mass.
__device__ inline void add_children(const TreeSize& tree, const int* ids, const float* values,
                                    float others, u32 legal, int parent, float score, int* token,
                                    int* parent_of, float* total) {
  float left = others;
  int found = 0;
  for (int c = 0; c < tree.candidates && ids[c] >= 0; ++c) {
    const bool tested = found < tree.branch;
    const bool is_legal = tested && (legal >> c & 1u);
    const float p = exp_nonpositive(values[c]);
    if (is_legal || !tested) left = fadd(left, p);
    if (!is_legal) continue;
    token[found] = ids[c];
    total[found++] = p;
  }
  for (int i = 0; i < tree.branch; ++i) {
    parent_of[i] = parent;
    if (i >= found) {
      token[i] = -1;
      total[i] = __uint_as_float(0xff800000u);
      continue;
    }
    const float share = fdiv(total[i], left);  // exactly 1 for a single child
    total[i] = share < 1.0f ? fadd(score, log_positive(share)) : score;
  }
}

// Returns whether child i comes before child j: its score is higher or, if the scores are equal,
// its index is smaller.
__device__ __forceinline__ bool is_before(const float* total, int i, int j) {
  return total[i] > total[j] || (total[i] == total[j] && i < j);
}

// Computes the children of a level. Then chooses the nodes to feed to the drafter next or, at the
// last level, the drafts. One block per batch row.
//
// `plan` is null unless the tree has a fixed shape. It then has one int32 entry per child of the
// tree. If the child is fed to the drafter, its entry is its index among the fed nodes of its
// level. If the child becomes a draft but is not fed, its entry is `tree.branch`. Otherwise it is
// -1.
extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    tree_grow(const int* row_slot, int level, const TreeSize tree, Slot* slots,
              const RoundRow* rows, int row_words, const int* top_id, const float* top_value,
              const float* others, int* child_token, int* child_parent, float* child_score,
              int* fed_as, int* chosen, const int* plan, int* exchange, const ExchangeLayout layout,
              const int* replay_number) {
  __shared__ int probed, answered;
  __shared__ u32 tested[MAX_DRAFTS];  // for each node of the level, its legal candidates as bits
  __shared__ int best[MAX_DRAFTS];    // child that becomes each draft; -1: none
  const int tid = static_cast<int>(threadIdx.x);
  const int b = static_cast<int>(blockIdx.x);
  const int index = row_slot[b];
  if (index < 0 || !is_drafting(slots[index], *round_row(rows, row_words, b), 1)) return;
  Slot& slot = slots[index];
  const int count = level == 1 ? 1 : tree.branch;
  // These loads from host memory are independent of each other, so that all of them are in flight
  // at the same time.
  if (layout.mode == DRAFT_MODE_TREE_PROBE) {
    const int* words = answer_words(exchange, layout, index);
    for (int f = tid; f < count; f += BLOCK) tested[f] = static_cast<u32>(words[f]);
  }
  if (tid == 0) {
    const Answer answer = read_answer(exchange, layout, index);
    probed = is_probed(exchange, layout, index, slot);
    answered = answer.replay == *replay_number && answer.draft == level;
  }
  block_sync();
  int* token = child_token + b * tree.children;
  int* parent = child_parent + b * tree.children;
  float* total = child_score + b * tree.children;
  int* fed = fed_as + b * MAX_DRAFTS;  // child that became each fed row
  const float minus_infinity = __uint_as_float(0xff800000u);

  const int first = first_child(tree, level);
  for (int f = tid; f < count; f += BLOCK) {
    const int row = fed_row(tree, level, f);
    const int at = (b * tree.branch + f) * tree.candidates;
    u32 legal = ~0u;
    if (probed) legal = answered ? tested[f] : 0u;
    const int out = first + f * tree.branch;
    add_children(tree, top_id + at, top_value + at, others[b * tree.branch + f], legal, row,
                 row == 0 ? 0.0f : total[fed[row - 1]], token + out, parent + out, total + out);
  }
  block_sync();

  const int end = first + count * tree.branch;
  if (level < tree.levels) {
    const auto may_have_children = [&](int i) {
      return total[i] > minus_infinity && !is_stop(slot, token[i]) &&
             slot.n + level + 1 < slot.limit;
    };
    const int base = fed_row(tree, level + 1, 0);
    for (int f = tid; f < tree.branch; f += BLOCK) slot.drafts[base + f - 1] = -1;
    block_sync();
    for (int i = first + tid; i < end; i += BLOCK) {
      if (!may_have_children(i)) continue;
      int rank = plan == nullptr ? 0 : plan[i];
      for (int j = first; plan == nullptr && j < end; ++j) {
        rank += may_have_children(j) && is_before(total, j, i);
      }
      if (rank < 0 || rank >= tree.branch) continue;
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
    const int rows_fed = base + tree.branch - 1;
    for (int j = base; j <= rows_fed; ++j) {
      ids[j - 1] = slot.drafts[j - 1];
      ids[layout.drafts + j - 1] = slot.drafts[j - 1] < 0 ? 0 : slot.parent[j - 1];
    }
    *head = {*replay_number, rows_fed};
    __threadfence_system();
    return;
  }

  // Drafts are in descending order of score, because the next round may have too few forward rows
  // for all of them and then verifies only the first ones.
  int* row_of = chosen + b * tree.children;
  for (int f = tid; f < tree.drafts; f += BLOCK) best[f] = -1;
  block_sync();
  for (int i = tid; i < end; i += BLOCK) {
    if (!(total[i] > minus_infinity) || (plan != nullptr && plan[i] < 0)) continue;
    int rank = 0;
    for (int j = 0; j < end; ++j) {
      rank += plan == nullptr ? is_before(total, j, i) : j < i && plan[j] >= 0;
    }
    if (rank < tree.drafts) best[rank] = i;
  }
  block_sync();
  if (tid != 0) return;
  int kept = 0;
  for (int f = 0; f < tree.drafts; ++f) {
    const int i = best[f];
    if (i < 0 || slot.n + kept + 1 >= slot.capacity) continue;
    const int parent_row = parent[i] == 0 ? 0 : row_of[fed[parent[i] - 1]];
    row_of[i] = ++kept;
    append_draft(slot, kept, parent_row, token[i], DRAFT_POINT, *replay_number, exchange, layout,
                 index);
  }
  if (kept == 0) {
    int* head = record_of(exchange, layout, index, layout.drafted);
    *reinterpret_cast<Drafted*>(head) = {*replay_number, 0};
  }
  __threadfence_system();
}
