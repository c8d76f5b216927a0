// State of a request slot in its grammar, and all operations on the slot's matcher.
//
// Node 0 is the last committed token, nodes 1 .. K are the drafts. They form a tree in which the
// parent of a node has a smaller number. Mask row j constrains the token after node j.
//
// A work order (`Order`) is the work that a grammar step has for one slot. The members of a slot
// are grouped by the thread that owns them: the thread that runs the steps, or the thread that
// serves the work order.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "matcher.h"
#include "records/exchange.h"

namespace graft::guide {

constexpr int kMaxNodes = 65;  // node 0, and one draft for each bit of SlotWork::closed

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
  Answer* answer(int slot) const { return record<Answer>(slot, layout.answer); }

  // Returns the ids that follow a record in memory.
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

// Names of the counters of the grammar worker (worker.h). The step's thread and the pool threads
// that serve its work orders count.
// clang-format off
#define GRAFT_GUIDE_COUNTS(COUNT)                                                            \
  COUNT(replays) COUNT(missing_snapshots) COUNT(joins) COUNT(fills) COUNT(accepts)           \
  COUNT(rollbacks) COUNT(commits) COUNT(committed_tokens) COUNT(refused_drafts)              \
  COUNT(terminations) COUNT(dead_ends) COUNT(desyncs) COUNT(errors) COUNT(free_rows)         \
  COUNT(probes) COUNT(probe_misses) COUNT(late_rows) COUNT(budget_stalls) COUNT(forced_rows) \
  COUNT(forced_tokens) COUNT(narrowed_rows) COUNT(closed)
// clang-format on
namespace count {
#define GRAFT_GUIDE_COUNT(name) name,
enum : int { GRAFT_GUIDE_COUNTS(GRAFT_GUIDE_COUNT) kinds };
#undef GRAFT_GUIDE_COUNT
}  // namespace count

// Finds the token to draft where the grammar allows only one continuation of the text (jump-forward
// decoding).
//
// Text is forced if every legal token is a prefix of the longest legal token. The longest token is
// then drafted. With `unique_only`, a token counts as forced only if it is the single legal id.
//
// The forced token depends only on the mask row, which depends only on the output so far. The draft
// is verified like any other, so a target model that prefers another tokenization rejects it. A
// single legal id is always accepted.
//
// Immutable after construction: any number of threads may use it.
class Forced {
 public:
  // `bytes` is the concatenation of all tokens' texts. The text of token i has lengths[i] bytes; 0
  // means that the token has no text. Throws std::invalid_argument unless the lengths add up to the
  // size of `bytes`.
  Forced(const std::vector<uint32_t>& lengths, std::string bytes, bool unique_only);

  // Returns the forced token of a mask row; -1 if there is none.
  int32_t token(const int32_t* row, int64_t words) const noexcept;

 private:
  static constexpr int kMaxPrefixes = 64;  // rows with more legal ids are not examined

  size_t length(int32_t id) const noexcept {
    return at(id) + 1 < starts_.size() ? starts_[at(id) + 1] - starts_[at(id)] : 0;
  }
  const char* text(int32_t id) const noexcept { return bytes_.data() + starts_[at(id)]; }

  std::string bytes_;
  int max_legal_;  // rows with more legal ids force nothing
  std::vector<size_t> starts_;
};

// Tokens that the device committed in one replay. `given` is true if the device has committed
// tokens. `wrong` is true if the device's record is invalid, which is an internal error. The first
// `count` elements of `tokens` are valid; the vector has K + 1 elements.
struct Commit {
  bool given = false;
  bool wrong = false;
  int count = 0;
  std::vector<int32_t> tokens;
};

enum class Task : int32_t {
  kNone,          // process only the commit
  kFillRows,      // fill the mask rows of the last committed token and of all drafts
  kFillRow0,      // fill the mask row of the last committed token
  kFillDraftRow,  // accept draft j and fill row j
  kProbeChain,    // find the first legal candidate for draft j
  kProbeTree,     // find the legal candidates for the nodes of level j
  kProbeLattice,  // find legal drafts among the candidates of all levels
};

// Work order: the work of a slot in one grammar step. It contains copies of all inputs, because the
// device may overwrite the inputs while a thread serves the order.
//
// `j` is the number of the draft or of the tree level that the step works on. For kProbeLattice, it
// is the maximum number of drafts. The tree of the drafts has `drafts` nodes in addition to node
// 0: node i has the token draft[i - 1], the parent parent[i] < i and the depth depth[i].
//
// The vector `candidate` contains the ids to test. For kProbeChain, it is one list of `candidates`
// ids. For kProbeTree, there is one list for each of `candidates` nodes, and for kProbeLattice one
// for each of `candidates` levels; the lists follow each other. For kProbeLattice, `share` has the
// probability of each candidate.
//
// `budget` is the budget of mask row 0, after the tokens of `commit` (NativeMatcher::fill). The
// budget of the row after a draft is smaller by the draft's depth. A draft after which the text
// cannot be complete within the budget counts as illegal.
struct Order {
  Commit commit;
  Task task = Task::kNone;
  int32_t budget = kNoBudget;
  int j = 0;
  int drafts = 0;
  std::vector<int32_t> draft;
  std::vector<int32_t> parent;
  std::vector<int32_t> depth;
  int candidates = 0;
  std::vector<int32_t> candidate;
  std::vector<float> share;
};

// The request that uses a slot, and its progress according to the commit records and drafts that
// the device has written. The thread that runs the steps owns these members, even while another
// thread serves the slot's work order (Slot::busy).
struct Assignment {
  bool joined = false;           // whether a request, this or an earlier one, has used the slot
  int32_t epoch = 0;             // epoch of the request, see Request in worker.h
  int32_t position = 0;          // position of the request's last committed token
  int32_t closing_end = -1;      // see Request in worker.h
  int64_t committed_replay = 0;  // last replay whose commit record was read
  int64_t drafted_replay = 0;    // replay whose drafts follow the last committed token; 0: none
  Commit pending;                // commit that arrived while the slot was busy
  bool outdated = false;  // whether the order being served was written before `pending` arrived
  std::vector<int32_t> stamped;  // state of each mask row in the device's stamps
};

// Mask rows of a slot. The owner of the slot's work writes `forced[j]` and the mask of row j before
// it stores `state[j]` with release order. A step may read `state[j]` at any time. After it has
// read that the row is ready, it may read `forced[j]` and the depth of draft j (Order::depth).
struct Rows {
  std::vector<std::atomic<int32_t>> state;  // ROW_*
  std::vector<int32_t> forced;              // forced token of the row; -1: none
};

// Result of a work order with the task kProbeChain, kProbeTree or kProbeLattice, once it is
// `answered`. `answer` is the legal candidate, or -1 if there is none (chain), the number of nodes
// that have candidates (tree), or the number of drafts (lattice).
struct Probed {
  bool answered = false;
  int32_t answer = -1;
  std::vector<uint32_t> legal;  // tree probe: bitmask of the legal candidates after each node
};

// Processor time and memory that the matcher of a request uses. The slot fails when the
// processor-time clock of the thread that serves its work order reaches `cpu_limit` ns; 0 means no
// limit. As long as monotonic_ns() is below `time_limit`, the order cannot have used up its
// processor time, so the processor-time clock need not be read.
struct Usage {
  int64_t cpu_limit = 0;
  int64_t time_limit = 0;
  int64_t slow_ns = 0;  // processor time of all slow orders of the request
  int64_t memory = 0;   // bytes by which the process has grown during the request's late orders
};

// Work order of a slot, and the state of the slot's matcher. While the slot is busy, the thread
// that serves the order owns all members; otherwise, the thread that runs the steps owns them.
// `index` and `matcher` do not change while the slot is busy, so the thread that runs the steps may
// read these two at any time.
struct SlotWork {
  int index = 0;  // number of the slot
  // Borrowed from the host, which keeps it alive while the snapshot of a replay (worker.h) contains
  // the request, or while the slot is busy. Null if the request is unconstrained.
  NativeMatcher* matcher = nullptr;
  Order order;
  // The matcher is at node `node` of the draft tree: it has accepted `accepted` tokens after node
  // 0. `terminated` says whether the last accepted token ended the text. Bit j - 1 of `closed` is
  // set if no token may follow draft j, because the draft is illegal, is a stop id or leads to a
  // dead end.
  int node = 0;
  int accepted = 0;
  bool terminated = false;
  bool narrowed = false;  // whether the budget has excluded legal tokens from a row of the request
  uint64_t closed = 0;
  // Whether the slot gets no more work orders, because its text is complete, no token is legal, or
  // the matcher has failed with `error`.
  bool ended = false;
  ErrorText error;
  Rows rows;
  int filled_drafts = 0;  // number of drafts of the last kFillRows order; see forced_tokens
  Probed probed;
  std::array<int32_t, count::kinds> tally{};  // counts that the step adds to the worker's counters
  Usage usage;
};

struct Slot {
  void size_for(const Exchange& exchange);

  Assignment assignment;
  SlotWork work;
  // Whether a pool thread owns `work`. The step sets the flag before it posts the order to the
  // pool, and the pool thread clears it after its last access (invariant 7 of worker.h).
  std::atomic<bool> busy{false};

  // `clock` is the processor-time clock of the thread that serves the work order. `cpu_start` is
  // its time when the thread began the order; -1 if no thread has begun it. The thread stores
  // `clock` before `cpu_start`.
  int32_t clock = 0;
  std::atomic<int64_t> cpu_start{-1};
};

// Serves work orders. The class has no mutable state, so threads may serve different slots
// concurrently.
class OrderServer {
 public:
  // `forced` finds forced tokens; null if forced tokens are not drafted. `follow_forced` is true if
  // there is no drafter: the commit step then accepts forced tokens as drafts and fills the rows
  // after them.
  OrderServer(const Exchange& exchange, const Forced* forced, bool follow_forced)
      : exchange_(exchange), forced_(forced), follow_forced_(follow_forced) {}

  void serve(SlotWork& work) const noexcept;
  void fail(SlotWork& work) const noexcept;
  // Fails the slot if its work order has used up its processor time (Usage::cpu_limit). Returns
  // whether the thread that serves the order may continue. Only this thread may call the function,
  // because it reads the processor-time clock of the calling thread.
  bool check_time(SlotWork& work) const noexcept;
  void invalidate_rows(SlotWork& work) const noexcept;

 private:
  void commit(SlotWork& work) const noexcept;
  void fill_rows(SlotWork& work) const noexcept;
  bool fill_row(SlotWork& work, int j) const noexcept;
  bool move_to(SlotWork& work, int j) const noexcept;
  bool step_to(SlotWork& work, int j) const noexcept;
  bool accept(SlotWork& work, int32_t token) const noexcept;
  int accept_all(SlotWork& work, const int32_t* tokens, int count) const noexcept;
  bool fits(SlotWork& work) const noexcept;
  void roll_back(SlotWork& work, int tokens) const noexcept;
  void probe_chain(SlotWork& work) const noexcept;
  void probe_tree(SlotWork& work) const noexcept;
  void probe_lattice(SlotWork& work) const noexcept;
  void fill_mask(SlotWork& work, int j) const noexcept;
  void follow_forced(SlotWork& work) const noexcept;

  Exchange exchange_;
  const Forced* forced_;
  bool follow_forced_;
};

}  // namespace graft::guide
