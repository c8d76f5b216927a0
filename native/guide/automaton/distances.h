// Numbers of tokens after which a text can be complete.
#pragma once

#include <cstdint>
#include <vector>

#include "guide/automaton/machine.h"
#include "guide/automaton/stack.h"
#include "guide/automaton/token_trie.h"

namespace graft::guide {

// The distance of a state is an upper bound of the number of tokens from the state to the end of
// its rule, including the closing byte. For a state of the root, it includes the stop token. The
// cost of an entry is an upper bound of the number of tokens from the end of the rule that pops the
// entry to the end of the rule that pushed it. The distance D of a position is the distance of its
// state plus the costs of all entries of its stack. It satisfies invariant 4 of matcher.h.
class Distances {
 public:
  Distances(const Machine& machine, const TokenTrie& trie);

  int32_t of_state(int32_t state) const { return states_[at(state)]; }
  int32_t of_entry(int32_t entry) const { return entries_[at(entry)]; }
  int32_t of_position(Position position, const StackNodes& stack) const {
    return add_distances(of_state(position.state), stack.cost(position.top));
  }
  // Whether a distance is known for every position from which tokens can complete the text. If not,
  // a mask row with a budget would exclude the positions without a distance, however large the
  // budget is. The rows of the grammar therefore ignore budgets.
  bool all_known() const { return all_known_; }
  const std::vector<int32_t>& states() const { return states_; }
  const std::vector<int32_t>& entries() const { return entries_; }
  size_t nbytes() const { return (states_.size() + entries_.size()) * sizeof(int32_t); }

 private:
  friend class DistanceSearch;

  std::vector<int32_t> states_;  // kFar: no sequence of tokens was found
  std::vector<int32_t> entries_;
  bool all_known_ = false;
};

}  // namespace graft::guide
