// One slot's place in its grammar, and the work on it: whatever touches the slot's matcher.
//
// Drafts are the nodes 1 .. K of a tree whose node 0 is the last committed token; a chain is
// parent[j] = j - 1. Row j masks what may follow node j.
//
// A slot belongs either to the thread that runs the steps ("the step") or, while `busy` is set, to
// the one thread that serves its order. See worker.h for who may do what when.
#pragma once

#include <array>
#include <atomic>
#include <climits>
#include <cstdint>
#include <vector>

#include "counters.h"
#include "forced.h"
#include "matcher.h"
#include "protocol.h"

namespace graft::guide {

// Tokens that the device committed in one replay.
struct Commit {
  bool given = false;
  bool wrong = false;  // a replay or count that cannot be: the slot has lost its place
  int count = 0;
  std::vector<int32_t> tokens;  // [K + 1]
};

enum class Task : int32_t {
  kNone,   // nothing but the commit
  kRows,   // mask rows 0 .. v for the drafts at hand
  kRow0,   // the row after the committed tokens
  kDraft,  // take draft j and make row j
  kProbe,  // find the first legal candidate for draft j
};

// Everything an order needs is copied into it: the device may write on while it is served.
struct Order {
  Commit commit;
  Task task = Task::kNone;
  int j = 0;
  int drafts = 0;               // v
  std::vector<int32_t> draft;   // [K] token of node j at j - 1
  std::vector<int32_t> parent;  // [K + 1] parent[j] < j
  int candidates = 0;
  std::vector<int32_t> candidate;  // [candidates]
};

struct Slot {
  void size_for(const Exchange& exchange);  // its drafts are a chain then

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
  int node = 0;                 // where the matcher stands
  std::vector<uint8_t> closed;  // [K + 1] nodes nothing follows: refused, stop or dead-end drafts
  bool ended = false;           // terminated, dead end or error: the slot is left alone
  bool terminated = false;      // of the matcher, drafts included
  std::vector<int32_t> forced;  // [K + 1] forced token of each row, or -1
  int tested = 0;               // drafts that the rows made last are for
  bool answered = false;        // a probe has its answer
  int32_t answer = -1;
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
  void step_to(Slot& slot, int j) const noexcept;
  bool accept(Slot& slot, int32_t token) const noexcept;
  void probe(Slot& slot) const noexcept;
  void fill(Slot& slot, int j) const noexcept;
  void follow(Slot& slot) const noexcept;
  static bool is_made(const Slot& slot, int j) noexcept;
  static void make(Slot& slot, int j, RowState state) noexcept;

  Exchange exchange_;
  const Forced* forced_;
  bool chain_;
};

}  // namespace graft::guide
