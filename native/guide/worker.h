// Grammar worker for constrained decoding: runs the grammar steps of a round.
//
// A grammar step is a host function in the round's graph. It commits tokens to the matchers of the
// replay's requests, fills their mask rows, or tests candidates for drafts. Each replay has one
// open step, which fills the rows that are still missing; one commit step, which follows
// verification; and up to K draft steps.
//
// Invariants
// 1. Steps never run concurrently. In each replay they run once, in the order open, commit,
//    draft 1 .. K. Edges of the graph order each step after the kernels that write its inputs (the
//    records Committed, Drafted and Candidates of exchange.h), and before the kernels that read its
//    results: mask rows, their stamps (RowStamp) and the answers to tested candidates (Answer).
// 2. A step never throws, prints, takes the GIL, calls the driver or drops a Python reference. It
//    allocates memory only to lengthen a matcher's list of tokens or states, when the output of a
//    request grows beyond 1,024 tokens or a higher power of two. The same holds for the pool
//    threads that serve its slots. Only a matcher that is written in Python takes the GIL. A thread
//    must therefore release the GIL before it waits for a step or a pool thread.
// 3. A step accesses only the slots of its replay's snapshot, the list of requests that the host
//    publishes before the launch. A step of a replay without a snapshot writes nothing;
//    verification then finds outdated stamps and commits nothing.
// 4. Only the thread that runs the step writes stamps and answers. It writes the stamp of a row
//    after the row's mask, with release order. It invalidates the stamps of a slot before the
//    matcher accepts newly committed tokens. No row becomes ready while a kernel reads it.
// 5. An internal error fails one slot (ROW_ERROR) and does not affect others.
// 6. The matcher is always at one node of the draft tree (slot.h): it has accepted the tokens on
//    the path to this node. Before tokens are committed, the matcher is rolled back to node 0.
// 7. The work of a slot in a step is one work order (`Order` in slot.h), served by one thread at a
//    time. The flag `busy` transfers the ownership of Slot::work: the step sets it before it posts
//    the order to the pool, and the pool thread clears it with release order after its last access.
//    Without a time budget, the step's thread takes part in serving the orders, and the step waits
//    for all of them. With a budget, pool threads serve the orders, so that the step need not wait
//    for a slow one. The step's thread then serves only the orders of trusted grammars, whose
//    earlier orders have finished within the budget (OrderTiming).
// 8. With a budget, the step waits for the pool threads until each order has finished or has used
//    the budget, which is processor time: waiting for a processor does not count. If a replay has
//    only one request, waiting delays no other request, so the step waits longer (kSlowFactor). A
//    slot whose order has not finished when the step stops waiting is late. The step stamps the
//    mask rows that are finished. The other rows of the slot are not ready: without row 0, the
//    round leaves out the slot; otherwise, the slot's round ends at its last ready row.
//    Later steps give a late slot no new order until they find it idle. But if the device commits
//    tokens to the slot, they copy these tokens (Assignment::pending), because the device will
//    overwrite them. The order that is being served is then outdated, because it is for the state
//    before these tokens. The step invalidates the slot's stamps and stamps no more rows of this
//    order. The first step that finds the slot idle takes the result and continues with the pending
//    commit. While a commit is pending, none of the slot's rows is ready and the device commits
//    nothing, so there is at most one pending commit.
//    A request fails if its slow orders take too much processor time (kMaxSlow), or if the process
//    grows by too much memory during its late orders (kMaxMemory). A call of a matcher cannot be
//    interrupted, so the request fails when the call returns.
// 9. A pool thread may still use the matcher of a late slot when no replay refers to the slot any
//    more. busy(slot) and wait_idle() tell the host when the matcher is free.
// 10. The snapshot of a replay belongs to the publishing thread until `replay` is stored with
//    release order, and then to the worker until retire(). publish() fails if no snapshot is free.
//    The matchers are borrowed: the publisher keeps their Python objects alive until retire().
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "pool.h"
#include "slot.h"

namespace graft::guide {

// A request of a replay. `epoch` counts the requests that have used the slot so far. `position` is
// the position of the request's last token when it joined the batch. `matcher` is null if the
// request is unconstrained. If mask rows have a budget, the output must be complete before the
// position `closing_end`, and the mask row after the token at position p has the budget
// closing_end - p - 1 (matcher.h). Otherwise, `closing_end` is -1.
struct Request {
  int32_t slot = 0;
  int32_t epoch = 0;
  int32_t position = 0;
  NativeMatcher* matcher = nullptr;
  int32_t closing_end = -1;
};

// Requests of one replay. The host publishes them before it launches the replay. `previous` is the
// last earlier replay whose graph has grammar steps.
struct Snapshot {
  std::atomic<int64_t> replay{0};  // 0: empty; replays count from 1
  int64_t previous = 0;
  std::vector<Request> requests;
};

// A counter that one thread increments and any thread may read.
class Counter {
 public:
  void add(int64_t amount = 1) { value_.store(value() + amount, std::memory_order_relaxed); }
  int64_t value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<int64_t> value_{0};
};

struct Counters {
  Counter of[count::kinds];           // indexed by count::*
  Counter step_calls[3], step_ns[3];  // open, commit, draft
};

// Start and end times of each grammar step of recent replays. One thread writes the times, and any
// thread may read them.
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
      // Skip an entry that is being overwritten.
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

// Kinds of grammar steps. Depending on the draft mode, draft step j either fills mask row j, after
// draft j was sampled, or tests the drafter's candidates for draft j, before draft j is sampled.
enum class Step : int32_t { kOpen = 0, kCommit = 1, kDraft = 2 };

class Worker;

// Argument of the host node that runs a grammar step.
struct StepRecord {
  Worker* worker;
  Step step;
  int32_t draft;  // number j of a draft step; 0 for other steps
};

class Worker {
 public:
  // The work of a slot in a step (a work order) is slow if its processor time exceeds both
  // kSlowFactor times the step's budget and kMinSlowNs. If a replay has only one request, waiting
  // delays no other request, so the step waits for its order until it is slow. Otherwise, the step
  // waits until the budget ends.
  static constexpr int64_t kSlowFactor = 20;
  static constexpr int64_t kMinSlowNs = 100'000'000;
  // A request fails when the total processor time of its slow orders reaches kMaxSlow * slow_ns().
  static constexpr int64_t kMaxSlow = 20;

  // Maximum time, as a multiple of the budget, that a step waits for pool threads that get no
  // processor time.
  static constexpr int64_t kPatience = 200;

  // Number of bytes by which the resident memory may grow during those work orders of a request
  // that exceed the budget. If it grows by more, the request fails.
  static constexpr int64_t kMaxMemory = int64_t{256} << 20;

  // `ring` is the maximum number of replays that are published but not retired. `threads` is the
  // maximum number of threads that serve the slots of one step. Without a budget, the thread that
  // runs the step is one of them. With a budget, it is not: it serves only the orders of trusted
  // grammars (invariant 7). OrderServer describes `forced` and `follow_forced`.
  Worker(const Exchange& exchange, int ring, int threads, const Budget& budget,
         std::shared_ptr<const Forced> forced, bool follow_forced);
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Only the thread that launches the rounds may call publish() and retire(). publish() returns
  // false if all snapshots belong to replays that have not been retired. Replays without grammar
  // steps are not published, so `previous` is the last earlier replay that has grammar steps.
  bool publish(int64_t replay, int64_t previous, const std::vector<Request>& requests);
  void retire(int64_t replay);
  StepRecord* record(Step step, int draft);
  bool busy(int slot) const;
  void wait_idle() const;

  // Runs a grammar step. Called by graft_guide_step().
  void run(const StepRecord& record) noexcept;

  const Exchange& exchange() const { return exchange_; }
  const Counters& counters() const { return counters_; }
  const Timeline& timeline() const { return timeline_; }
  // Error message of a failed slot, which may be empty. Valid once the device has reported the
  // failure.
  std::string error(int slot) const { return slots_[at(slot)].work.error.text; }
  int busy_slots() const;
  // Whether a step is waiting for pool threads. A waiting step has posted all of its orders.
  bool waiting() const { return pool_ != nullptr && pool_->waiting(); }

 private:
  Snapshot* find_snapshot(int64_t replay) noexcept;
  const Snapshot* next_snapshot() const noexcept;
  int64_t replay_of(const int32_t& replay) const noexcept;
  void step(const StepRecord& record) noexcept;
  bool write_order(Slot& slot, const StepRecord& record) noexcept;
  void serve() noexcept;
  void join(Slot& slot, const Request& request) noexcept;
  void read_commit(Slot& slot, bool idle, int64_t latest) noexcept;
  void read_drafts(Slot& slot, int64_t replay) noexcept;
  bool read_candidates(SlotWork& work) noexcept;
  Task draft_task(Slot& slot) noexcept;
  void collect_result(Slot& slot) noexcept;
  void count_open(const Slot& slot, const Request& request) noexcept;
  void stamp_rows(Slot& slot) noexcept;
  void stamp_all(Slot& slot, int32_t state) noexcept;
  void stamp(Slot& slot, int j, int32_t state, int32_t position) noexcept;
  bool uses_pool(const SlotWork& work) const noexcept;
  void serve_timed(SlotWork& work) noexcept;
  int64_t slow_ns() const noexcept { return std::max(kMinSlowNs, kSlowFactor * budget_.ns); }
  bool over_budget(const Slot& slot, int64_t budget_ns) const noexcept;
  static void serve_posted(void* worker, int slot);

  Exchange exchange_;
  std::shared_ptr<const Forced> forced_;
  OrderServer server_;
  std::vector<Slot> slots_;
  std::vector<Snapshot> snapshots_;
  const Snapshot* current_ = nullptr;
  int64_t replay_ = 0;               // current replay
  std::vector<StepRecord> records_;  // records of the steps open, commit, draft 1 .. K
  std::vector<int> ordered_;         // slots with a work order in this step
  Counters counters_;
  Timeline timeline_;
  const int threads_;
  const Budget budget_;
  const int statm_;  // descriptor of /proc/self/statm
  // Must be the last member, because the pool's threads must end before the members that they use
  // are destroyed.
  std::unique_ptr<Pool, Pool::End> pool_;
};

}  // namespace graft::guide

// Host function of every grammar step; its argument is a StepRecord.
extern "C" void graft_guide_step(void* record);
