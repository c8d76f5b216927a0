// State of one request in the grammar of a machine.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "guide/automaton/rows.h"
#include "guide/matcher.h"

namespace graft::guide {

// The grammar may name a special token that is a stop id of the request. As in LLGuidance's
// matcher, such a token is legal only where the text may end before or after it, because it ends
// the request.
class AutomatonMatcher final : public NativeMatcher {
 public:
  AutomatonMatcher(std::shared_ptr<const AutomatonGrammar> grammar, std::vector<int32_t> stop_ids);

  Outcome accept(int32_t token, ErrorText* error) noexcept override;
  Filled fill(int32_t* row, int64_t words, int32_t budget, ErrorText* error) noexcept override;
  int32_t distance(ErrorText* error) noexcept override;
  Outcome rollback(int32_t tokens, ErrorText* error) noexcept override;
  Outcome is_terminated(ErrorText*) noexcept override {
    return terminated_ ? Outcome::kYes : Outcome::kNo;
  }

  const std::shared_ptr<const AutomatonGrammar>& grammar() const { return grammar_; }
  // State of the machine after the accepted tokens. A stop token does not change it.
  int32_t state() const { return path_.back().position.state; }
  // Value of the counter; 0 if the state does not count.
  int32_t count() const;
  // Entries of the stack, the top last.
  std::vector<int32_t> stack() const;
  // Whether the grammar may name a stop id.
  bool names_stop() const { return names_stop_; }

 private:
  struct Accepted {
    Position position;   // after the token
    int32_t stack_size;  // number of stack nodes after the token
  };

  bool is_stop(int32_t token) const noexcept;
  // Returns the bytes of a token; none if the token is not in the trie.
  std::string_view text_of(int32_t token) const noexcept;
  // Returns whether the text may end after a token.
  bool ends_with(int32_t token) noexcept;

  std::shared_ptr<const AutomatonGrammar> grammar_;
  std::vector<int32_t> stop_ids_;
  StackNodes nodes_;
  std::vector<Accepted> path_;  // the start, then one element for each accepted token
  bool names_stop_ = false;
  bool terminated_ = false;
};

}  // namespace graft::guide
