// The guided worker: sole owner of advance, fill, commit and rollback of every slot's matcher.
//
// Invariants
// 1. Steps run one at a time, in graph order: open, commit, draft 1 .. K-1, once per replay. The
//    graph's edges order them with the kernels that write `committed` and `drafted` and with those
//    that read `mask` and `row_state`.
// 2. A step never allocates, throws, prints, takes the GIL, makes a driver call or drops a
// reference.
// 3. A step touches only slots its replay's snapshot names. A replay without a snapshot stands
// down:
//    nothing is written, so verification finds stale stamps and accepts nothing new.
// 4. A row's stamp is written after its mask, with release order, and is withdrawn before the state
//    it was made for changes.
// 5. An internal error fails one slot (ROW_ERROR); the other slots go on.
// 6. Between rounds the matcher stands at the committed tokens plus `scratch` drafts, and `scratch`
//    is rolled back before anything is committed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "counters.h"
#include "matcher.h"
#include "protocol.h"
#include "snapshots.h"
#include "token_log.h"

namespace graft::guide {

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
  Worker(const Exchange& exchange, const Shape& shape, int ring);
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Called by the publishing thread.
  bool publish(int64_t replay, const std::vector<Request>& requests);
  bool retire(int64_t replay) { return snapshots_.retire(replay); }
  StepRecord* record(Step step, int draft);

  // Called by the step functions.
  void run(const StepRecord& record) noexcept;

  const Shape& shape() const { return shape_; }
  const Counters& counters() const { return counters_; }
  const Timeline& timeline() const { return timeline_; }
  const ErrorText& first_error() const { return error_; }
  std::vector<int32_t> history(int slot, int32_t* epoch) const;

 private:
  struct Slot {
    int index = 0;
    bool joined = false;
    int32_t epoch = 0;
    int32_t n = 0;                     // position of the last committed token
    NativeMatcher* matcher = nullptr;  // borrowed; used only under a snapshot that names it
    int scratch = 0;           // drafts the matcher has accepted beyond the committed tokens
    int rows = 0;              // rows 0 .. rows-1 are stamped for the present state
    bool chain_ended = false;  // no row can follow: refused, terminating or dead-end draft
    bool ended = false;        // terminated, dead end or error: the slot is left alone
    bool terminated = false;   // of the matcher, scratch included
    int64_t applied = 0;       // last replay whose commit was considered
    int64_t drafts_of = 0;     // replay whose drafts follow the present state; 0: none
    TokenLog log;
  };

  int64_t replay_of(const int32_t* row) const noexcept;
  void open() noexcept;
  void commit() noexcept;
  void draft(int j) noexcept;

  void join(Slot& slot, const Request& request) noexcept;
  void apply_commit(Slot& slot, int64_t latest) noexcept;
  bool advance(Slot& slot, int j, int32_t token) noexcept;
  bool accept(Slot& slot, int32_t token) noexcept;
  void fill(Slot& slot, int j) noexcept;
  void roll_back(Slot& slot) noexcept;
  void invalidate(Slot& slot) noexcept;
  void fail(Slot& slot) noexcept;
  void stamp(const Slot& slot, int j, RowState state, int32_t position) noexcept;

  Exchange exchange_;
  Shape shape_;
  int64_t mask_words_;
  std::vector<Slot> slots_;
  SnapshotRing snapshots_;
  const Snapshot* current_ = nullptr;
  int64_t replay_ = 0;
  int64_t log_room_;
  std::vector<StepRecord> records_;
  Counters counters_;
  Timeline timeline_;
  ErrorText error_;
};

}  // namespace graft::guide

// The C entry of every guide step: a graph's host node calls it with a StepRecord.
extern "C" void graft_guide_step(void* record);
