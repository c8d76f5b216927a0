#include "slot.h"

#include <time.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "threads.h"

namespace graft::guide {
namespace {

bool is_made(const Slot& slot, int j) noexcept {
  return slot.made[at(j)].load(std::memory_order_relaxed) != ROW_NOT_READY;
}

// Sets the state of row j. The mask of the row must have been written before.
void make(Slot& slot, int j, int32_t state) noexcept {
  slot.made[at(j)].store(state, std::memory_order_release);
}

uint64_t bit(int j) noexcept { return uint64_t{1} << (j - 1); }

// Records that the matcher has moved to node j, because it has accepted draft j.
void arrive(Slot& slot, int j) noexcept {
  slot.node = j;
  if (slot.terminated) slot.closed |= bit(j);
}

}  // namespace

Forced::Forced(const std::vector<uint32_t>& lengths, std::string bytes, bool unique_only)
    : bytes_(std::move(bytes)), max_legal_(unique_only ? 1 : kMaxPrefixes), starts_{0} {
  for (const uint32_t length : lengths) starts_.push_back(starts_.back() + length);
  if (starts_.back() != bytes_.size()) {
    throw std::invalid_argument("the lengths of the tokens do not add up to the number of bytes");
  }
}

int32_t Forced::token(const int32_t* row, int64_t words) const noexcept {
  int64_t used = 0;
  for (int64_t w = 0; w < words; ++w) used += row[w] != 0;
  if (used == 0 || used > max_legal_) return -1;
  int32_t ids[kMaxPrefixes];
  int count = 0;
  int32_t longest = -1;
  for (int64_t w = 0; w < words; ++w) {
    for (uint32_t bits = static_cast<uint32_t>(row[w]); bits != 0; bits &= bits - 1) {
      if (count == max_legal_) return -1;
      const auto id = static_cast<int32_t>(w * 32 + __builtin_ctz(bits));
      if (count == 0 || length(id) > length(longest)) longest = id;
      ids[count++] = id;
    }
  }
  const bool one_text = std::all_of(ids, ids + count, [&](int32_t id) {
    return length(id) != 0 && std::memcmp(text(id), text(longest), length(id)) == 0;
  });
  return count == 1 || one_text ? longest : -1;
}

void Slot::size_for(const Exchange& exchange) {
  const size_t rows = at(exchange.layout.rows);
  stamped.resize(rows);
  forced.assign(rows, -1);
  made = std::vector<std::atomic<int32_t>>(rows);
  pending.tokens.resize(rows);
  order.commit.tokens.resize(rows);
  const size_t nodes = at(exchange.layout.drafts) + 1;
  order.draft.resize(nodes - 1);
  order.parent.resize(nodes);
  order.depth.resize(nodes);
  for (size_t j = 1; j < nodes; ++j) {  // a chain by default
    order.parent[j] = static_cast<int32_t>(j - 1);
    order.depth[j] = static_cast<int32_t>(j);
  }
  const bool lattice = is_lattice_mode(exchange.layout.mode);
  const int lists = lattice ? exchange.layout.levels : exchange.layout.branch;
  order.candidate.resize(at(exchange.layout.candidates * lists));
  if (lattice) order.share.resize(order.candidate.size());
  legal.resize(at(exchange.layout.branch));
}

void SlotWork::serve(Slot& slot) const noexcept {
  if (slot.order.commit.given) commit(slot);
  if (slot.ended) return;
  switch (slot.order.task) {
    case Task::kNone:
      break;
    case Task::kFillRows:
      fill_rows(slot);
      break;
    case Task::kFillRow0:
      if (!is_made(slot, 0)) fill_mask(slot, 0);
      if (follow_forced_) follow_forced(slot);
      break;
    case Task::kFillDraftRow:
      if (is_made(slot, slot.order.j - 1)) fill_row(slot, slot.order.j);
      break;
    case Task::kProbeChain:
      probe_chain(slot);
      break;
    case Task::kProbeTree:
      probe_tree(slot);
      break;
    case Task::kProbeLattice:
      probe_lattice(slot);
      break;
  }
}

void SlotWork::commit(Slot& slot) const noexcept {
  const Commit& commit = slot.order.commit;
  if (slot.ended) return;
  roll_back(slot, slot.accepted);
  slot.node = 0;
  bool in_sync = !slot.ended && !commit.wrong;
  slot.tally[count::commits] += in_sync;
  if (in_sync) {
    const int accepted = accept_all(slot, commit.tokens.data(), commit.count);
    slot.tally[count::committed_tokens] += accepted;
    for (int i = 0; forced_ != nullptr && i < std::min(accepted, slot.tested); ++i) {
      slot.tally[count::forced_tokens] += commit.tokens[at(i)] == slot.forced[at(i)];
    }
    in_sync = accepted == commit.count;
  }
  if (!in_sync) {
    slot.tally[count::desyncs] += 1;
    fail(slot);
    return;
  }
  slot.accepted = 0;  // node 0 is the last of these tokens
  slot.tested = 0;
  slot.closed = 0;
  if (!slot.terminated) return;
  slot.tally[count::terminations] += 1;
  slot.ended = true;
  // The device normally ends the request at the stop id. If this id is not among the stop ids on
  // the device, the device continues with row 0 in the next round. The state of row 0 then ends the
  // request; without it, the request would wait for the row forever.
  make(slot, 0, ROW_DEAD_END);
}

// Fills the rows of node 0 and of all legal drafts in depth-first order, so that common prefixes
// are accepted once. The matcher returns to node 0.
void SlotWork::fill_rows(Slot& slot) const noexcept {
  const Order& order = slot.order;
  slot.tested = order.drafts;
  int j = 0;
  while (j >= 0 && !slot.ended) {
    const bool open = fill_row(slot, j);
    // Find the next node: the first child of j, or else the next sibling of j or of an ancestor.
    int next = open ? j + 1 : order.drafts + 1;
    while (next <= order.drafts && order.parent[at(next)] != j) ++next;
    for (; next > order.drafts && j > 0; j = order.parent[at(j)]) {
      for (next = j + 1; next <= order.drafts; ++next) {
        if (order.parent[at(next)] == order.parent[at(j)]) break;
      }
    }
    j = next <= order.drafts ? next : -1;
  }
  move_to(slot, 0);
}

// Fills row j unless it is filled already. Returns false if no token may follow node j.
bool SlotWork::fill_row(Slot& slot, int j) const noexcept {
  if (is_made(slot, j)) return true;
  if (!move_to(slot, j)) return false;
  fill_mask(slot, j);
  return !slot.ended;
}

// Moves the matcher to node j: rolls back to the common ancestor and accepts the drafts on the path
// from there. Returns false if one of these drafts is illegal or no token may follow node j. The
// matcher then stays at the last node that it has reached.
bool SlotWork::move_to(Slot& slot, int j) const noexcept {
  const std::vector<int32_t>& parent = slot.order.parent;
  if (slot.ended) return false;
  for (int node = j; node != 0; node = parent[at(node)]) {
    if ((slot.closed & bit(node)) != 0) return false;
  }
  int back = 0;
  // Find the lowest common ancestor. A parent has a smaller number than its children, so the
  // greater of the two nodes is replaced by its parent until both nodes are equal.
  for (int node = j; slot.node != node;) {
    int& deeper = slot.node > node ? slot.node : node;
    back += &deeper == &slot.node;
    deeper = parent[at(deeper)];
  }
  roll_back(slot, back);
  while (!slot.ended && slot.node != j) {
    int next = j;
    while (parent[at(next)] != slot.node) next = parent[at(next)];
    if (!step_to(slot, next)) return false;
  }
  return !slot.ended;
}

void SlotWork::roll_back(Slot& slot, int tokens) const noexcept {
  if (tokens == 0 || slot.matcher == nullptr) return;
  slot.tally[count::rollbacks] += 1;
  if (slot.matcher->rollback(tokens, &slot.error) == Answer::kFailed) fail(slot);
  slot.accepted -= tokens;
  slot.terminated = false;
}

// Accepts draft j, a child of the matcher's node. Returns false if the draft is illegal or no token
// may follow it.
bool SlotWork::step_to(Slot& slot, int j) const noexcept {
  if (accept(slot, slot.order.draft[at(j - 1)])) {
    arrive(slot, j);
  } else {
    slot.closed |= bit(j);
    slot.tally[count::refused_drafts] += 1;
  }
  return (slot.closed & bit(j)) == 0;
}

// Accepts forced tokens as drafts one after the other and fills their rows. The row after draft K
// is not filled here but by the open step.
void SlotWork::follow_forced(Slot& slot) const noexcept {
  for (int j = 1; j < exchange_.drafts() && is_made(slot, j - 1); ++j) {
    const int32_t token = slot.forced[at(j - 1)];
    slot.order.draft[at(j - 1)] = token;
    if (token < 0 || !fill_row(slot, j)) return;
  }
}

// Accepts the first legal candidate for draft j. If no candidate is legal, fills row j - 1, and the
// device then samples draft j under this row.
void SlotWork::probe_chain(Slot& slot) const noexcept {
  const Order& order = slot.order;
  if (!move_to(slot, order.j - 1)) return;
  for (int i = 0; i < order.candidates; ++i) {
    const int32_t id = order.candidate[at(i)];
    slot.tally[count::probes] += 1;
    if (!accept(slot, id)) {
      if (slot.ended) return;
      continue;
    }
    arrive(slot, order.j);
    slot.answered = true;
    slot.answer = id;
    return;
  }
  slot.tally[count::probe_misses] += 1;
  fill_row(slot, order.j - 1);
  slot.answered = !slot.ended;
  slot.answer = -1;
}

// Finds the legal candidates of each node of level j, up to `branch` per node. While the tree
// grows, its nodes have other numbers than the final drafts. `closed`, which refers to these
// numbers, is therefore reset at the end.
void SlotWork::probe_tree(Slot& slot) const noexcept {
  const Order& order = slot.order;
  const int branch = exchange_.layout.branch;
  const int max_candidates = exchange_.layout.candidates;
  for (int f = 0; f < branch && !slot.ended; ++f) {
    const int32_t* ids = &order.candidate[at(f * max_candidates)];
    slot.legal[at(f)] = 0;
    if (f >= order.candidates || ids[0] < 0) continue;
    if (!move_to(slot, order.j == 1 ? 0 : (order.j - 2) * branch + f + 1)) continue;
    int found = 0;
    for (int i = 0; i < max_candidates && ids[i] >= 0 && found < branch && !slot.ended; ++i) {
      slot.tally[count::probes] += 1;
      if (!accept(slot, ids[i])) continue;
      ++found;
      slot.legal[at(f)] |= uint32_t{1} << i;
      if (slot.matcher->rollback(1, &slot.error) == Answer::kFailed) fail(slot);
      slot.accepted -= 1;
      slot.terminated = false;
    }
    slot.tally[count::probe_misses] += found == 0;
  }
  move_to(slot, 0);
  slot.closed = 0;
  slot.answered = !slot.ended;
  slot.answer = order.candidates;
}

// Finds the most likely legal drafts, at most `branch` children per node (similar to DDTree, arXiv
// 2604.12989). The probability of a node is the product of the probabilities of the tokens on its
// path, where the probability of a token is relative to the candidates that have not been rejected
// after its parent. Each node has a next candidate. The most likely of these candidates is tested.
// If several candidates are equally likely, the node with the smallest number comes first. The
// number of tests is bounded. The matcher returns to node 0.
void SlotWork::probe_lattice(Slot& slot) const noexcept {
  // `score` is the probability of the node. `left` is the total probability of those candidates for
  // its children that have not been rejected. `next` is the index of the next candidate and
  // `next_score` the probability of the child that it would become; -1 if there is no candidate.
  struct Node {
    double score;
    double left = 1.0;
    double next_score = -1.0;
    int next = 0;
    int children = 0;
  };
  Order& order = slot.order;
  const ExchangeLayout& layout = exchange_.layout;
  std::array<Node, kMaxNodes> nodes{{{1.0}}};
  const auto find_next = [&](int j) {
    Node& node = nodes[at(j)];
    node.next_score = -1.0;
    const bool ended = j > 0 && (slot.closed & bit(j)) != 0;
    if (ended || order.depth[at(j)] >= order.candidates) return;
    if (node.next == layout.candidates || node.children == layout.branch) return;
    const size_t c = at(order.depth[at(j)] * layout.candidates + node.next);
    if (order.candidate[c] < 0) return;
    const double share = order.share[c];
    node.next_score = share < node.left ? node.score * (share / node.left) : node.score;
  };
  order.drafts = 0;
  find_next(0);
  int tests = 4 * order.j + layout.candidates;
  while (order.drafts < order.j && tests-- > 0) {
    int best = 0;
    for (int j = 1; j <= order.drafts; ++j) {
      if (nodes[at(j)].next_score > nodes[at(best)].next_score) best = j;
    }
    Node& under = nodes[at(best)];
    if (under.next_score < 0.0 || !move_to(slot, best)) break;
    const size_t c = at(order.depth[at(best)] * layout.candidates + under.next++);
    const int j = order.drafts + 1;
    order.draft[at(j - 1)] = order.candidate[c];
    order.parent[at(j)] = best;
    order.depth[at(j)] = order.depth[at(best)] + 1;
    slot.tally[count::probes] += 1;
    if (accept(slot, order.candidate[c])) {
      arrive(slot, j);
      order.drafts = j;
      under.children += 1;
      nodes[at(j)] = {under.next_score};
      find_next(j);
    } else {
      under.left -= order.share[c];
    }
    find_next(best);
  }
  const int last = order.drafts;
  const bool open =
      last < std::min(order.candidates, order.j) && (last == 0 || (slot.closed & bit(last)) == 0);
  if (layout.mode == DRAFT_MODE_CHAIN_LATTICE && open && !slot.ended) {
    slot.tally[count::probe_misses] += 1;
    if (forced_ != nullptr) fill_row(slot, last);  // its forced token becomes the next draft
  }
  move_to(slot, 0);
  slot.closed = 0;
  slot.answered = !slot.ended;
  slot.answer = order.drafts;
}

bool SlotWork::check_time(Slot& slot) const noexcept {
  if (slot.ended || slot.cpu_limit == 0) return !slot.ended;
  if (monotonic_ns() < slot.time_limit) return true;  // reading the other clock is a system call
  if (clock_ns(CLOCK_THREAD_CPUTIME_ID) < slot.cpu_limit) return true;
  slot.error.keep(
      "the grammar is too slow: its matcher took more than 400 times the budget of a step "
      "(grammar_budget_us), and more than 2 s of processor time; use a less ambiguous grammar");
  fail(slot);
  return false;
}

bool SlotWork::accept(Slot& slot, int32_t token) const noexcept {
  return accept_all(slot, &token, 1) == 1;
}

// Accepts tokens one after the other until one is illegal. Returns the number of accepted tokens.
int SlotWork::accept_all(Slot& slot, const int32_t* tokens, int count) const noexcept {
  if (slot.ended || slot.terminated) return 0;
  int size = 0;
  while (size < count && tokens[size] >= 0 && tokens[size] < exchange_.vocab_size) ++size;
  if (slot.matcher == nullptr) return size;  // there is no grammar
  if (size == 0 || !check_time(slot)) return 0;
  const int accepted = slot.matcher->accept_all(tokens, size, &slot.error);
  slot.tally[count::accepts] += std::max(accepted, 0) + (accepted < size ? 1 : 0);
  if (accepted == 0) return 0;
  Answer terminated = Answer::kFailed;
  if (accepted > 0) {
    slot.accepted += accepted;
    terminated = slot.matcher->is_terminated(&slot.error);
  }
  slot.terminated = terminated == Answer::kYes;
  if (terminated != Answer::kFailed) return accepted;
  fail(slot);
  return 0;
}

void SlotWork::fill_mask(Slot& slot, int j) const noexcept {
  if (!check_time(slot)) return;
  const int64_t count = exchange_.layout.words;
  int32_t* words = exchange_.mask(slot.index, j);
  slot.tally[count::fills] += 1;
  int32_t& forced = slot.forced[at(j)];
  forced = -1;
  const Filled filled = slot.matcher->fill(words, count, &slot.error);
  if (filled == Filled::kFailed) {
    fail(slot);
    return;
  }
  if (filled == Filled::kFree) {
    slot.tally[count::free_rows] += 1;
    make(slot, j, ROW_FREE);
    return;
  }
  int32_t any = 0;
  for (int64_t w = 0; w < count && any == 0;) {  // in blocks that the compiler vectorizes
    for (const int64_t end = std::min(w + 64, count); w < end; ++w) any |= words[w];
  }
  if (any != 0) {
    if (forced_ != nullptr) forced = forced_->token(words, count);
    slot.tally[count::forced_rows] += forced >= 0;
    make(slot, j, ROW_READY);
    return;
  }
  slot.tally[count::dead_ends] += 1;
  if (j == 0) {
    slot.ended = true;
  } else {
    slot.closed |= bit(j);
  }
  make(slot, j, ROW_DEAD_END);
}

void SlotWork::fail(Slot& slot) const noexcept {
  slot.tally[count::errors] += 1;
  slot.ended = true;
  make(slot, 0, ROW_ERROR);
}

// Invalidates all rows. Row 0 of a failed slot keeps ROW_ERROR, because the error is independent of
// the tokens.
void SlotWork::forget_rows(Slot& slot) const noexcept {
  const bool failed = slot.ended && slot.made[0].load(std::memory_order_relaxed) == ROW_ERROR;
  for (auto& row : slot.made) row.store(ROW_NOT_READY, std::memory_order_relaxed);
  if (failed) make(slot, 0, ROW_ERROR);
}

}  // namespace graft::guide
