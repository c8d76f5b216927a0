// Matchers that run a machine.
#include "guide/automaton/automaton_matcher.h"

#include <algorithm>
#include <string_view>
#include <utility>

namespace graft::guide {
namespace {

// Numbers of accepted tokens and of stack nodes for which memory is allocated in advance.
constexpr size_t kTokens = 4096;
constexpr size_t kStackNodes = 1024;

// Returns whether a state may read all bytes of a token. Special tokens contain no brackets.
bool may_read(const Machine& machine, int32_t state, std::string_view text) {
  for (const char c : text) {
    state = machine.next(state, static_cast<uint8_t>(c));
    if (state < 0) return state != Machine::kDead;
  }
  return true;
}

}  // namespace

AutomatonMatcher::AutomatonMatcher(std::shared_ptr<const AutomatonGrammar> grammar,
                                   std::vector<int32_t> stop_ids)
    : grammar_(std::move(grammar)), stop_ids_(std::move(stop_ids)), nodes_(kStackNodes) {
  path_.reserve(kTokens);
  path_.push_back({{0, kEmptyStack}, 0});
  const Machine& machine = grammar_->machine();
  for (const int32_t stop : stop_ids_) {
    const std::string_view text = text_of(stop);
    for (int32_t i = 0; i < machine.num_states() && !text.empty() && !names_stop_; ++i) {
      names_stop_ = may_read(machine, i, text);
    }
  }
}

int32_t AutomatonMatcher::count() const {
  const bool counts = grammar_->machine().limit(state()) != Machine::kNoLimit;
  return counts ? path_.back().position.count : 0;
}

std::vector<int32_t> AutomatonMatcher::stack() const {
  std::vector<int32_t> entries;
  for (int32_t top = path_.back().position.top; top != kEmptyStack; top = nodes_.node(top).parent) {
    entries.push_back(nodes_.node(top).entry);
  }
  std::reverse(entries.begin(), entries.end());
  return entries;
}

bool AutomatonMatcher::is_stop(int32_t token) const noexcept {
  return std::find(stop_ids_.begin(), stop_ids_.end(), token) != stop_ids_.end();
}

std::string_view AutomatonMatcher::text_of(int32_t token) const noexcept {
  const TokenTrie& trie = grammar_->trie();
  return token >= 0 && token < trie.num_tokens() ? trie.text(token) : std::string_view();
}

bool AutomatonMatcher::ends_with(int32_t token) noexcept {
  Position position = path_.back().position;
  const bool legal = grammar_->walker().read(text_of(token), &position, &nodes_);
  nodes_.truncate(path_.back().stack_size);
  return legal && grammar_->machine().accepting(position.state);
}

Outcome AutomatonMatcher::accept(int32_t token, ErrorText*) noexcept {
  if (terminated_) return Outcome::kNo;
  if (is_stop(token)) {
    if (!grammar_->machine().accepting(state()) && !ends_with(token)) return Outcome::kNo;
    terminated_ = true;
    return Outcome::kYes;
  }
  const std::string_view text = text_of(token);
  Position position = path_.back().position;
  if (text.empty() || !grammar_->walker().read(text, &position, &nodes_)) {
    nodes_.truncate(path_.back().stack_size);
    return Outcome::kNo;
  }
  path_.push_back({position, nodes_.size()});
  return Outcome::kYes;
}

Filled AutomatonMatcher::fill(int32_t* row, int64_t words, int32_t budget,
                              ErrorText* error) noexcept {
  if (words != grammar_->trie().words()) {
    error->keep("the mask row has another width than the vocabulary");
    return Filled::kFailed;
  }
  const Position position = path_.back().position;
  const bool limited = budget != kNoBudget && distance(error) != kUnknownDistance;
  const int32_t limit = limited ? budget - 1 : AutomatonGrammar::kNoLimit;
  const bool narrowed = grammar_->fill(position, &nodes_, limit, row);
  if (grammar_->machine().accepting(position.state) && limit >= 0) {
    for (const int32_t stop : stop_ids_) row[stop >> 5] |= static_cast<int32_t>(1u << (stop & 31));
  } else if (names_stop_) {
    for (const int32_t stop : stop_ids_) {
      if (!ends_with(stop)) row[stop >> 5] &= ~static_cast<int32_t>(1u << (stop & 31));
    }
  }
  return narrowed ? Filled::kNarrowed : Filled::kMask;
}

int32_t AutomatonMatcher::distance(ErrorText*) noexcept {
  if (stop_ids_.empty()) return kUnknownDistance;  // no number of tokens completes the text
  // If the grammar names a stop id, a distance may be that of a text which contains this id,
  // although the id ends the request.
  if (names_stop_ || !grammar_->distances().all_known()) return kUnknownDistance;
  if (terminated_) return 0;
  const int32_t distance = grammar_->distances().of_position(path_.back().position, nodes_);
  return distance < kFar ? distance : kUnknownDistance;
}

Outcome AutomatonMatcher::rollback(int32_t tokens, ErrorText* error) noexcept {
  const auto accepted = static_cast<int32_t>(path_.size()) - 1 + (terminated_ ? 1 : 0);
  if (tokens < 0 || tokens > accepted) {
    error->keep("rollback: more tokens than were accepted");
    return Outcome::kFailed;
  }
  if (tokens > 0 && terminated_) {
    terminated_ = false;
    --tokens;
  }
  path_.resize(path_.size() - at(tokens));
  nodes_.truncate(path_.back().stack_size);
  return Outcome::kYes;
}

}  // namespace graft::guide
