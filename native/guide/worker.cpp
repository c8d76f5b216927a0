#include "worker.h"

#include <algorithm>

namespace graft::guide {

static_assert(kCommittedReplay == 0 && kDraftedReplay == 0, "replay_of reads the first word");

Worker::Worker(const Exchange& exchange, const Shape& shape, int ring)
    : exchange_(exchange),
      shape_(shape),
      mask_words_(shape.words()),
      slots_(static_cast<size_t>(shape.slots)),
      snapshots_(ring, shape.slots),
      log_room_(static_cast<int64_t>(ring + 1) * shape.rows()),
      timeline_(shape.draft_length + 2) {
  for (int s = 0; s < shape_.slots; ++s) {
    Slot& slot = slots_[static_cast<size_t>(s)];
    slot.index = s;
    for (int j = 0; j < shape_.rows(); ++j) stamp(slot, j, kRowNotReady, 0);
  }
  records_.push_back({this, Step::kOpen, 0});
  records_.push_back({this, Step::kCommit, 0});
  for (int j = 1; j <= shape_.draft_length; ++j) records_.push_back({this, Step::kDraft, j});
}

// The replay number a row starts with. The device counts in 32 bits: take the nearest number.
int64_t Worker::replay_of(const int32_t* row) const noexcept {
  const uint32_t word = static_cast<uint32_t>(__atomic_load_n(row, __ATOMIC_ACQUIRE));
  return replay_ + static_cast<int32_t>(word - static_cast<uint32_t>(replay_));
}

bool Worker::publish(int64_t replay, const std::vector<Request>& requests) {
  for (const Request& request : requests) {
    if (request.matcher != nullptr &&
        !slots_[static_cast<size_t>(request.slot)].log.reserve(log_room_)) {
      return false;
    }
  }
  return snapshots_.publish(replay, requests);
}

StepRecord* Worker::record(Step step, int draft) {
  return &records_[static_cast<size_t>(static_cast<int>(step) + std::max(draft - 1, 0))];
}

std::vector<int32_t> Worker::history(int slot, int32_t* epoch) const {
  return slots_[static_cast<size_t>(slot)].log.read(epoch);
}

void Worker::run(const StepRecord& record) noexcept {
  const int64_t start = monotonic_ns();
  switch (record.step) {
    case Step::kOpen:
      open();
      break;
    case Step::kCommit:
      commit();
      break;
    case Step::kDraft:
      draft(record.draft);
      break;
  }
  const int64_t end = monotonic_ns();
  const int kind = static_cast<int>(record.step);
  counters_.step_calls[kind].add();
  counters_.step_ns[kind].add(end - start);
  timeline_.record(replay_, kind + std::max(record.draft - 1, 0), start, end);
}

void Worker::open() noexcept {
  ++replay_;
  counters_.replays.add();
  current_ = snapshots_.find(replay_);
  if (current_ == nullptr) {
    counters_.missing_snapshots.add();
    return;
  }
  for (const Request& request : current_->requests) {
    Slot& slot = slots_[static_cast<size_t>(request.slot)];
    if (!slot.joined || slot.epoch != request.epoch) join(slot, request);
    if (slot.matcher == nullptr) {  // its rows stay FREE until the slot changes hands
      counters_.free_rows.add(shape_.rows());
      continue;
    }
    // A commit that no commit step has seen: graphs without one leave it to the next open.
    apply_commit(slot, replay_ - 1);
    if (slot.ended) continue;
    if (slot.rows == 0) fill(slot, 0);

    const int32_t* drafted = exchange_.drafted.row(slot.index);
    if (slot.drafts_of != 0 && replay_of(drafted) == slot.drafts_of) {
      const int32_t v = drafted[kDraftedCount];
      if (v < 0 || v > shape_.draft_length) fail(slot);
      for (int j = 1; j <= v && !slot.ended && !slot.chain_ended && slot.rows <= v; ++j) {
        if (!advance(slot, j, drafted[kDraftedTokens + j - 1])) break;
      }
    }
    roll_back(slot);
  }
}

void Worker::commit() noexcept {
  if (current_ == nullptr) return;
  for (const Request& request : current_->requests) {
    Slot& slot = slots_[static_cast<size_t>(request.slot)];
    if (slot.matcher != nullptr) apply_commit(slot, replay_);
  }
}

void Worker::draft(int j) noexcept {
  if (current_ == nullptr) return;
  for (const Request& request : current_->requests) {
    Slot& slot = slots_[static_cast<size_t>(request.slot)];
    if (slot.matcher == nullptr || slot.ended || slot.chain_ended) continue;
    const int32_t* drafted = exchange_.drafted.row(slot.index);
    if (slot.drafts_of != replay_ || replay_of(drafted) != replay_) continue;
    if (drafted[kDraftedCount] < j || slot.scratch != j - 1) continue;
    advance(slot, j, drafted[kDraftedTokens + j - 1]);
  }
}

void Worker::join(Slot& slot, const Request& request) noexcept {
  invalidate(slot);
  counters_.joins.add();
  slot.joined = true;
  slot.epoch = request.epoch;
  slot.n = request.position;
  slot.matcher = request.matcher;
  slot.scratch = 0;
  slot.chain_ended = slot.ended = slot.terminated = false;
  slot.applied = replay_ - 1;  // what is committed up to now was the previous owner's
  slot.drafts_of = 0;
  slot.log.restart(request.epoch);
  if (slot.matcher == nullptr) {
    for (int j = 0; j < shape_.rows(); ++j) stamp(slot, j, kRowFree, 0);
    slot.rows = shape_.rows();
  }
}

// Applies what the device has committed for this slot since the last time. The stamp is that of a
// replay up to `latest`; a later one means that worker and device count replays differently.
void Worker::apply_commit(Slot& slot, int64_t latest) noexcept {
  const int32_t* committed = exchange_.committed.row(slot.index);
  const int64_t replay = replay_of(committed);
  if (replay <= slot.applied || slot.ended) return;
  const int32_t count = committed[kCommittedCount];
  slot.applied = replay;
  if (count == 0 && replay <= latest) return;  // the slot sat the round out
  roll_back(slot);
  invalidate(slot);
  slot.drafts_of = replay;
  if (slot.ended || replay > latest || count < 0 || count > shape_.rows()) {
    counters_.desyncs.add();
    fail(slot);
    return;
  }
  slot.n += count;
  counters_.commits.add();
  for (int i = 0; i < count; ++i) {
    const int32_t token = committed[kCommittedTokens + i];
    if (!accept(slot, token) || !slot.log.append(token)) {
      counters_.desyncs.add();
      fail(slot);
      return;
    }
    counters_.committed_tokens.add();
  }
  if (slot.terminated) {
    counters_.terminations.add();
    slot.ended = true;
    // Read only if the device does not know the stop id: it then ends the request, not hangs it.
    stamp(slot, 0, kRowDeadEnd, slot.n);
    return;
  }
  fill(slot, 0);
}

// Accepts draft j unless that was done before, and makes row j. False: no row can follow.
bool Worker::advance(Slot& slot, int j, int32_t token) noexcept {
  if (slot.scratch < j) {
    if (!accept(slot, token)) {
      slot.chain_ended = true;
      counters_.refused_drafts.add();
      return false;
    }
    slot.scratch = j;
  }
  if (slot.terminated) {
    slot.chain_ended = true;
    return false;
  }
  if (slot.rows <= j) fill(slot, j);
  return !slot.ended && !slot.chain_ended;
}

bool Worker::accept(Slot& slot, int32_t token) noexcept {
  if (slot.ended || slot.terminated || token < 0 || token >= shape_.vocab_size) return false;
  counters_.accepts.add();
  const Answer accepted = slot.matcher->accept(token, &error_);
  if (accepted == Answer::kFailed) fail(slot);
  if (accepted != Answer::kYes) return false;
  const Answer terminated = slot.matcher->is_terminated(&error_);
  if (terminated == Answer::kFailed) {
    fail(slot);
    return false;
  }
  slot.terminated = terminated == Answer::kYes;
  return true;
}

void Worker::fill(Slot& slot, int j) noexcept {
  int32_t* words = exchange_.mask.row(slot.index) + j * mask_words_;
  counters_.fills.add();
  const Filled filled = slot.matcher->fill(words, mask_words_, &error_);
  if (filled == Filled::kFailed) {
    fail(slot);
    return;
  }
  slot.rows = j + 1;
  if (filled == Filled::kFree) {
    counters_.free_rows.add();
    stamp(slot, j, kRowFree, slot.n + j);
    return;
  }
  int32_t any = 0;
  for (int64_t w = 0; w < mask_words_; ++w) any |= words[w];
  if (any != 0) {
    stamp(slot, j, kRowReady, slot.n + j);
    return;
  }
  counters_.dead_ends.add();
  stamp(slot, j, kRowDeadEnd, slot.n + j);
  slot.chain_ended = true;
  if (j == 0) slot.ended = true;
}

void Worker::roll_back(Slot& slot) noexcept {
  if (slot.scratch == 0 || slot.ended) return;
  counters_.rollbacks.add();
  if (slot.matcher->rollback(slot.scratch, &error_) == Answer::kFailed) fail(slot);
  slot.scratch = 0;
  slot.terminated = false;
}

void Worker::invalidate(Slot& slot) noexcept {
  for (int j = 0; j < shape_.rows(); ++j) stamp(slot, j, kRowNotReady, 0);
  slot.rows = 0;
  slot.chain_ended = false;
}

void Worker::fail(Slot& slot) noexcept {
  counters_.errors.add();
  slot.ended = true;
  stamp(slot, 0, kRowError, slot.n);
}

void Worker::stamp(const Slot& slot, int j, RowState state, int32_t position) noexcept {
  int32_t* row = exchange_.row_state.row(slot.index) + j * kRowStateWords;
  __atomic_store_n(row, kRowNotReady, __ATOMIC_RELEASE);
  row[1] = slot.epoch;
  row[2] = position;
  row[3] = 0;
  __atomic_store_n(row, state, __ATOMIC_RELEASE);
}

}  // namespace graft::guide

extern "C" void graft_guide_step(void* record) {
  const auto* step = static_cast<const graft::guide::StepRecord*>(record);
  step->worker->run(*step);
}
