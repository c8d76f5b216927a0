// The guided worker: sole owner of advance, fill, probe, commit and rollback of every slot's
// matcher.
//
// Invariants
// 1. Steps run one at a time, in graph order: open, commit, draft 1 .. K, once per replay. The
//    graph's edges order them with the kernels that write `committed`, `drafted` and `candidates`
//    and with those that read `mask`, `row_state` and `answers`.
// 2. A step never allocates, throws, prints, takes the GIL, makes a driver call or drops a
//    reference; nor do the threads that serve its slots. A matcher in Python alone takes the GIL:
//    whoever waits for a step or a thread has released it.
// 3. A step touches only slots its replay's snapshot names. A replay without a snapshot stands
//    down: nothing is written, so verification finds stale stamps and accepts nothing new.
// 4. Stamps and answers are written by the step's own thread, while the step runs. A row's stamp is
//    written after its mask, with release order, and is withdrawn before the state it was made for
//    changes. So nothing becomes ready while a kernel looks.
// 5. An internal error fails one slot (ROW_ERROR); the other slots go on.
// 6. The matcher stands at a node of the drafts' tree (slot.h); stand_at() alone moves it, and it
//    is back at node 0 before anything is committed.
// 7. A slot's work in a step is one order, served by one thread at a time. `busy` hands the slot
//    over: set before the order is posted, cleared with release order after the last touch. With
//    one thread and no budget the step serves the orders itself and hands nothing over. Under a
//    budget it serves those of trusted grammars (Pace), and the order of a replay's only request,
//    whom nobody waits for.
// 8. A slot still busy when the budget ends is late. The budget is of its thread's processor time:
//    waiting for a processor makes nobody late. What it has made so far is stamped; the rest is NOT
//    READY, so the slot sits out, or its round ends at its last ready row. Later steps leave it
//    alone but for one thing: a commit they find is copied (`pending`), because the device
//    overwrites it, and the state being served is then outdated: its stamps are withdrawn and
//    nothing of it is stamped any more. The first step that finds the slot idle takes the result,
//    then goes on from the pending commit. While one is pending no row can be ready, so there is
//    never a second.
// 9. A late slot's matcher is in use although no replay may name it: busy(slot) tells, and
//    wait_idle() waits.
// 10. The requests of a replay belong to the publisher until their `replay` is stored with release
//    order, then to the worker until retire(); publish() refuses to overwrite one that was not
//    retired. Their matchers are borrowed: the publisher keeps the Python references until then.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "pool.h"
#include "slot.h"

namespace graft::guide {

struct Request {
  int32_t slot = 0;
  int32_t epoch = 0;
  int32_t position = 0;              // position of `last` when the request joined
  NativeMatcher* matcher = nullptr;  // null: unconstrained
};

// The requests of one replay, published before it is launched.
struct Snapshot {
  std::atomic<int64_t> replay{0};  // 0: empty; replays count from 1
  std::vector<Request> requests;
};

// Readable from any thread at any time. One thread writes: no read-modify-write is needed.
class Counter {
 public:
  void add(int64_t amount = 1) { value_.store(value() + amount, std::memory_order_relaxed); }
  int64_t value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<int64_t> value_{0};
};

struct Counters {
  Counter of[count::kinds];
  Counter step_calls[3], step_ns[3];  // open, commit, draft
};

// Start and end of each step of the last replays, readable like the counters.
class Timeline {
 public:
  static constexpr size_t kReplays = 256;

  struct Span {
    int64_t replay;
    int step;
    int64_t start_ns;
    int64_t end_ns;
  };

  explicit Timeline(int steps) : steps_(at(steps)), cells_(kReplays * at(steps)) {}

  void record(int64_t replay, int step, int64_t start_ns, int64_t end_ns) {
    Cell& cell = cells_[static_cast<size_t>(replay) % kReplays * steps_ + at(step)];
    cell.replay.store(0, std::memory_order_release);
    std::atomic_thread_fence(std::memory_order_release);
    cell.start.store(start_ns, std::memory_order_relaxed);
    cell.end.store(end_ns, std::memory_order_relaxed);
    cell.replay.store(replay, std::memory_order_release);
  }

  std::vector<Span> read() const {
    std::vector<Span> spans;
    for (size_t i = 0; i < cells_.size(); ++i) {
      const Cell& cell = cells_[i];
      const Span span{cell.replay.load(std::memory_order_acquire), static_cast<int>(i % steps_),
                      cell.start.load(std::memory_order_relaxed),
                      cell.end.load(std::memory_order_relaxed)};
      std::atomic_thread_fence(std::memory_order_acquire);
      // a cell that is being rewritten is left out
      if (span.replay != 0 && cell.replay.load(std::memory_order_relaxed) == span.replay) {
        spans.push_back(span);
      }
    }
    return spans;
  }

 private:
  struct Cell {
    std::atomic<int64_t> replay{0}, start{0}, end{0};
  };
  size_t steps_;
  std::vector<Cell> cells_;
};

// kDraft: after draft j was drawn (mode fill), or before it is, when its candidates are known
// (mode probe).
enum class Step : int32_t { kOpen = 0, kCommit = 1, kDraft = 2 };

class Worker;

// What a host node is handed.
struct StepRecord {
  Worker* worker;
  Step step;
  int32_t draft;  // j of a draft step
};

class Worker {
 public:
  // `threads` serve a step's slots, the step's own among them unless there is a budget.
  // `forced`, or null, and `chain`: see SlotWork.
  Worker(const Exchange& exchange, int ring, int threads, const Budget& budget,
         std::shared_ptr<const Forced> forced, bool chain);
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Called by the publishing thread.
  bool publish(int64_t replay, const std::vector<Request>& requests);
  void retire(int64_t replay);
  StepRecord* record(Step step, int draft);
  bool busy(int slot) const;
  void wait_idle() const;

  // Called by the step functions.
  void run(const StepRecord& record) noexcept;

  const Exchange& exchange() const { return exchange_; }
  const Counters& counters() const { return counters_; }
  const Timeline& timeline() const { return timeline_; }
  // Why a slot failed, once the device has read that it did; empty where its backend did not say.
  std::string error(int slot) const { return slots_[at(slot)].error.text; }
  int busy_slots() const;
  // Whether a step now sleeps until its slots are done: all its orders are posted then.
  bool waiting() const { return pool_ != nullptr && pool_->waiting(); }

 private:
  Snapshot& snapshot(int64_t replay) {
    return snapshots_[static_cast<size_t>(replay) % snapshots_.size()];
  }
  int64_t replay_of(const int32_t& replay) const noexcept;
  void step(const StepRecord& record) noexcept;
  bool give_order(Slot& slot, const StepRecord& record) noexcept;
  void serve() noexcept;
  void join(Slot& slot, const Request& request) noexcept;
  void take_commit(Slot& slot, bool idle, int64_t latest) noexcept;
  void take_drafts(Slot& slot, int64_t of) noexcept;
  bool take_candidates(Slot& slot) noexcept;
  Task draft_task(Slot& slot) noexcept;
  void take_result(Slot& slot) noexcept;
  void count_open(const Slot& slot, const Request& request) noexcept;
  void stamp_rows(Slot& slot) noexcept;
  void stamp_all(Slot& slot, int32_t state) noexcept;
  void stamp(Slot& slot, int j, int32_t state, int32_t position) noexcept;
  bool hands_over(const Slot& slot) const noexcept;
  void serve_timed(Slot& slot) noexcept;
  bool over_budget(const Slot& slot) const noexcept;
  static void serve_posted(void* worker, int slot);

  Exchange exchange_;
  std::shared_ptr<const Forced> forced_;
  SlotWork work_;
  std::vector<Slot> slots_;
  std::vector<Snapshot> snapshots_;  // a ring
  const Snapshot* current_ = nullptr;
  int64_t replay_ = 0;
  std::vector<StepRecord> records_;
  std::vector<int> given_;  // slots with an order in this step
  Counters counters_;
  Timeline timeline_;
  const int threads_;
  const Budget budget_;
  // The last member: its threads end before anything they use.
  std::unique_ptr<Pool, Pool::End> pool_;
};

}  // namespace graft::guide

// The C entry of every guide step: a graph's host node calls it with a StepRecord.
extern "C" void graft_guide_step(void* record);
