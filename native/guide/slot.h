// State of a request slot in its grammar, and all operations on the slot's matcher.
//
// Node 0 is the last committed token, nodes 1 .. K are the drafts. They form a tree in which the
// parent of a node has a smaller number. Mask row j constrains the token after node j.
//
// An order is the work that a grammar step has for one slot. A slot is owned by the thread that
// runs the steps or, while `busy` is set, by the thread that serves the slot's order (worker.h).
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "matcher.h"
#include "records/exchange.h"

namespace graft::guide {

constexpr int kMaxNodes = 65;  // `closed` has one bit per draft

inline size_t at(int index) { return static_cast<size_t>(index); }

// Access to the pinned memory that the worker shares with the device, see exchange.h.
struct Exchange {
  int32_t* base = nullptr;
  ExchangeLayout layout{};
  int vocab_size = 0;

  int drafts() const { return layout.rows - 1; }
  RowStamp* stamp(int slot, int j) const { return record<RowStamp>(slot, layout.stamps) + j; }
  int32_t* mask(int slot, int j) const {
    return base + layout.masks + (static_cast<int64_t>(j) * layout.slots + slot) * layout.words;
  }
  Committed* committed(int slot) const { return record<Committed>(slot, layout.committed); }
  Drafted* drafted(int slot) const { return record<Drafted>(slot, layout.drafted); }
  Candidates* candidates(int slot) const { return record<Candidates>(slot, layout.candidate_ids); }
  ::Answer* answer(int slot) const { return record<::Answer>(slot, layout.answer); }

  // Ids that follow a record.
  template <class Record>
  static int32_t* ids(Record* record) {
    return reinterpret_cast<int32_t*>(record + 1);
  }

 private:
  template <class Record>
  Record* record(int slot, int offset) const {
    return reinterpret_cast<Record*>(base + static_cast<int64_t>(slot) * layout.stride + offset);
  }
};

// Counters of the worker and of the threads that serve its orders.
// clang-format off
#define GRAFT_GUIDE_COUNTS(COUNT)                                                            \
  COUNT(replays) COUNT(missing_snapshots) COUNT(joins) COUNT(fills) COUNT(accepts)           \
  COUNT(rollbacks) COUNT(commits) COUNT(committed_tokens) COUNT(refused_drafts)              \
  COUNT(terminations) COUNT(dead_ends) COUNT(desyncs) COUNT(errors) COUNT(free_rows)         \
  COUNT(probes) COUNT(probe_misses) COUNT(late_rows) COUNT(budget_stalls) COUNT(forced_rows) \
  COUNT(forced_tokens)
// clang-format on
namespace count {
#define GRAFT_GUIDE_COUNT(name) name,
enum : int { GRAFT_GUIDE_COUNTS(GRAFT_GUIDE_COUNT) kinds };
#undef GRAFT_GUIDE_COUNT
}  // namespace count

// Finds the token to draft where the grammar allows only one continuation of the text (jump-forward
// decoding).
//
// Text is forced if every legal token is a prefix of the longest one, so that they differ only in
// length. The longest token is drafted. With `unique_only`, a token counts as forced only if it is
// the single legal id. The choice depends only on the mask row, which depends only on the prefix,
// and the draft is verified like any other: a target that prefers another tokenization rejects it.
// A single legal id is always accepted.
//
// Immutable after construction: any number of threads may use it.
class Forced {
 public:
  // `bytes` is the concatenation of all tokens' texts. The text of token i has lengths[i] bytes; 0
  // means that the token has no text. Throws std::invalid_argument unless the lengths add up to the
  // size of `bytes`.
  Forced(const std::vector<uint32_t>& lengths, std::string bytes, bool unique_only);

  // Forced token of a mask row; -1 if there is none.
  int32_t token(const int32_t* row, int64_t words) const noexcept;

 private:
  static constexpr int kMaxPrefixes = 64;  // legal ids of a row that is examined

  size_t length(int32_t id) const noexcept {
    return at(id) + 1 < starts_.size() ? starts_[at(id) + 1] - starts_[at(id)] : 0;
  }
  const char* text(int32_t id) const noexcept { return bytes_.data() + starts_[at(id)]; }

  std::string bytes_;
  int max_legal_;  // rows with more legal ids force nothing
  std::vector<size_t> starts_;
};

// Tokens that the device committed in one replay.
struct Commit {
  bool given = false;  // whether there is a commit
  bool wrong = false;  // internal error: invalid replay or count
  int count = 0;
  std::vector<int32_t> tokens;  // [K + 1]
};

enum class Task : int32_t {
  kNone,          // only the commit
  kFillRows,      // fill the mask rows of the last committed token and of all drafts
  kFillRow0,      // fill the mask row of the last committed token
  kFillDraftRow,  // accept draft j and fill row j
  kProbeChain,    // find the first legal candidate for draft j
  kProbeTree,     // find the legal candidates of the nodes of level j
  kProbeLattice,  // find legal drafts among the candidates of all levels
};

// Work of a slot in one step. An order has copies of all inputs, because the device may overwrite
// the inputs while the order is served.
struct Order {
  Commit commit;
  Task task = Task::kNone;
  int j = 0;                       // number of the draft or level; lattice: maximum drafts
  int drafts = 0;                  // number of drafts
  std::vector<int32_t> draft;      // [K], token of node j at j - 1
  std::vector<int32_t> parent;     // [K + 1], parent[j] < j; unused for node 0
  std::vector<int32_t> depth;      // [K + 1]
  int candidates = 0;              // chain: ids; tree: nodes; lattice: levels
  std::vector<int32_t> candidate;  // [candidates]; tree and lattice: [nodes or levels][candidates]
  std::vector<float> share;        // lattice: probability of each candidate
};

struct Slot {
  void size_for(const Exchange& exchange);

  // Owned by the thread that runs the steps.
  int index = 0;
  bool joined = false;
  int32_t epoch = 0;
  int32_t n = 0;                     // position of the last committed token
  NativeMatcher* matcher = nullptr;  // borrowed; used while a snapshot refers to it, or while busy
  int64_t applied = 0;               // last replay whose commit record was read
  int64_t drafts_of = 0;             // replay whose drafts follow the last committed token; 0: none
  Commit pending;                    // committed while the slot was busy
  bool outdated = false;             // the current order does not include the commit `pending`
  std::vector<int32_t> stamped;      // [K + 1], state of each row in the device's stamps

  // Owned by the thread that serves the order, while `busy` is set.
  Order order;
  int node = 0;                 // node of the draft tree that the matcher is at
  uint64_t closed = 0;          // bit j - 1: node j is an illegal, stop or dead-end draft
  bool ended = false;           // terminated, dead end or error: the slot gets no more orders
  bool terminated = false;      // whether the matcher has terminated, possibly after a draft
  std::vector<int32_t> forced;  // [K + 1], forced token of each row, or -1
  int tested = 0;               // number of drafts when kFillRows ran last
  bool answered = false;        // whether `answer` is the result of a probe
  int32_t answer = -1;
  std::vector<uint32_t> legal;                // [branch], tree: legal candidates of each node
  std::array<int32_t, count::kinds> tally{};  // counts that the step adds to the counters
  ErrorText error;

  // Written by the thread that serves the order, read by the step at any time.
  std::vector<std::atomic<int32_t>> made;  // [K + 1], states of the rows, stored after their masks
  std::atomic<bool> busy{false};
  int32_t clock = 0;                   // processor-time clock of the thread that serves the order
  std::atomic<int64_t> cpu_start{-1};  // `clock` at the start of the order; -1: not started
};

// Serves orders. The class has no mutable state, so threads may serve different slots concurrently.
class SlotWork {
 public:
  // `forced` finds forced tokens; null if forced tokens are not drafted. With `follow_forced`,
  // which is used without a drafter, the commit step accepts forced tokens as drafts and fills the
  // rows after them.
  SlotWork(const Exchange& exchange, const Forced* forced, bool follow_forced)
      : exchange_(exchange), forced_(forced), follow_forced_(follow_forced) {}

  void serve(Slot& slot) const noexcept;
  void fail(Slot& slot) const noexcept;
  void forget_rows(Slot& slot) const noexcept;

 private:
  void commit(Slot& slot) const noexcept;
  void fill_rows(Slot& slot) const noexcept;
  bool fill_row(Slot& slot, int j) const noexcept;
  bool move_to(Slot& slot, int j) const noexcept;
  bool step_to(Slot& slot, int j) const noexcept;
  bool accept(Slot& slot, int32_t token) const noexcept;
  void probe_chain(Slot& slot) const noexcept;
  void probe_tree(Slot& slot) const noexcept;
  void probe_lattice(Slot& slot) const noexcept;
  void fill_mask(Slot& slot, int j) const noexcept;
  void follow_forced(Slot& slot) const noexcept;

  Exchange exchange_;
  const Forced* forced_;
  bool follow_forced_;
};

}  // namespace graft::guide
