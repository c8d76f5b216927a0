#include "slot.h"

#include <time.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "threads.h"

namespace graft::guide {
namespace {

bool is_filled(const SlotWork& work, int j) noexcept {
  return work.rows.state[at(j)].load(std::memory_order_relaxed) != ROW_NOT_READY;
}

// Publishes the state of mask row j. The caller must already have written the mask.
void set_row(SlotWork& work, int j, int32_t state) noexcept {
  work.rows.state[at(j)].store(state, std::memory_order_release);
}

uint64_t bit(int j) noexcept { return uint64_t{1} << (j - 1); }

// Budget of the mask row at the matcher's node.
int32_t budget_at_node(const SlotWork& work) noexcept {
  return work.order.budget == kNoBudget ? kNoBudget : work.order.budget - work.accepted;
}

// Records that the matcher has moved to node j of the draft tree by accepting draft j.
void enter_node(SlotWork& work, int j) noexcept {
  work.node = j;
  if (work.terminated) work.closed |= bit(j);
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
  const ExchangeLayout& layout = exchange.layout;
  const size_t num_rows = at(layout.rows);
  assignment.stamped.resize(num_rows);
  assignment.pending.tokens.resize(num_rows);
  work.rows.state = std::vector<std::atomic<int32_t>>(num_rows);
  work.rows.forced.assign(num_rows, -1);
  work.probed.legal.resize(at(layout.branch));
  Order& order = work.order;
  order.commit.tokens.resize(num_rows);
  const size_t nodes = at(layout.drafts) + 1;
  order.draft.resize(nodes - 1);
  order.parent.resize(nodes);
  order.depth.resize(nodes);
  for (size_t j = 1; j < nodes; ++j) {  // a chain by default
    order.parent[j] = static_cast<int32_t>(j - 1);
    order.depth[j] = static_cast<int32_t>(j);
  }
  const bool lattice = is_lattice_mode(layout.mode);
  const int lists = lattice ? layout.levels : layout.branch;
  order.candidate.resize(at(layout.candidates * lists));
  if (lattice) order.share.resize(order.candidate.size());
}

void OrderServer::serve(SlotWork& work) const noexcept {
  if (work.order.commit.given) commit(work);
  if (work.ended) return;
  switch (work.order.task) {
    case Task::kNone:
      break;
    case Task::kFillRows:
      fill_rows(work);
      break;
    case Task::kFillRow0:
      if (!is_filled(work, 0)) fill_mask(work, 0);
      if (follow_forced_) follow_forced(work);
      break;
    case Task::kFillDraftRow:
      if (is_filled(work, work.order.j - 1)) fill_row(work, work.order.j);
      break;
    case Task::kProbeChain:
      probe_chain(work);
      break;
    case Task::kProbeTree:
      probe_tree(work);
      break;
    case Task::kProbeLattice:
      probe_lattice(work);
      break;
  }
}

void OrderServer::commit(SlotWork& work) const noexcept {
  const Commit& commit = work.order.commit;
  if (work.ended) return;
  roll_back(work, work.accepted);
  work.node = 0;
  bool in_sync = !work.ended && !commit.wrong;
  work.tally[count::commits] += in_sync;
  if (in_sync) {
    const int accepted = accept_all(work, commit.tokens.data(), commit.count);
    work.tally[count::committed_tokens] += accepted;
    for (int i = 0; forced_ != nullptr && i < std::min(accepted, work.filled_drafts); ++i) {
      work.tally[count::forced_tokens] += commit.tokens[at(i)] == work.rows.forced[at(i)];
    }
    in_sync = accepted == commit.count;
  }
  if (!in_sync) {
    work.tally[count::desyncs] += 1;
    fail(work);
    return;
  }
  work.accepted = 0;  // node 0 is now the last committed token
  work.filled_drafts = 0;
  work.closed = 0;
  if (!work.terminated) return;
  work.tally[count::terminations] += 1;
  work.ended = true;
  // The text has ended with a stop id, at which the device normally ends the request. But if the
  // device has another set of stop ids for the request, it continues, and waits for mask row 0 of
  // the slot in the next round. No further order fills this row, so its state ROW_DEAD_END ends the
  // request.
  set_row(work, 0, ROW_DEAD_END);
}

// Fills the mask rows of node 0 and of all legal drafts in depth-first order, so that the matcher
// accepts common prefixes only once. The matcher returns to node 0.
void OrderServer::fill_rows(SlotWork& work) const noexcept {
  const Order& order = work.order;
  work.filled_drafts = order.drafts;
  int j = 0;
  while (j >= 0 && !work.ended) {
    const bool open = fill_row(work, j);
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
  move_to(work, 0);
}

// Fills mask row j unless it is filled already. Returns false if no token may follow node j.
bool OrderServer::fill_row(SlotWork& work, int j) const noexcept {
  if (is_filled(work, j)) return true;
  if (!move_to(work, j)) return false;
  fill_mask(work, j);
  return !work.ended;
}

// Moves the matcher to node j: rolls back to the common ancestor and accepts the drafts on the path
// from there. Returns false if one of these drafts is illegal or no token may follow node j. The
// matcher then stays at the last node that it has reached.
bool OrderServer::move_to(SlotWork& work, int j) const noexcept {
  const std::vector<int32_t>& parent = work.order.parent;
  if (work.ended) return false;
  for (int node = j; node != 0; node = parent[at(node)]) {
    if ((work.closed & bit(node)) != 0) return false;
  }
  int back = 0;
  // Find the lowest common ancestor. A parent has a smaller number than its children, so the
  // greater of the two nodes is replaced by its parent until both nodes are equal.
  for (int node = j; work.node != node;) {
    int& deeper = work.node > node ? work.node : node;
    back += &deeper == &work.node;
    deeper = parent[at(deeper)];
  }
  roll_back(work, back);
  while (!work.ended && work.node != j) {
    int next = j;
    while (parent[at(next)] != work.node) next = parent[at(next)];
    if (!step_to(work, next)) return false;
  }
  return !work.ended;
}

void OrderServer::roll_back(SlotWork& work, int tokens) const noexcept {
  if (tokens == 0 || work.matcher == nullptr) return;
  work.tally[count::rollbacks] += 1;
  if (work.matcher->rollback(tokens, &work.error) == Outcome::kFailed) fail(work);
  work.accepted -= tokens;
  work.terminated = false;
}

// Accepts draft j, a child of the matcher's node. Returns false if the draft is illegal or no token
// may follow it.
bool OrderServer::step_to(SlotWork& work, int j) const noexcept {
  if (accept(work, work.order.draft[at(j - 1)])) {
    enter_node(work, j);
  } else {
    work.closed |= bit(j);
    work.tally[count::refused_drafts] += 1;
  }
  return (work.closed & bit(j)) == 0;
}

// Accepts forced tokens as drafts one after the other and fills the mask row after each draft. The
// row after draft K, the last possible draft, is not filled here: no draft follows it, so the open
// step of the next replay (invariant 1 of worker.h) fills it before verification.
void OrderServer::follow_forced(SlotWork& work) const noexcept {
  for (int j = 1; j < exchange_.drafts() && is_filled(work, j - 1); ++j) {
    const int32_t token = work.rows.forced[at(j - 1)];
    work.order.draft[at(j - 1)] = token;
    if (token < 0 || !fill_row(work, j)) return;
  }
}

// Accepts the first legal candidate for draft j. If no candidate is legal, fills mask row j - 1,
// under which the device then samples draft j.
void OrderServer::probe_chain(SlotWork& work) const noexcept {
  const Order& order = work.order;
  if (!move_to(work, order.j - 1)) return;
  for (int i = 0; i < order.candidates; ++i) {
    const int32_t id = order.candidate[at(i)];
    work.tally[count::probes] += 1;
    if (!accept(work, id)) {
      if (work.ended) return;
      continue;
    }
    enter_node(work, order.j);
    work.probed.answered = true;
    work.probed.answer = id;
    return;
  }
  work.tally[count::probe_misses] += 1;
  fill_row(work, order.j - 1);
  work.probed.answered = !work.ended;
  work.probed.answer = -1;
}

// Finds the legal candidates for level j of the tree: up to `branch` children of each node of the
// level before. While the device grows the tree level by level, the nodes have other numbers than
// in the final tree. The function therefore clears the bits of `closed` when it returns: they mark
// nodes that no token may follow, by the current numbers.
void OrderServer::probe_tree(SlotWork& work) const noexcept {
  const Order& order = work.order;
  const int branch = exchange_.layout.branch;
  const int max_candidates = exchange_.layout.candidates;
  for (int f = 0; f < branch && !work.ended; ++f) {
    const int32_t* ids = &order.candidate[at(f * max_candidates)];
    work.probed.legal[at(f)] = 0;
    if (f >= order.candidates || ids[0] < 0) continue;
    if (!move_to(work, order.j == 1 ? 0 : (order.j - 2) * branch + f + 1)) continue;
    int found = 0;
    for (int i = 0; i < max_candidates && ids[i] >= 0 && found < branch && !work.ended; ++i) {
      work.tally[count::probes] += 1;
      if (!accept(work, ids[i])) continue;
      ++found;
      work.probed.legal[at(f)] |= uint32_t{1} << i;
      if (work.matcher->rollback(1, &work.error) == Outcome::kFailed) fail(work);
      work.accepted -= 1;
      work.terminated = false;
    }
    work.tally[count::probe_misses] += found == 0;
  }
  move_to(work, 0);
  work.closed = 0;
  work.probed.answered = !work.ended;
  work.probed.answer = order.candidates;
}

// Finds the most likely legal drafts, at most `branch` children per node (similar to DDTree, arXiv
// 2604.12989).
//
// Each node has a list of candidates, most likely first. In each step, the matcher tests the first
// untested candidate of the node for which this candidate's path has the highest probability; of
// equal ones, that of the node with the smallest number. A legal candidate becomes a draft and a
// new node. The steps end when there are Order::j drafts or the maximum number of tests is reached.
// The matcher then returns to node 0.
//
// The probability of a path is the product of the probabilities of its tokens. When the matcher
// rejects a candidate, the probabilities of the other tokens after the same node are scaled up, so
// that their sum remains 1.
void OrderServer::probe_lattice(SlotWork& work) const noexcept {
  struct Node {
    double score;              // probability of the node
    double left = 1.0;         // total probability of the tokens that have not been rejected
    double next_score = -1.0;  // probability of the next candidate's node; -1: no candidate
    int next = 0;              // index of the next candidate
    int children = 0;
  };
  Order& order = work.order;
  const ExchangeLayout& layout = exchange_.layout;
  std::array<Node, kMaxNodes> nodes{{{1.0}}};
  const auto find_next = [&](int j) {
    Node& node = nodes[at(j)];
    node.next_score = -1.0;
    const bool ended = j > 0 && (work.closed & bit(j)) != 0;
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
    if (under.next_score < 0.0 || !move_to(work, best)) break;
    const size_t c = at(order.depth[at(best)] * layout.candidates + under.next++);
    const int j = order.drafts + 1;
    order.draft[at(j - 1)] = order.candidate[c];
    order.parent[at(j)] = best;
    order.depth[at(j)] = order.depth[at(best)] + 1;
    work.tally[count::probes] += 1;
    if (accept(work, order.candidate[c])) {
      enter_node(work, j);
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
      last < std::min(order.candidates, order.j) && (last == 0 || (work.closed & bit(last)) == 0);
  if (layout.mode == DRAFT_MODE_CHAIN_LATTICE && open && !work.ended) {
    work.tally[count::probe_misses] += 1;
    // If mask row `last` forces a token, the device drafts this token next.
    if (forced_ != nullptr) fill_row(work, last);
  }
  move_to(work, 0);
  work.closed = 0;
  work.probed.answered = !work.ended;
  work.probed.answer = order.drafts;
}

bool OrderServer::check_time(SlotWork& work) const noexcept {
  if (work.ended || work.usage.cpu_limit == 0) return !work.ended;
  if (monotonic_ns() < work.usage.time_limit)
    return true;  // saves the system call that reads the processor-time clock
  if (clock_ns(CLOCK_THREAD_CPUTIME_ID) < work.usage.cpu_limit) return true;
  work.error.keep(
      "the grammar is too slow: its matcher took more than 400 times the budget of a step "
      "(grammar_budget_us), and more than 2 s of processor time; use a less ambiguous grammar");
  fail(work);
  return false;
}

// Accepts a draft or a candidate for a draft. Returns false, with the matcher unchanged, if the
// token is illegal or the text could not be complete within the budget after it.
bool OrderServer::accept(SlotWork& work, int32_t token) const noexcept {
  if (accept_all(work, &token, 1) != 1) return false;
  if (fits(work)) return true;
  if (!work.ended) roll_back(work, 1);
  return false;
}

// Returns whether the text can be complete within the budget of the matcher's node.
bool OrderServer::fits(SlotWork& work) const noexcept {
  if (work.matcher == nullptr || work.terminated || work.order.budget == kNoBudget) return true;
  const int32_t distance = work.matcher->distance(&work.error);
  if (distance == kUnknownDistance && work.error.text[0] != '\0') fail(work);
  return !work.ended && (distance == kUnknownDistance || distance <= budget_at_node(work));
}

// Accepts tokens one after the other until one is illegal. Returns the number of accepted tokens.
int OrderServer::accept_all(SlotWork& work, const int32_t* tokens, int count) const noexcept {
  if (work.ended || work.terminated) return 0;
  int size = 0;
  while (size < count && tokens[size] >= 0 && tokens[size] < exchange_.vocab_size) ++size;
  if (work.matcher == nullptr) return size;  // there is no grammar
  if (size == 0 || !check_time(work)) return 0;
  const int accepted = work.matcher->accept_all(tokens, size, &work.error);
  work.tally[count::accepts] += std::max(accepted, 0) + (accepted < size ? 1 : 0);
  if (accepted == 0) return 0;
  Outcome terminated = Outcome::kFailed;
  if (accepted > 0) {
    work.accepted += accepted;
    terminated = work.matcher->is_terminated(&work.error);
  }
  work.terminated = terminated == Outcome::kYes;
  if (terminated != Outcome::kFailed) return accepted;
  fail(work);
  return 0;
}

void OrderServer::fill_mask(SlotWork& work, int j) const noexcept {
  if (!check_time(work)) return;
  const int64_t count = exchange_.layout.words;
  int32_t* words = exchange_.mask(work.index, j);
  work.tally[count::fills] += 1;
  int32_t& forced = work.rows.forced[at(j)];
  forced = -1;
  const Filled filled = work.matcher->fill(words, count, budget_at_node(work), &work.error);
  if (filled == Filled::kFailed) {
    fail(work);
    return;
  }
  if (filled == Filled::kFree) {
    work.tally[count::free_rows] += 1;
    set_row(work, j, ROW_FREE);
    return;
  }
  if (filled == Filled::kNarrowed) {
    work.tally[count::narrowed_rows] += 1;
    work.tally[count::closed] += !work.narrowed;
    work.narrowed = true;
  }
  int32_t any = 0;
  // Test the words in blocks, because the compiler vectorizes the inner loop.
  for (int64_t w = 0; w < count && any == 0;) {
    for (const int64_t end = std::min(w + 64, count); w < end; ++w) any |= words[w];
  }
  if (any != 0) {
    if (forced_ != nullptr) forced = forced_->token(words, count);
    work.tally[count::forced_rows] += forced >= 0;
    set_row(work, j, ROW_READY);
    return;
  }
  work.tally[count::dead_ends] += 1;
  if (j == 0) {
    work.ended = true;
  } else {
    work.closed |= bit(j);
  }
  set_row(work, j, ROW_DEAD_END);
}

void OrderServer::fail(SlotWork& work) const noexcept {
  work.tally[count::errors] += 1;
  work.ended = true;
  set_row(work, 0, ROW_ERROR);
}

// Marks all mask rows of the slot as not ready. If the slot has failed, row 0 keeps ROW_ERROR: a
// failed slot stays failed, whatever tokens are committed.
void OrderServer::invalidate_rows(SlotWork& work) const noexcept {
  const bool failed = work.ended && work.rows.state[0].load(std::memory_order_relaxed) == ROW_ERROR;
  for (auto& row : work.rows.state) row.store(ROW_NOT_READY, std::memory_order_relaxed);
  if (failed) set_row(work, 0, ROW_ERROR);
}

}  // namespace graft::guide
