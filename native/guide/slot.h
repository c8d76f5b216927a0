// One slot's place in its grammar, and the work on it: whatever touches the slot's matcher.
//
// Node 0 is the last committed token, nodes 1 .. K are the drafts: a tree, where each hangs on a
// node of a smaller number. Row j masks what may follow node j.
//
// A slot belongs either to the thread that runs the steps ("the step") or, while `busy` is set, to
// the one thread that serves its order. See worker.h for who may do what when.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "matcher.h"
#include "records/exchange.h"

namespace graft::guide {

constexpr int kMostNodes = 65;  // `closed` has a bit for each draft

inline size_t at(int index) { return static_cast<size_t>(index); }

// The guide's view of the pinned memory that it shares with the device: exchange.h states what lies
// in it.
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

  // The ids that follow a record.
  template <class Record>
  static int32_t* ids(Record* of) {
    return reinterpret_cast<int32_t*>(of + 1);
  }

 private:
  template <class Record>
  Record* record(int slot, int offset) const {
    return reinterpret_cast<Record*>(base + static_cast<int64_t>(slot) * layout.stride + offset);
  }
};

// What is counted, by the worker and by those who serve its orders.
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

// Forced text: the token to draft where a grammar leaves no choice of what to write.
//
// Text is forced where every legal token is a beginning of the longest one: they spell the same
// text and differ in how much of it they take. The longest is drafted, unless only what is certain
// is asked for: then a token counts as forced where it is the one legal id. What is drafted is
// decided by the mask row alone, hence by the prefix alone, and verification tests it as any other
// draft: a target that prefers another spelling refuses it. Where one id is legal it is always
// accepted.
//
// Read-only once made: any number of threads may ask.
class Forced {
 public:
  // `bytes` of token i are `lengths[i]` long, one after the other; 0: no text. Throws
  // std::invalid_argument where they do not add up.
  Forced(const std::vector<uint32_t>& lengths, std::string bytes, bool certain);

  // The forced token of a mask row; -1: there is a choice.
  int32_t token(const int32_t* row, int64_t words) const noexcept;

 private:
  static constexpr int kMost = 64;  // beginnings of one text: there are never many

  size_t length(int32_t id) const noexcept {
    return at(id) + 1 < starts_.size() ? starts_[at(id) + 1] - starts_[at(id)] : 0;
  }
  const char* text(int32_t id) const noexcept { return bytes_.data() + starts_[at(id)]; }

  std::string bytes_;
  int most_;  // legal ids of a row that is looked at
  std::vector<size_t> starts_;
};

// Tokens that the device committed in one replay.
struct Commit {
  bool given = false;
  bool wrong = false;  // a replay or count that cannot be: the slot has lost its place
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

// Everything an order needs is copied into it: the device may write on while it is served.
struct Order {
  Commit commit;
  Task task = Task::kNone;
  int j = 0;                       // of all levels: how many drafts are wanted
  int drafts = 0;                  // v
  std::vector<int32_t> draft;      // [K] token of node j at j - 1
  std::vector<int32_t> parent;     // [K + 1] of each node but 0; parent[j] < j
  std::vector<int32_t> depth;      // [K + 1]
  int candidates = 0;              // of a tree: nodes that have some; of all levels: levels
  std::vector<int32_t> candidate;  // [candidates], of a tree or all levels [..][candidates]
  std::vector<float> share;        // of those of all levels: how likely each is
};

struct Slot {
  void size_for(const Exchange& exchange);

  // The step's own.
  int index = 0;
  bool joined = false;
  int32_t epoch = 0;
  int32_t n = 0;                     // position of the last committed token
  NativeMatcher* matcher = nullptr;  // borrowed; used under a snapshot that names it, or while busy
  int64_t applied = 0;               // last replay whose commit was considered
  int64_t drafts_of = 0;             // replay whose drafts follow the present state; 0: none
  Commit pending;                    // committed while the slot was busy
  bool outdated = false;             // what is being served is for a state that is no more
  std::vector<int32_t> stamped;      // [K + 1] states as the device sees them

  // The server's, handed over with `busy`.
  Order order;
  int node = 0;             // where the matcher stands
  uint64_t closed = 0;      // nodes nothing follows, bit j - 1: refused, stop or dead-end drafts
  bool ended = false;       // terminated, dead end or error: the slot is left alone
  bool terminated = false;  // of the matcher, drafts included
  std::vector<int32_t> forced;  // [K + 1] forced token of each row, or -1
  int tested = 0;               // drafts that the rows made last are for
  bool answered = false;        // a probe has its answer
  int32_t answer = -1;
  std::vector<uint32_t> legal;                // [branch] of a tree: legal candidates of each node
  std::array<int32_t, count::kinds> tally{};  // folded into the counters by the step
  ErrorText error;

  // Written by the server, read by the step at any time.
  std::vector<std::atomic<int32_t>> made;  // [K + 1] states of the rows, stored after their masks
  std::atomic<bool> busy{false};
  int32_t clock = 0;                   // of the serving thread's processor time
  std::atomic<int64_t> cpu_start{-1};  // by that clock, when it began; -1: nobody has yet
};

// Serves orders. Stateless: different slots may be served at once.
class SlotWork {
 public:
  // `forced`: says which rows force a token; null: nobody wants to know. With `chain` forced tokens
  // are followed as soon as they are found: there is no drafter to wait for.
  SlotWork(const Exchange& exchange, const Forced* forced, bool chain)
      : exchange_(exchange), forced_(forced), chain_(chain) {}

  void serve(Slot& slot) const noexcept;
  void fail(Slot& slot) const noexcept;
  void forget_rows(Slot& slot) const noexcept;

 private:
  void commit(Slot& slot) const noexcept;
  void make_rows(Slot& slot) const noexcept;
  bool make_row(Slot& slot, int j) const noexcept;
  bool stand_at(Slot& slot, int j) const noexcept;
  bool step_to(Slot& slot, int j) const noexcept;
  bool accept(Slot& slot, int32_t token) const noexcept;
  void probe(Slot& slot) const noexcept;
  void grow(Slot& slot) const noexcept;
  void walk(Slot& slot) const noexcept;
  void fill(Slot& slot, int j) const noexcept;
  void follow(Slot& slot) const noexcept;

  Exchange exchange_;
  const Forced* forced_;
  bool chain_;
};

}  // namespace graft::guide
