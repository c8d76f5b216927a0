// States in which the characters of text tokens are legal.
#pragma once

#include <cstdint>
#include <vector>

#include "guide/automaton/distances.h"
#include "guide/automaton/machine.h"

namespace graft::guide {

// Finds the states of a machine in which text tokens (see TokenTrie) are legal together, so that
// mask rows need not visit these tokens one by one. In the following, a character is any character
// that text tokens may contain. The results hold as long as the counter reaches no limit.
class TextStates {
 public:
  static constexpr int16_t kSeveral = INT16_MIN;

  TextStates(const Machine& machine, const Distances& distances);

  // Returns the result of Machine::next() for the last byte of any character: a state, a count, or
  // kDead if all characters are illegal. Returns kSeveral if the results differ.
  int16_t successor(int32_t state) const { return successor_[at(state)]; }
  // Returns the largest distance after one or more characters, whichever they are, or -1 if a
  // sequence of characters is illegal. It is -1 for states within a character.
  int32_t any_text_distance(int32_t state) const { return any_text_distance_[at(state)]; }
  size_t nbytes() const {
    return successor_.size() * sizeof(int16_t) + any_text_distance_.size() * sizeof(int32_t);
  }

 private:
  std::vector<int16_t> successor_;
  std::vector<int32_t> any_text_distance_;
};

}  // namespace graft::guide
