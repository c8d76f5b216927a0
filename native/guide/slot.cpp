#include "slot.h"

#include <algorithm>

namespace graft::guide {

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
      if (slot.scratch == order.j - 1 && order.j < slot.chain_end) {
        advance(slot, order.j, order.draft[static_cast<size_t>(order.j - 1)]);
      }
      break;
    case Task::kProbe:
      probe(slot);
      break;
  }
}

void SlotWork::commit(Slot& slot) const noexcept {
  const Commit& commit = slot.order.commit;
  if (slot.ended) return;
  roll_back(slot);
  slot.chain_end = INT_MAX;
  if (slot.ended || commit.wrong) {
    slot.tally[count::desyncs] += 1;
    fail(slot);
    return;
  }
  slot.tally[count::commits] += 1;
  for (int i = 0; i < commit.count; ++i) {
    const int32_t token = commit.tokens[static_cast<size_t>(i)];
    if (!accept(slot, token) || !slot.log.append(token)) {
      slot.tally[count::desyncs] += 1;
      fail(slot);
      return;
    }
    slot.tally[count::committed_tokens] += 1;
    if (forced_ != nullptr && i < slot.tested && token == slot.forced[static_cast<size_t>(i)]) {
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
  const Order& order = slot.order;
  const int rows = std::min(order.drafts + 1, slot.chain_end);
  slot.tested = order.drafts;
  int first = 0, end = rows;
  while (first < rows && is_made(slot, first)) ++first;
  while (end > first && is_made(slot, end - 1)) --end;
  if (first < end) {
    if (first < slot.scratch) roll_back(slot);  // probing has accepted drafts without their rows
    if (!slot.ended && !is_made(slot, slot.scratch)) fill(slot, slot.scratch);
    for (int j = slot.scratch + 1; j < std::min(end, slot.chain_end) && !slot.ended; ++j) {
      if (!advance(slot, j, order.draft[static_cast<size_t>(j - 1)])) break;
    }
  }
  roll_back(slot);
}

// Accepts draft j and makes row j. False: no row can follow.
bool SlotWork::advance(Slot& slot, int j, int32_t token) const noexcept {
  if (!accept(slot, token)) {
    slot.chain_end = j;
    slot.tally[count::refused_drafts] += 1;
    return false;
  }
  slot.scratch = j;
  if (slot.terminated) {
    slot.chain_end = j;
    return false;
  }
  if (!is_made(slot, j)) fill(slot, j);
  return !slot.ended && slot.chain_end > j;
}

// Takes forced tokens as drafts, one after the other; the row after the last of K is left to open.
void SlotWork::follow(Slot& slot) const noexcept {
  for (int j = 1; j < shape_.draft_length && !slot.ended && is_made(slot, j - 1); ++j) {
    const int32_t token = slot.forced[static_cast<size_t>(j - 1)];
    if (token < 0 || !advance(slot, j, token)) return;
  }
}

// Accepts the first legal candidate for draft j; where there is none, fills row j - 1, from which
// the device may draw one.
void SlotWork::probe(Slot& slot) const noexcept {
  const Order& order = slot.order;
  for (int i = slot.scratch + 1; i < order.j && i < slot.chain_end; ++i) {  // drawn from a row
    if (!accept(slot, order.draft[static_cast<size_t>(i - 1)])) {
      slot.tally[count::refused_drafts] += 1;
      slot.chain_end = i;
      return;
    }
    slot.scratch = i;
    if (slot.terminated) slot.chain_end = i;
  }
  if (slot.scratch != order.j - 1 || slot.chain_end < order.j) return;
  for (int i = 0; i < order.candidates; ++i) {
    const int32_t id = order.candidate[static_cast<size_t>(i)];
    slot.tally[count::probes] += 1;
    if (!accept(slot, id)) {
      if (slot.ended) return;
      continue;
    }
    slot.scratch = order.j;
    if (slot.terminated) slot.chain_end = order.j;
    slot.answered = true;
    slot.answer = id;
    return;
  }
  slot.tally[count::probe_misses] += 1;
  if (!is_made(slot, order.j - 1)) fill(slot, order.j - 1);
  slot.answered = !slot.ended;
  slot.answer = -1;
}

bool SlotWork::accept(Slot& slot, int32_t token) const noexcept {
  if (slot.ended || slot.terminated || token < 0 || token >= shape_.vocab_size) return false;
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
  const int64_t count = shape_.words();
  int32_t* words = mask_.row(slot.index) + j * count;
  slot.tally[count::fills] += 1;
  int32_t& forced = slot.forced[static_cast<size_t>(j)];
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
  slot.chain_end = std::min(slot.chain_end, j + 1);
  if (j == 0) slot.ended = true;
  make(slot, j, kRowDeadEnd);
}

void SlotWork::roll_back(Slot& slot) const noexcept {
  if (slot.scratch == 0 || slot.ended) return;
  slot.tally[count::rollbacks] += 1;
  if (slot.matcher->rollback(slot.scratch, &slot.error) == Answer::kFailed) fail(slot);
  slot.scratch = 0;
  slot.terminated = false;
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
  return slot.made[static_cast<size_t>(j)].load(std::memory_order_relaxed) != kRowNotReady;
}

void SlotWork::make(Slot& slot, int j, RowState state) noexcept {
  slot.made[static_cast<size_t>(j)].store(state, std::memory_order_release);
}

}  // namespace graft::guide
