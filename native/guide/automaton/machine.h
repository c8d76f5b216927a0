// Deterministic automata with a stack, which read the bytes of UTF-8.
//
// A grammar such as a JSON schema is lowered to rules in brackets (expression.h), and the rules are
// compiled to a machine. A byte that opens a rule pushes an *entry* onto the stack, and the byte
// that closes the rule pops it. The entry says where the machine continues. Between these two bytes
// the machine reads the text of the rule. If a text may belong to several rules that begin with the
// same byte, the machine reads it as all of them at the same time. The byte that closes the text
// then has an *exit*: the set of those rules that end with it. The machine continues in the state
// that the entry on top of the stack lists for the exit.
//
// Besides the stack, a machine has one counter, so that the maximum length of a string needs no
// state for each character. In a *counting state*, the machine is within a repetition of a
// character. The byte that ends the character increments the counter, and the next state depends on
// whether the counter has reached the limit of the repetition.
//
// Invariants
// 1. A machine has at most 32,767 states. Machine::compile() throws for larger machines, and limits
//    its own time and memory, so untrusted expressions are safe.
// 2. From every state, the machine can reach the end of the state's rule, whatever the stack holds.
//    A text without a transition is therefore illegal however it continues.
// 3. Only states with an empty stack accept a text.
// 4. A machine is immutable after construction. Invariants 2 and 3 hold for compiled machines;
//    deserialize() checks that all numbers are within their ranges, so that no data can cause
//    accesses outside of the arrays.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "guide/automaton/expression.h"

namespace graft::guide {

class Nfa;

class Machine {
 public:
  // Results of next() other than states: kDead for an illegal byte, and kFirstAction,
  // kFirstAction - 1, ... for actions.
  static constexpr int16_t kDead = -1;
  static constexpr int16_t kFirstAction = -2;
  static constexpr int32_t kMaxStates = INT16_MAX;
  static constexpr int32_t kMaxActions = INT16_MAX - 1;
  // Maximum number of states of the nondeterministic automaton from which a machine is built.
  static constexpr int32_t kMaxNfaStates = 1 << 16;

  // Values of Action.entry for actions that push no entry.
  static constexpr int16_t kPop = -1;
  static constexpr int16_t kCount = -2;
  static constexpr int16_t kReset = -3;
  // Result of limit() for states that are not counting states.
  static constexpr int32_t kNoLimit = INT32_MAX;

  // Pushes, pops and resets set the counter to 0.
  struct Action {
    int16_t entry;   // entry to push, or kPop, kCount or kReset
    int16_t target;  // push, reset: next state; pop: exit; count: index into counts()
  };
  struct Count {
    int32_t limit;
    int16_t below;    // next state if the incremented counter is below the limit
    int16_t reached;  // next state if it has reached the limit
  };
  struct Return {
    int16_t exit;
    int16_t state;
  };
  // Neighbouring classes of bytes with the same result of next().
  struct Run {
    int16_t next;
    int16_t last;  // last class
  };

  // Default of `max_unrolled`. Counting makes a machine smaller, but near a limit of the counter, a
  // state needs a mask row for each value of the counter (see AutomatonGrammar).
  static constexpr int32_t kMaxUnrolled = 200;
  // Value of `max_unrolled` for a grammar whose machine is too large with the default.
  static constexpr int32_t kMinUnrolled = 16;

  // Compiles the rules of a grammar. The machine counts in repetitions of a character whose maximum
  // exceeds their minimum by more than `max_unrolled`, if one counter is enough. Throws
  // std::runtime_error if an expression is malformed, std::length_error if it exceeds a limit, and
  // std::domain_error if the grammar allows no text, or if a byte may open or close a rule and also
  // be another character at the same place. The result has no transition table; see
  // build_table().
  static Machine compile(const std::vector<Rule>& rules, int32_t max_states,
                         int32_t max_unrolled = kMaxUnrolled);
  // Throws AmbiguousCount if one counter is not enough. The result has no transition table.
  static Machine determinize(const Nfa& nfa, int32_t max_states, Work* work);

  // Reads the result of serialize(), and builds the transition table. Throws std::runtime_error if
  // the data is invalid.
  static Machine deserialize(const std::string& data);
  // The machine must have runs.
  std::string serialize() const;

  // Transitions are stored as runs and, for quick access, in a table. A table is much larger than
  // the runs, so it is only built where it is used. The functions next(), of_class() and table()
  // need it.
  void build_table();
  void drop_runs() { runs_ = {}; }

  int32_t num_states() const { return static_cast<int32_t>(accepting_.size()); }
  int32_t num_classes() const { return num_classes_; }
  int32_t num_entries() const { return static_cast<int32_t>(returns_begin_.size()) - 1; }
  bool accepting(int32_t state) const { return accepting_[at(state)] != 0; }
  size_t nbytes() const;

  // Returns the state after a byte, kDead if the byte is illegal, or an action if the byte changes
  // the stack or the counter.
  int16_t next(int32_t state, uint8_t byte) const { return of_class(state, classes_[byte]); }
  int16_t of_class(int32_t state, int32_t byte_class) const {
    return next_[at(state) * at(num_classes_) + at(byte_class)];
  }
  const Action& action(int16_t next) const { return actions_[at(kFirstAction - next)]; }
  // Returns the limit and the next states of a result of next() that increments the counter; null
  // for other results.
  const Count* count(int16_t next) const {
    if (next > kFirstAction || action(next).entry != kCount) return nullptr;
    return &counts_[at(action(next).target)];
  }
  // Returns the smallest limit of the repetitions that the machine is within; kNoLimit if the state
  // is not a counting state.
  int32_t limit(int32_t state) const { return limits_.empty() ? kNoLimit : limits_[at(state)]; }
  // Returns the state after `exit` when `entry` is on top of the stack, or kDead.
  int16_t return_state(int32_t entry, int16_t exit) const {
    for (int32_t i = returns_begin_[at(entry)]; i < returns_begin_[at(entry) + 1]; ++i) {
      if (returns_[at(i)].exit == exit) return returns_[at(i)].state;
    }
    return kDead;
  }

  // Arrays, which the device uses too:
  // [256]: class of each byte.
  const std::vector<uint8_t>& classes() const { return classes_; }
  // Runs of all states. The runs of a state end with the run of the last class.
  const std::vector<Run>& runs() const { return runs_; }
  // [states][classes]: results of of_class().
  const std::vector<int16_t>& table() const { return next_; }
  const std::vector<Action>& actions() const { return actions_; }
  // [entries + 1]: index of the first return of each entry; the last element is their number.
  const std::vector<int32_t>& returns_begin() const { return returns_begin_; }
  // Sorted by exit for each entry.
  const std::vector<Return>& returns() const { return returns_; }
  const std::vector<uint8_t>& accepting() const { return accepting_; }
  const std::vector<Count>& counts() const { return counts_; }
  // [states]: results of limit(); empty if the machine does not count.
  const std::vector<int32_t>& limits() const { return limits_; }

 private:
  friend class Determinizer;

  void check() const;

  int32_t num_classes_ = 0;
  int32_t num_exits_ = 0;
  std::vector<uint8_t> classes_ = std::vector<uint8_t>(256);
  std::vector<Run> runs_;  // state 0 is the start
  std::vector<int16_t> next_;
  std::vector<Action> actions_;
  std::vector<int32_t> returns_begin_ = {0};
  std::vector<Return> returns_;
  std::vector<uint8_t> accepting_;
  std::vector<Count> counts_;
  std::vector<int32_t> limits_;
};

// Thrown if one counter is not enough, for example because a text can be read in two ways that
// count differently.
struct AmbiguousCount : std::length_error {
  AmbiguousCount() : std::length_error("automaton: a repetition is ambiguous") {}
};

}  // namespace graft::guide
