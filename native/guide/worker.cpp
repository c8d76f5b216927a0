#include "worker.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

namespace graft::guide {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;  // maximum number of bytes that one page fault maps

OrderTiming* timing_of(const SlotWork& work) {
  return work.matcher == nullptr ? nullptr : work.matcher->timing.get();
}

// Resident memory of the process in bytes, and number of page faults of the calling thread.
struct Memory {
  int64_t resident = 0;
  int64_t faults = 0;
};

// Reads both members of Memory. `statm` is a descriptor of /proc/self/statm. Allocates nothing.
Memory memory_of_thread(int statm) noexcept {
  Memory memory;
  char text[128] = {};
  if (pread(statm, text, sizeof(text) - 1, 0) > 0) {
    const char* second = std::strchr(text, ' ');
    if (second != nullptr) memory.resident = std::atoll(second) * sysconf(_SC_PAGESIZE);
  }
  rusage usage{};
  if (getrusage(RUSAGE_THREAD, &usage) == 0) memory.faults = usage.ru_minflt + usage.ru_majflt;
  return memory;
}

// Returns the processor time of the calling thread in ns. The result may be up to `age` ns too low:
// reading the clock is a system call, so a reading is used again until it is older than `age`.
int64_t recent_cpu_ns(int64_t now, int64_t age) noexcept {
  thread_local int64_t read_at = 0;
  thread_local int64_t cpu = 0;
  if (read_at == 0 || now - read_at > age) {
    read_at = now;
    cpu = clock_ns(CLOCK_THREAD_CPUTIME_ID);
  }
  return cpu;
}

}  // namespace

Worker::Worker(const Exchange& exchange, int ring, int threads, const Budget& budget,
               std::shared_ptr<const Forced> forced, bool follow_forced)
    : exchange_(exchange),
      forced_(std::move(forced)),
      server_(exchange, forced_.get(), follow_forced),
      slots_(at(exchange.layout.slots)),
      snapshots_(at(ring)),
      timeline_(exchange.drafts() + 2),
      threads_(threads),
      budget_(budget),
      statm_(open("/proc/self/statm", O_RDONLY | O_CLOEXEC)) {
  for (int s = 0; s < exchange_.layout.slots; ++s) {
    Slot& slot = slots_[at(s)];
    slot.work.index = s;
    slot.size_for(exchange_);
    stamp_all(slot, ROW_NOT_READY);
  }
  for (Snapshot& entry : snapshots_) entry.requests.reserve(slots_.size());
  records_.push_back({this, Step::kOpen, 0});
  records_.push_back({this, Step::kCommit, 0});
  for (int j = 1; j <= exchange_.drafts(); ++j) records_.push_back({this, Step::kDraft, j});
  ordered_.reserve(at(exchange_.layout.slots));
  // With a budget, a step does not wait for all work orders: a pool thread may still serve the
  // order of a slot after the step has ended (the slot is late). All slots can be late at the same
  // time, so the pool has one thread per slot. Each step wakes at most `threads` of these threads.
  const int helpers = budget_.ns > 0 ? exchange_.layout.slots : threads_ - 1;
  if (helpers > 0) pool_.reset(new Pool(helpers, exchange_.layout.slots, &serve_posted, this));
}

Worker::~Worker() {
  pool_.reset();  // the threads of the pool read `statm_`
  close(statm_);
}

bool Worker::publish(int64_t replay, int64_t previous, const std::vector<Request>& requests) {
  Snapshot* entry = find_snapshot(0);
  if (entry == nullptr) return false;
  entry->previous = previous;
  entry->requests.assign(requests.begin(), requests.end());
  entry->replay.store(replay, std::memory_order_release);
  return true;
}

void Worker::retire(int64_t replay) {
  Snapshot* entry = find_snapshot(replay);
  if (entry != nullptr) entry->replay.store(0, std::memory_order_release);
}

// Returns the snapshot (the published requests) of a replay. If `replay` is 0, returns a free
// snapshot. Returns null if there is none.
Snapshot* Worker::find_snapshot(int64_t replay) noexcept {
  for (Snapshot& entry : snapshots_) {
    if (entry.replay.load(std::memory_order_acquire) == replay) return &entry;
  }
  return nullptr;
}

// Returns the snapshot of the next replay after `replay_` that has grammar steps; null if it has
// not been published.
const Snapshot* Worker::next_snapshot() const noexcept {
  for (const Snapshot& entry : snapshots_) {
    const int64_t replay = entry.replay.load(std::memory_order_acquire);
    if (replay > replay_ && entry.previous == replay_) return &entry;
  }
  return nullptr;
}

// Returns the full number of a replay. `replay` is the field of a record in which the device has
// written only the lower 32 bits. Of all 64-bit numbers with these lower bits, the function returns
// the one nearest to the current replay.
int64_t Worker::replay_of(const int32_t& replay) const noexcept {
  const uint32_t word = static_cast<uint32_t>(__atomic_load_n(&replay, __ATOMIC_ACQUIRE));
  return replay_ + static_cast<int32_t>(word - static_cast<uint32_t>(replay_));
}

StepRecord* Worker::record(Step step, int draft) {
  return &records_[static_cast<size_t>(static_cast<int>(step) + std::max(draft - 1, 0))];
}

bool Worker::busy(int slot) const { return slots_[at(slot)].busy.load(); }

int Worker::busy_slots() const {
  return static_cast<int>(std::count_if(slots_.begin(), slots_.end(),
                                        [](const Slot& slot) { return slot.busy.load(); }));
}

void Worker::wait_idle() const {
  while (busy_slots() != 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
}

void Worker::run(const StepRecord& record) noexcept {
  const int64_t start = monotonic_ns();
  if (record.step == Step::kOpen) {
    current_ = next_snapshot();
    replay_ = current_ != nullptr ? current_->replay.load(std::memory_order_relaxed) : replay_ + 1;
    counters_.of[count::replays].add();
    if (current_ == nullptr) counters_.of[count::missing_snapshots].add();
  }
  if (current_ != nullptr) step(record);
  const int64_t end = monotonic_ns();
  const int kind = static_cast<int>(record.step);
  counters_.step_calls[kind].add();
  counters_.step_ns[kind].add(end - start);
  timeline_.record(replay_, kind + std::max(record.draft - 1, 0), start, end);
}

// Gives each slot its work order and serves the orders. Then writes for the device which mask rows
// the orders have filled (RowStamp), and which of the tested candidates are legal (Answer).
void Worker::step(const StepRecord& record) noexcept {
  ordered_.clear();
  for (const Request& request : current_->requests) {
    Slot& slot = slots_[at(request.slot)];
    const bool idle = !slot.busy.load();
    if (idle) collect_result(slot);
    if (idle && record.step == Step::kOpen &&
        !(slot.assignment.joined && slot.assignment.epoch == request.epoch)) {
      join(slot, request);
    }
    // If a pool thread still serves the slot's previous request, the new request joins in the first
    // later open step at which the slot is idle.
    if (slot.assignment.epoch != request.epoch) continue;

    // If the draft step chooses the drafts from a lattice of candidates, it also serves requests
    // without a grammar. The snapshot contains such requests only if the drafts are trees.
    const bool lattice = is_lattice_mode(exchange_.layout.mode) && record.step == Step::kDraft;
    if (slot.work.matcher == nullptr && !lattice) continue;
    if (record.step == Step::kOpen) read_commit(slot, idle, replay_ - 1);
    if (record.step == Step::kCommit) read_commit(slot, idle, replay_);
    if (idle && !slot.work.ended && write_order(slot, record)) ordered_.push_back(slot.work.index);
  }
  serve();
  for (const Request& request : current_->requests) {
    Slot& slot = slots_[at(request.slot)];
    if (!slot.busy.load()) {
      collect_result(slot);
    } else if (slot.assignment.epoch == request.epoch && !slot.assignment.outdated) {
      stamp_rows(slot);
    }
    if (record.step == Step::kOpen) count_open(slot, request);
  }
  for (const int index : ordered_) {
    Slot& slot = slots_[at(index)];
    Probed& probed = slot.work.probed;
    if (slot.busy.load() || !probed.answered) continue;
    Answer* answer = exchange_.answer(index);
    const Order& order = slot.work.order;
    const bool lattice = order.task == Task::kProbeLattice;
    *answer = {static_cast<int32_t>(replay_), lattice ? 0 : order.j, probed.answer};
    int32_t* ids = Exchange::ids(answer);
    if (order.task == Task::kProbeTree) std::copy(probed.legal.begin(), probed.legal.end(), ids);
    if (lattice) {
      std::copy_n(order.draft.begin(), order.drafts, ids);
      std::copy_n(order.parent.begin() + 1, order.drafts, ids + exchange_.layout.drafts);
    }
    probed.answered = false;
  }
}

// Writes the slot's work order for this step. Returns whether there is work to do.
bool Worker::write_order(Slot& slot, const StepRecord& record) noexcept {
  Order& order = slot.work.order;
  slot.work.probed.answered = false;
  order.task = Task::kNone;
  order.j = record.draft;
  Commit& pending = slot.assignment.pending;
  order.commit.given = pending.given;
  if (pending.given) std::swap(order.commit, pending);
  pending.given = false;
  const Assignment& assignment = slot.assignment;
  order.budget = kNoBudget;
  if (assignment.closing_end >= 0) order.budget = assignment.closing_end - assignment.position - 1;
  if (record.step == Step::kOpen) {
    read_drafts(slot, slot.assignment.drafted_replay);
    order.task = Task::kFillRows;
  } else if (record.step == Step::kCommit) {
    const bool probing = is_probe_mode(exchange_.layout.mode);
    if (order.commit.given && !probing) order.task = Task::kFillRow0;
  } else {
    order.task = draft_task(slot);
  }
  return !slot.work.ended && (order.task != Task::kNone || order.commit.given);
}

// Copies the inputs of a draft step into the slot's work order and returns the task; kNone if there
// is no work.
Task Worker::draft_task(Slot& slot) noexcept {
  read_drafts(slot, replay_);
  if (slot.assignment.drafted_replay != replay_ && slot.work.matcher != nullptr) return Task::kNone;
  const Order& order = slot.work.order;
  const bool is_next = order.drafts == order.j - 1;
  switch (exchange_.layout.mode) {
    case DRAFT_MODE_CHAIN_PROBE:
      return is_next && read_candidates(slot.work) ? Task::kProbeChain : Task::kNone;
    case DRAFT_MODE_CHAIN_LATTICE:
      return is_next && read_candidates(slot.work) ? Task::kProbeLattice : Task::kNone;
    case DRAFT_MODE_TREE_PROBE:
      return read_candidates(slot.work) ? Task::kProbeTree : Task::kNone;
    case DRAFT_MODE_TREE_LATTICE:
      return read_candidates(slot.work) ? Task::kProbeLattice : Task::kNone;
    default:
      return order.drafts >= order.j ? Task::kFillDraftRow : Task::kNone;
  }
}

// Serves the work orders of this step, each on a pool thread or, if uses_pool() is false for the
// order, on this thread.
void Worker::serve() noexcept {
  const auto pooled_end = std::partition(ordered_.begin(), ordered_.end(), [&](int index) {
    return uses_pool(slots_[at(index)].work);
  });
  const int64_t start = budget_.ns > 0 ? budget_.now() : 0;
  for (auto index = ordered_.begin(); index != pooled_end; ++index) {
    Slot& slot = slots_[at(*index)];
    slot.cpu_start.store(-1, std::memory_order_relaxed);
    slot.busy.store(true);
    pool_->post(*index);
  }
  const int jobs = static_cast<int>(pooled_end - ordered_.begin());
  if (budget_.ns > 0 && jobs > 0) {
    pool_->wake(std::min(threads_, jobs));
  } else if (jobs > 0) {
    pool_->wake(std::min(threads_, jobs) - 1);
    for (int job = pool_->claim(); job >= 0; job = pool_->claim()) serve_posted(this, job);
  }
  for (auto index = pooled_end; index != ordered_.end(); ++index)
    serve_timed(slots_[at(*index)].work);
  if (jobs == 0) return;
  auto unfinished = ordered_.begin();
  const auto done = [&] {
    while (unfinished != pooled_end && !slots_[at(*unfinished)].busy.load()) ++unfinished;
    return unfinished == pooled_end;
  };
  Budget budget = budget_;
  budget.patience_ns = kPatience * budget_.ns;
  if (current_->requests.size() == 1 && budget.ns > 0 && budget.clock == nullptr) {
    budget.ns = slow_ns();
  }
  const auto late = [&] {
    return std::all_of(unfinished, pooled_end, [&](int index) {
      return !slots_[at(index)].busy.load() || over_budget(slots_[at(index)], budget.ns);
    });
  };
  if (pool_->wait(done, late, budget, start)) return;
  counters_.of[count::late_rows].add(std::count_if(
      unfinished, pooled_end, [&](int index) { return slots_[at(index)].busy.load(); }));
}

bool Worker::uses_pool(const SlotWork& work) const noexcept {
  if (pool_ == nullptr) return false;
  if (budget_.ns == 0) return ordered_.size() > 1;
  if (budget_.clock != nullptr) return true;  // the clock of a test does not measure processor time
  const OrderTiming* timing = timing_of(work);
  return timing == nullptr || !timing->trusted();
}

// Serves a work order on this thread, records whether it was in time, and enforces the limits of
// time and memory.
void Worker::serve_timed(SlotWork& work) noexcept {
  work.usage.cpu_limit = 0;
  if (budget_.ns == 0 || budget_.clock != nullptr || work.matcher == nullptr) {
    server_.serve(work);
    return;
  }
  OrderTiming* timing = timing_of(work);
  // A grammar is trusted if enough of its work orders finished within the budget (OrderTiming). Its
  // further orders are expected to be fast, and their memory is not measured.
  const bool measured = timing == nullptr || !timing->trusted();
  const Memory before = measured ? memory_of_thread(statm_) : Memory();
  const int64_t start = monotonic_ns();
  const int64_t cpu_start = recent_cpu_ns(start, budget_.ns / 16);
  const int64_t limit = std::max(slow_ns(), kMaxSlow * slow_ns() - work.usage.slow_ns);
  work.usage.cpu_limit = cpu_start + limit;
  work.usage.time_limit = start + limit;
  server_.serve(work);
  // The processor time cannot exceed the elapsed time, so the processor-time clock is read only if
  // the elapsed time exceeds the budget.
  int64_t taken = monotonic_ns() - start;
  if (taken >= budget_.ns) taken = clock_ns(CLOCK_THREAD_CPUTIME_ID) - cpu_start;
  const bool in_time = taken < budget_.ns;
  if (timing != nullptr) timing->note(in_time);
  if (taken > slow_ns()) work.usage.slow_ns += taken;
  if (in_time || work.ended || !server_.check_time(work) || !measured) return;
  const Memory after = memory_of_thread(statm_);
  const int64_t touched = (after.faults - before.faults) * kHugePage;
  work.usage.memory += std::max<int64_t>(0, std::min(after.resident - before.resident, touched));
  if (work.usage.memory <= kMaxMemory) return;
  work.error.keep("the grammar needs too much memory: its state has grown by more than 256 MiB");
  server_.fail(work);
}

// Returns whether the pool thread that serves the slot's work order has used more processor time
// for it than the budget allows.
bool Worker::over_budget(const Slot& slot, int64_t budget_ns) const noexcept {
  const int64_t start = slot.cpu_start.load(std::memory_order_acquire);
  return start >= 0 && clock_ns(slot.clock) - start >= budget_ns;
}

void Worker::serve_posted(void* worker, int index) {
  auto* self = static_cast<Worker*>(worker);
  Slot& slot = self->slots_[at(index)];
  if (self->budget_.ns > 0) {
    pthread_getcpuclockid(pthread_self(), &slot.clock);
    slot.cpu_start.store(clock_ns(slot.clock), std::memory_order_release);
  }
  self->serve_timed(slot.work);
  slot.busy.store(false);
}

void Worker::join(Slot& slot, const Request& request) noexcept {
  SlotWork& work = slot.work;
  work.ended = work.terminated = work.narrowed = false;
  stamp_all(slot, ROW_NOT_READY);
  server_.invalidate_rows(work);
  counters_.of[count::joins].add();
  Assignment& assignment = slot.assignment;
  assignment.joined = true;
  assignment.epoch = request.epoch;
  assignment.position = request.position;
  assignment.closing_end = request.closing_end;
  assignment.committed_replay = replay_ - 1;  // earlier commits belong to the previous request
  assignment.drafted_replay = 0;
  assignment.pending.given = false;
  work.matcher = request.matcher;
  work.error = ErrorText();
  work.usage = Usage();
  work.node = 0;
  work.accepted = 0;
  work.closed = 0;
  if (work.matcher == nullptr) stamp_all(slot, ROW_FREE);
}

// Reads the tokens that the device has committed to this slot since the last call. They belong to
// replay `latest` or to an earlier replay. A later replay is an internal error, because the worker
// and the device then disagree about the number of the current replay.
void Worker::read_commit(Slot& slot, bool idle, int64_t latest) noexcept {
  Assignment& assignment = slot.assignment;
  Committed* committed = exchange_.committed(slot.work.index);
  const int64_t replay = replay_of(committed->replay);
  if (replay <= assignment.committed_replay) return;
  const int32_t count = committed->count;
  const bool is_valid = replay <= latest;
  if (idle && slot.work.ended) {
    // The slot has failed, but the device has committed more tokens, because it could still use
    // rows that were stamped before the failure. Stamp the error again at the device's new
    // position, because the device ignores rows of other positions.
    if (assignment.stamped[0] == ROW_ERROR && is_valid && count > 0) {
      assignment.committed_replay = replay;
      assignment.position += count;
      stamp(slot, 0, ROW_ERROR, assignment.position);
    }
    return;
  }
  assignment.committed_replay = replay;
  if (count == 0 && is_valid) return;  // the round left out the slot
  stamp_all(slot, ROW_NOT_READY);
  if (idle) {
    server_.invalidate_rows(slot.work);
  } else {
    assignment.outdated = true;
  }
  assignment.drafted_replay = replay;
  // While a commit waits for the slot's matcher (`pending`), none of the slot's mask rows is ready,
  // and the device commits no tokens. A second commit is therefore an error.
  assignment.pending.wrong =
      assignment.pending.given || !is_valid || count < 0 || count > exchange_.layout.rows;
  assignment.pending.given = true;
  if (assignment.pending.wrong) return;
  assignment.pending.count = count;
  assignment.position += count;
  std::copy_n(Exchange::ids(committed), count, assignment.pending.tokens.begin());
}

// Copies the drafts of a replay into the slot's work order if they continue the committed tokens.
void Worker::read_drafts(Slot& slot, int64_t replay) noexcept {
  Drafted* drafted = exchange_.drafted(slot.work.index);
  Order& order = slot.work.order;
  order.drafts = 0;
  if (replay == 0 || slot.assignment.drafted_replay != replay ||
      replay_of(drafted->replay) != replay)
    return;
  const int32_t count = drafted->count;
  const bool growing = order.j > 0 && is_growing_tree_mode(exchange_.layout.mode);
  if (count < 0 || count > (growing ? exchange_.layout.drafts : exchange_.drafts())) {
    server_.fail(slot.work);
    return;
  }
  const int32_t* parents = Exchange::ids(drafted) + exchange_.layout.drafts;
  for (int j = 1; j <= count; ++j) {
    const int32_t parent = parents[j - 1];
    if (parent < 0 || parent >= j) {
      server_.fail(slot.work);
      return;
    }
    order.parent[at(j)] = parent;
    order.depth[at(j)] = order.depth[at(parent)] + 1;
  }
  order.drafts = count;
  std::copy_n(Exchange::ids(drafted), count, order.draft.begin());
}

// Copies the candidates for drafts that the device has written in this replay into the slot's work
// order. Returns false if there are none.
bool Worker::read_candidates(SlotWork& work) noexcept {
  Candidates* record = exchange_.candidates(work.index);
  Order& order = work.order;
  const int32_t count = record->count;
  const ExchangeLayout& layout = exchange_.layout;
  const bool lattice = is_lattice_mode(layout.mode);
  const bool chain = layout.mode == DRAFT_MODE_CHAIN_PROBE;
  int max_count = layout.branch;
  if (lattice) max_count = layout.levels;
  if (chain) max_count = layout.candidates;
  if (replay_of(record->replay) != replay_) return false;
  if (lattice) order.j = record->draft;
  if (record->draft != order.j) return false;
  if (count < 0 || count > max_count || order.j > exchange_.drafts()) {
    server_.fail(work);
    return false;
  }
  order.candidates = count;
  const int32_t* ids = Exchange::ids(record);
  std::copy_n(ids, chain ? count : count * layout.candidates, order.candidate.begin());
  const size_t shares = order.share.size();
  if (shares > 0) std::memcpy(order.share.data(), ids + shares, shares * sizeof(float));
  return true;
}

// Takes over the result of a work order that has been served: adds the order's counts to the
// worker's counters and stamps the mask rows that the order has filled.
void Worker::collect_result(Slot& slot) noexcept {
  for (int i = 0; i < count::kinds; ++i) {
    if (slot.work.tally[at(i)] == 0) continue;
    counters_.of[i].add(slot.work.tally[at(i)]);
    slot.work.tally[at(i)] = 0;
  }
  if (slot.assignment.outdated) server_.invalidate_rows(slot.work);
  slot.assignment.outdated = false;
  if (slot.work.matcher != nullptr) stamp_rows(slot);
}

void Worker::count_open(const Slot& slot, const Request& request) noexcept {
  const bool is_current = slot.assignment.epoch == request.epoch;
  if (is_current && slot.work.matcher == nullptr)
    counters_.of[count::free_rows].add(exchange_.layout.rows);
  const bool ready = is_current && slot.assignment.stamped[0] != ROW_NOT_READY;
  if (slot.busy.load() && !ready) counters_.of[count::budget_stalls].add();
}

// Writes the stamps of those mask rows of the slot whose state (ROW_*) has changed.
void Worker::stamp_rows(Slot& slot) noexcept {
  for (int j = 0; j < exchange_.layout.rows; ++j) {
    const int32_t state = slot.work.rows.state[at(j)].load(std::memory_order_acquire);
    if (state == slot.assignment.stamped[at(j)]) continue;
    stamp(slot, j, state, slot.assignment.position + slot.work.order.depth[at(j)]);
  }
}

void Worker::stamp_all(Slot& slot, int32_t state) noexcept {
  for (int j = 0; j < exchange_.layout.rows; ++j) stamp(slot, j, state, 0);
}

void Worker::stamp(Slot& slot, int j, int32_t state, int32_t position) noexcept {
  slot.assignment.stamped[at(j)] = state;
  RowStamp* row = exchange_.stamp(slot.work.index, j);
  __atomic_store_n(&row->state, ROW_NOT_READY, __ATOMIC_RELEASE);
  row->epoch = slot.assignment.epoch;
  row->position = position;
  row->detail = 0;
  if (state == ROW_FREE && slot.work.matcher == nullptr) row->detail = 1;
  if (state == ROW_READY) row->detail = 1 + slot.work.rows.forced[at(j)];
  __atomic_store_n(&row->state, state, __ATOMIC_RELEASE);
}

}  // namespace graft::guide

extern "C" void graft_guide_step(void* record) {
  const auto* step = static_cast<const graft::guide::StepRecord*>(record);
  step->worker->run(*step);
}
