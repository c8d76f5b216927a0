// Which drafts of a tree pass, where siblings were drawn from a table without replacement:
// traversal verification (Weng et al., NeurIPS 2025, arXiv 2505.12398), of which verify.cu's is the
// chain.
//
// Leaves are tested, depth first; a node goes on with weight w, and passes with that chance, once
// its children are gone. Of node v under u, with token t, and of u when v is gone:
//
//   w_v = min(1, w_u p_u(t) / q_u(t))
//   r = max(w_u p_u - q_u, 0)    S = sum r    w_u = S / (S + 1 - w_u)    p_u = r / S    q_u(t) = 0
//
// and q_u is renormalised. The first node that passes is the last accepted one, and the token
// behind it comes from its p. The root always passes; a node whose row is not ready is a leaf.
//
// Tables hold weights that are renormalised here, among what was legal for the draw: the drafts
// whose candidates a grammar was asked about were drawn from what its mask leaves. That is done
// anew for every sibling, relative to the best that is left, which may be next to nothing. p and q
// change in place, neither of them to scale.
#include "row.cuh"
#include "slot.cuh"

// A node on the way from the root to the one that is tested.
struct Node {
  float weight;
  float whole;  // sum of p
  u64 mass;     // sum of q
};

// Makes a table what `mask` leaves of it, relative to the best; returns its sum.
__device__ __forceinline__ u64 legal_mass(float* table, const u32* mask, int vocab_size,
                                          const int* t2d, int draft_vocab, Scratch& scratch) {
  u64 top = 0;  // positive floats are ordered as their bits
  for (int i = static_cast<int>(threadIdx.x); i < vocab_size; i += BLOCK) {
    const int column = column_of(t2d, draft_vocab, i);
    if (column < 0) continue;
    if (mask && !(mask[i >> 5] >> (i & 31) & 1u)) table[column] = 0.0f;
    top = __float_as_uint(table[column]) > top ? __float_as_uint(table[column]) : top;
  }
  top = block_reduce(top, scratch, Max());
  u64 sum = 0;
  for (int i = static_cast<int>(threadIdx.x); i < vocab_size && top > 0; i += BLOCK) {
    const int column = column_of(t2d, draft_vocab, i);
    if (column < 0) continue;
    table[column] = fdiv(table[column], __uint_as_float(static_cast<u32>(top)));
    sum += fixed_point(table[column]);
  }
  return block_reduce(sum, scratch, Sum());
}

// One block per batch row.
extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    traverse_tree(const int* row_slot, const int* first_row, int vocab_size, int draft_vocab,
                  const int* t2d, float* probs, const int* row_ok, const int* row_state,
                  const int* masks, const ExchangeLayout layout, const Slot* slots, float* q,
                  int tables, int* target_tok, int* faults) {
  __shared__ Scratch scratch;
  __shared__ Node nodes[MAX_DRAFTS + 1];
  const int b = static_cast<int>(blockIdx.x);
  const int tid = static_cast<int>(threadIdx.x);
  const int index = row_slot[b];
  if (index < 0 || !slots[index].active || !is_traversed(slots[index])) return;
  const Slot& slot = slots[index];
  const int first = first_row[b];
  const auto law = [&](int j) { return probs + static_cast<long long>(first + j) * vocab_size; };
  const auto table_of = [&](int child) {
    const int table = slot.q_kind[child - 1] - DRAFT_SIBLING;
    return q + (static_cast<long long>(index) * tables + table) * draft_vocab;
  };
  // What is left of u's law without what q, with the siblings that are there, may have: times q's
  // sum, which is not 1.
  const auto left_of = [&](int u, int child) -> Left {
    const float share =
        fdiv(fmul(nodes[u].weight, from_fixed_point(nodes[u].mass)), nodes[u].whole);
    return {share, law(u), table_of(child), slot.drafts[child - 1], t2d, draft_vocab};
  };
  const auto enter = [&](int j, float weight) {
    block_sync();
    if (tid == 0) nodes[j] = {weight, 1.0f, 0};
    block_sync();
  };

  int node = 0;
  int gone = 0;  // its children up to this row are
  enter(0, 1.0f);
  while (true) {
    int child = 0;
    const bool open = row_ok[first + node] == ROW_OK && nodes[node].weight > 0.0f;
    for (int c = gone + 1; c <= slot.draft_len && open && child == 0; ++c) {
      if (slot.parent[c - 1] == node) child = c;
    }
    if (child > 0) {
      const bool masked = layout.candidates > 0 && row_state[first + node] == ROW_READY;
      const u32* mask = masked ? mask_of(masks, layout, index, node) : nullptr;
      const u64 sum = legal_mass(table_of(child), mask, vocab_size, t2d, draft_vocab, scratch);
      if (tid == 0) nodes[node].mass = sum;
      block_sync();
      const Left left = left_of(node, child);
      const int column = column_of(t2d, draft_vocab, left.draft);
      const float qd = column < 0 ? 0.0f : left.q[column];
      const float mass = fmul(left.weight, left.p[left.draft]);
      if (!(qd > 0.0f) && tid == 0) atomicAdd(faults, 1);
      enter(child, !(qd > 0.0f) ? 0.0f : mass >= qd ? 1.0f : fdiv(mass, qd));
      node = gone = child;
      continue;
    }
    const Noise coin = {slot.seed, slot.n + node, PURPOSE_COIN | static_cast<u32>(slot.sample) << 8,
                        slot.n};
    if (node == 0 || uniform24(noise_words(coin, 0u).x[0]) < nodes[node].weight) break;

    const int u = slot.parent[node - 1];
    const Left left = left_of(u, node);
    float* p = law(u);
    u64 sum = 0;
    for (int i = tid; i < vocab_size; i += BLOCK) {
      const float mass = left(i);
      if (mass > 0.0f) sum += fixed_point(mass);
    }
    sum = block_reduce(sum, scratch, Sum());
    for (int i = tid; i < vocab_size && sum > 0; i += BLOCK) {
      const float mass = left(i);
      p[i] = mass > 0.0f ? mass : 0.0f;
    }
    block_sync();
    if (tid == 0) {
      const float win = from_fixed_point(sum);
      const float lose = fmul(from_fixed_point(nodes[u].mass), fadd(1.0f, -nodes[u].weight));
      // Nothing left of p: equal to q up to rounding if w is 1, so p itself is right.
      if (sum > 0) nodes[u].whole = win;
      if (sum > 0 || lose > 0.0f) nodes[u].weight = fdiv(win, fadd(win, lose));
      const int column = column_of(t2d, draft_vocab, left.draft);
      if (column >= 0) table_of(node)[column] = 0.0f;
    }
    block_sync();
    gone = node;
    node = u;
  }

  if (row_ok[first + node] == ROW_OK) {
    const float* p = law(node);
    const Noise noise = {slot.seed, slot.n + depth_of(slot, node) + 1,
                         PURPOSE_RESIDUAL | static_cast<u32>(slot.sample) << 8, slot.n};
    const int token = draw_column(vocab_size, nullptr, noise, scratch, [p](int i) { return p[i]; });
    if (tid == 0) target_tok[first + node] = token;
  }
  for (int j = node; j > 0 && tid == 0; j = slot.parent[j - 1]) {
    target_tok[first + slot.parent[j - 1]] = slot.drafts[j - 1];
  }
}
