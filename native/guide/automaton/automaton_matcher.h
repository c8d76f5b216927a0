// State of one request in the grammar of a machine.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "guide/automaton/rows.h"
#include "guide/matcher.h"

namespace graft::guide {

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

 private:
  struct Accepted {
    Position position;   // after the token
    int32_t stack_size;  // number of stack nodes after the token
  };

  bool is_stop(int32_t token) const noexcept;

  std::shared_ptr<const AutomatonGrammar> grammar_;
  std::vector<int32_t> stop_ids_;
  StackNodes nodes_;
  std::vector<Accepted> path_;  // the start, then one element for each accepted token
  bool terminated_ = false;
};

}  // namespace graft::guide
