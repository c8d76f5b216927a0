#include "slot.h"

#include <algorithm>
#include <numeric>

namespace graft::guide {

namespace {
size_t at(int index) { return static_cast<size_t>(index); }
}  // namespace

void Slot::size_for(const Exchange& exchange) {
  const auto rows = static_cast<size_t>(exchange.layout.rows);
  stamped.resize(rows);
  closed.resize(rows);
  forced.assign(rows, -1);
  made = std::vector<std::atomic<int32_t>>(rows);
  pending.tokens.resize(rows);
  order.commit.tokens.resize(rows);
  order.draft.resize(rows - 1);
  order.parent.resize(rows);
  std::iota(order.parent.begin(), order.parent.end(), -1);
  order.candidate.resize(static_cast<size_t>(exchange.layout.candidates));
}

void SlotWork::serve(Slot& slot) const noexcept {
  if (slot.order.commit.given) commit(slot);
  if (slot.ended) return;
  const Order& order = slot.order;
  switch (order.task) {
    case Task::kNone:
      break;
    case Task::kRows:
      make_rows(slot);
      break;
    case Task::kRow0:
      if (!is_made(slot, 0)) fill(slot, 0);
      if (chain_) follow(slot);
      break;
    case Task::kDraft:
      if (is_made(slot, order.parent[at(order.j)])) make_row(slot, order.j);
      break;
    case Task::kProbe:
      probe(slot);
      break;
  }
}

void SlotWork::commit(Slot& slot) const noexcept {
  const Commit& commit = slot.order.commit;
  if (slot.ended) return;
  std::fill(slot.closed.begin(), slot.closed.end(), 0);
  if (!stand_at(slot, 0) || commit.wrong) {
    slot.tally[count::desyncs] += 1;
    fail(slot);
    return;
  }
  slot.tally[count::commits] += 1;
  for (int i = 0; i < commit.count; ++i) {
    const int32_t token = commit.tokens[at(i)];
    if (!accept(slot, token)) {
      slot.tally[count::desyncs] += 1;
      fail(slot);
      return;
    }
    slot.tally[count::committed_tokens] += 1;
    if (forced_ != nullptr && i < slot.tested && token == slot.forced[at(i)]) {
      slot.tally[count::forced_tokens] += 1;
    }
  }
  slot.tested = 0;
  if (!slot.terminated) return;
  slot.tally[count::terminations] += 1;
  slot.ended = true;
  // Read only if the device does not know the stop id: it then ends the request, not hangs it.
  make(slot, 0, kRowDeadEnd);
}

// Rows 0 .. v, as far as they can be; the matcher is back at the committed tokens afterwards.
void SlotWork::make_rows(Slot& slot) const noexcept {
  slot.tested = slot.order.drafts;
  for (int j = 0; j <= slot.order.drafts && !slot.ended; ++j) make_row(slot, j);
  stand_at(slot, 0);
}

// Row j, unless it is there; false where there can be none.
bool SlotWork::make_row(Slot& slot, int j) const noexcept {
  if (is_made(slot, j)) return true;
  if (!stand_at(slot, j)) return false;
  fill(slot, j);
  return !slot.ended;
}

// Brings the matcher to node j: back to where the paths part, then down by the drafts. False where
// it cannot get there, or nothing may follow: it then stands at the last node that it reached.
bool SlotWork::stand_at(Slot& slot, int j) const noexcept {
  const std::vector<int32_t>& parent = slot.order.parent;
  if (slot.ended) return false;
  for (int node = j; node != 0; node = parent[at(node)]) {
    if (slot.closed[at(node)] != 0) return false;
  }
  int shared = slot.node, back = 0;
  for (int node = j; shared != node;) {  // a parent's number is the smaller one
    int& deeper = shared > node ? shared : node;
    if (shared > node) ++back;
    deeper = parent[at(deeper)];
  }
  if (back > 0) {
    slot.tally[count::rollbacks] += 1;
    if (slot.matcher->rollback(back, &slot.error) == Answer::kFailed) fail(slot);
    slot.node = shared;
    slot.terminated = false;
  }
  while (!slot.ended && slot.node != j) {
    int next = j;
    while (parent[at(next)] != slot.node) next = parent[at(next)];
    if (accept(slot, slot.order.draft[at(next - 1)])) {
      step_to(slot, next);
    } else {
      slot.closed[at(next)] = 1;
      slot.tally[count::refused_drafts] += 1;
    }
    if (slot.closed[at(next)] != 0) return false;
  }
  return !slot.ended;
}

// The matcher has accepted the token of node j.
void SlotWork::step_to(Slot& slot, int j) const noexcept {
  slot.node = j;
  if (slot.terminated) slot.closed[at(j)] = 1;
}

// Takes forced tokens as drafts, one after the other; the row after the last of K is left to open.
void SlotWork::follow(Slot& slot) const noexcept {
  for (int j = 1; j < exchange_.drafts() && is_made(slot, j - 1); ++j) {
    const int32_t token = slot.forced[at(j - 1)];
    slot.order.draft[at(j - 1)] = token;
    if (token < 0 || !make_row(slot, j)) return;
  }
}

// Accepts the first legal candidate for draft j; where there is none, fills its parent's row, from
// which the device may draw one.
void SlotWork::probe(Slot& slot) const noexcept {
  const Order& order = slot.order;
  const int parent = order.parent[at(order.j)];
  if (!stand_at(slot, parent)) return;
  for (int i = 0; i < order.candidates; ++i) {
    const int32_t id = order.candidate[at(i)];
    slot.tally[count::probes] += 1;
    if (!accept(slot, id)) {
      if (slot.ended) return;
      continue;
    }
    step_to(slot, order.j);
    slot.answered = true;
    slot.answer = id;
    return;
  }
  slot.tally[count::probe_misses] += 1;
  make_row(slot, parent);
  slot.answered = !slot.ended;
  slot.answer = -1;
}

bool SlotWork::accept(Slot& slot, int32_t token) const noexcept {
  if (slot.ended || slot.terminated || token < 0 || token >= exchange_.vocab_size) return false;
  slot.tally[count::accepts] += 1;
  const Answer accepted = slot.matcher->accept(token, &slot.error);
  if (accepted == Answer::kFailed) fail(slot);
  if (accepted != Answer::kYes) return false;
  const Answer terminated = slot.matcher->is_terminated(&slot.error);
  if (terminated == Answer::kFailed) {
    fail(slot);
    return false;
  }
  slot.terminated = terminated == Answer::kYes;
  return true;
}

void SlotWork::fill(Slot& slot, int j) const noexcept {
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
    make(slot, j, kRowFree);
    return;
  }
  int32_t any = 0;
  for (int64_t w = 0; w < count && any == 0;) {  // by blocks, which the compiler vectorises
    for (const int64_t end = std::min(w + 64, count); w < end; ++w) any |= words[w];
  }
  if (any != 0) {
    if (forced_ != nullptr) {
      forced = forced_->token(words, count);
      if (forced >= 0) slot.tally[count::forced_rows] += 1;
    }
    make(slot, j, kRowReady);
    return;
  }
  slot.tally[count::dead_ends] += 1;
  slot.closed[at(j)] = 1;
  if (j == 0) slot.ended = true;
  make(slot, j, kRowDeadEnd);
}

void SlotWork::fail(Slot& slot) const noexcept {
  slot.tally[count::errors] += 1;
  slot.ended = true;
  make(slot, 0, kRowError);
}

// All but an error: it outlives the state it was met in.
void SlotWork::forget_rows(Slot& slot) const noexcept {
  const bool failed = slot.ended && slot.made[0].load(std::memory_order_relaxed) == kRowError;
  for (auto& row : slot.made) row.store(kRowNotReady, std::memory_order_relaxed);
  if (failed) make(slot, 0, kRowError);
}

bool SlotWork::is_made(const Slot& slot, int j) noexcept {
  return slot.made[at(j)].load(std::memory_order_relaxed) != kRowNotReady;
}

void SlotWork::make(Slot& slot, int j, RowState state) noexcept {
  slot.made[at(j)].store(state, std::memory_order_release);
}

}  // namespace graft::guide
