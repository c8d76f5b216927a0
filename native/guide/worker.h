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
//    budget it serves those of trusted grammars (pace.h), and the order of a replay's only request,
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
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "counters.h"
#include "matcher.h"
#include "pool.h"
#include "protocol.h"
#include "slot.h"
#include "snapshots.h"

namespace graft::guide {

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
  bool publish(int64_t replay, const std::vector<Request>& requests) {
    return snapshots_.publish(replay, requests);
  }
  bool retire(int64_t replay) { return snapshots_.retire(replay); }
  StepRecord* record(Step step, int draft);
  bool busy(int slot) const;
  void wait_idle() const;

  // Called by the step functions.
  void run(const StepRecord& record) noexcept;

  const Exchange& exchange() const { return exchange_; }
  const Counters& counters() const { return counters_; }
  const Timeline& timeline() const { return timeline_; }
  std::string first_error() const;
  // Why a slot failed, once the device has read that it did; empty where its backend did not say.
  std::string error(int slot) const { return slots_[static_cast<size_t>(slot)].error.text; }
  int busy_slots() const;
  // Whether a step now sleeps until its slots are done: all its orders are posted then.
  bool waiting() const { return pool_ != nullptr && pool_->waiting(); }

 private:
  int64_t replay_of(const int32_t& replay) const noexcept;
  void step(const StepRecord& record) noexcept;
  bool give_order(Slot& slot, const StepRecord& record) noexcept;
  void serve() noexcept;
  void join(Slot& slot, const Request& request) noexcept;
  void take_commit(Slot& slot, bool idle, int64_t latest) noexcept;
  void take_drafts(Slot& slot, int64_t of) noexcept;
  bool take_candidates(Slot& slot) noexcept;
  void take_result(Slot& slot) noexcept;
  void answer(Slot& slot) noexcept;
  void count_open(const Slot& slot, const Request& request) noexcept;
  void stamp_rows(Slot& slot) noexcept;
  void withdraw(Slot& slot) noexcept;
  void stamp(Slot& slot, int j, int32_t state, int32_t position) noexcept;
  bool hands_over(const Slot& slot) const noexcept;
  void serve_timed(Slot& slot) noexcept;
  bool over_budget(const Slot& slot) const noexcept;
  static void serve_posted(void* worker, int slot);

  Exchange exchange_;
  std::shared_ptr<const Forced> forced_;
  SlotWork work_;
  std::vector<Slot> slots_;
  SnapshotRing snapshots_;
  const Snapshot* current_ = nullptr;
  int64_t replay_ = 0;
  std::vector<StepRecord> records_;
  std::vector<int> given_;  // slots with an order in this step
  Counters counters_;
  Timeline timeline_;
  ErrorText error_;
  std::atomic<bool> has_error_{false};
  const int threads_;
  const Budget budget_;
  std::unique_ptr<Pool, Pool::End>
      pool_;  // the last member: its threads end before anything they use
};

}  // namespace graft::guide

// The C entry of every guide step: a graph's host node calls it with a StepRecord.
extern "C" void graft_guide_step(void* record);
