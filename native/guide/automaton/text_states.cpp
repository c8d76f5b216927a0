// Search for the states in which text tokens are legal together.
#include "guide/automaton/text_states.h"

#include <algorithm>
#include <array>

namespace graft::guide {
namespace {

// Maximum number of results per state. Untrusted grammars can have states with hundreds of
// thousands of results, because their characters lead through different states. Such a state is
// treated as if a character were illegal and characters led to several states, which is slower but
// not wrong.
constexpr int kMaxTargets = 1024;

// A set of characters: those that have one byte from each range, in order.
struct Form {
  int length;
  std::array<ByteRange, 4> bytes;
};

constexpr ByteRange kTail = {0x80, 0xBF};
constexpr std::array<Form, 11> kForms = {{
    {1, {{{0x20, 0x21}}}},
    {1, {{{0x23, 0x5B}}}},
    {1, {{{0x5D, 0x7E}}}},
    {2, {{{0xC2, 0xDF}, kTail}}},
    {3, {{{0xE0, 0xE0}, {0xA0, 0xBF}, kTail}}},
    {3, {{{0xE1, 0xEC}, kTail, kTail}}},
    {3, {{{0xED, 0xED}, {0x80, 0x9F}, kTail}}},
    {3, {{{0xEE, 0xEF}, kTail, kTail}}},
    {4, {{{0xF0, 0xF0}, {0x90, 0xBF}, kTail, kTail}}},
    {4, {{{0xF1, 0xF3}, kTail, kTail, kTail}}},
    {4, {{{0xF4, 0xF4}, {0x80, 0x8F}, kTail, kTail}}},
}};

// Calls visit(next) for the characters of a form, of which the first `index` bytes have led to
// `state`. `next` is the state after the character, kDead, or the action of one of its bytes; an
// action that counts before the last byte is passed as kDead. Neighbouring bytes that lead to the
// same state count as one. The call ends and returns false if visit() returns false.
template <typename Visit>
bool visit_targets(const Machine& machine, int32_t state, const Form& form, int index,
                   Visit visit) {
  const ByteRange range = form.bytes[at(index)];
  const int first = machine.classes()[range.low];
  for (int c = first; c <= machine.classes()[range.high]; ++c) {
    int16_t next = machine.of_class(state, c);
    if (c > first && next == machine.of_class(state, c - 1)) continue;
    const bool is_last = next < 0 || index + 1 == form.length;
    if (index + 1 < form.length && machine.count(next) != nullptr) next = Machine::kDead;
    if (is_last ? !visit(next) : !visit_targets(machine, next, form, index + 1, visit))
      return false;
  }
  return true;
}

}  // namespace

TextStates::TextStates(const Machine& machine, const Distances& distances) {
  const int32_t states = machine.num_states();
  successor_.assign(at(states), kSeveral);
  any_text_distance_.assign(at(states), -1);
  struct Candidate {  // a state in which every character is legal
    int32_t state;
    std::vector<int16_t> targets;
  };
  std::vector<Candidate> candidates;
  std::vector<int16_t> targets;
  for (int32_t state = 0; state < states; ++state) {
    const int16_t first = machine.next(state, ' ');
    int count = 0;
    // Whether all characters lead to `first`.
    bool is_same = first >= Machine::kDead || machine.count(first) != nullptr;
    bool is_legal = true;
    targets.clear();
    const auto visit = [&](int16_t next) {
      const bool is_limited = ++count <= kMaxTargets;
      is_same = is_same && is_limited && next == first;
      if (const Machine::Count* counted = machine.count(next)) {
        next = counted->below;
      }
      is_legal = is_legal && is_limited && next >= 0;
      if (targets.empty() || targets.back() != next) targets.push_back(next);
      return is_same || is_legal;
    };
    std::all_of(kForms.begin(), kForms.end(),
                [&](const Form& form) { return visit_targets(machine, state, form, 0, visit); });
    if (is_same) successor_[at(state)] = first;
    if (is_legal) candidates.push_back({state, targets});
  }
  // A state belongs to `any_text` (all text is legal in it) if every character leads to a state
  // that belongs to it too. The first loop removes the other candidates, and the second one
  // computes the results of any_text_distance(). Both begin with the last state, because most
  // states lead to states with greater numbers.
  std::vector<bool> any_text(at(states));
  for (const Candidate& candidate : candidates) any_text[at(candidate.state)] = true;
  for (bool changed = true; changed;) {
    changed = false;
    for (auto it = candidates.rbegin(); it != candidates.rend(); ++it) {
      if (!any_text[at(it->state)]) continue;
      if (std::all_of(it->targets.begin(), it->targets.end(),
                      [&](int16_t next) { return any_text[at(next)]; })) {
        continue;
      }
      any_text[at(it->state)] = false;
      changed = true;
    }
  }
  for (bool changed = true; changed;) {
    changed = false;
    for (auto it = candidates.rbegin(); it != candidates.rend(); ++it) {
      if (!any_text[at(it->state)]) continue;
      int32_t largest = any_text_distance_[at(it->state)];
      for (const int16_t next : it->targets) {
        largest = std::max({largest, distances.of_state(next), any_text_distance_[at(next)]});
      }
      changed = changed || largest != any_text_distance_[at(it->state)];
      any_text_distance_[at(it->state)] = largest;
    }
  }
}

}  // namespace graft::guide
