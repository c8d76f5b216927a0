// LLGuidance's matchers, called through the C symbols that its Python module exports: no GIL.
//
// 1. load() runs once, before the first call; it checks the release, every symbol and the layout of
//    the options, and throws std::runtime_error naming what differs.
// 2. A Tokenizer is read-only once made and shared by its matchers, which keep it alive.
// 3. Each request has a matcher made from the grammar's text, not a clone: clones share lexer
// states
//    under a lock.
// 4. A token that LLGuidance refuses to consume leaves it in an error state for good, so each token
//    is validated first. Stop tokens are never consumed: termination is kept here.
// 5. LLGuidance's own rollback is not used: release 1.9.1 can reuse parser rows of the path that
// was
//    undone and then gives a wrong mask. A state that only moves forward is kept instead, and what
//    is rolled back is a clone of it. The two belong to one request, so their lock is never waited
//    for. Undoing more than was accepted since the last rollback makes the matcher anew.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "matcher.h"

namespace graft::guide::llguidance {

// Loads from the module Python has imported; returns its release.
std::string load(const char* library);

class Tokenizer {
 public:
  // `bytes` of token i are `lengths[i]` long, one after the other; 0: no text. Special tokens are
  // their name behind a byte 0xFF. Any spelling of a text in tokens is legal. Throws
  // std::runtime_error with LLGuidance's reason.
  Tokenizer(const std::vector<uint32_t>& lengths, const std::string& bytes,
            const std::vector<uint32_t>& stop_ids);
  ~Tokenizer();
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;

  const void* get() const { return tokenizer_; }
  int64_t vocab_size() const { return vocab_size_; }
  const std::vector<uint32_t>& stop_ids() const { return stop_ids_; }

 private:
  void* tokenizer_ = nullptr;
  int64_t vocab_size_;
  std::vector<uint32_t> stop_ids_;
};

class Matcher final : public NativeMatcher {
 public:
  // `grammar`: LLGuidance's own JSON form. `stop_ids`: those of this request, no text.
  // Throws std::runtime_error with LLGuidance's reason.
  Matcher(std::shared_ptr<const Tokenizer> tokenizer, const std::string& grammar,
          const std::vector<uint32_t>& stop_ids);

  Answer accept(int32_t token, ErrorText* error) noexcept override;
  Filled fill(int32_t* row, int64_t words, ErrorText* error) noexcept override;
  Answer rollback(int32_t tokens, ErrorText* error) noexcept override;
  Answer is_terminated(ErrorText* error) noexcept override;

 private:
  static constexpr size_t kTail = 256;

  struct Free {
    void operator()(void* matcher) const;
  };
  using Handle = std::unique_ptr<void, Free>;

  Handle make() const;
  static Answer failed(const Handle& handle, ErrorText* error) noexcept;
  Answer catch_up(size_t tokens, ErrorText* error) noexcept;

  std::shared_ptr<const Tokenizer> tokenizer_;
  std::string grammar_;
  std::vector<uint32_t> stop_ids_;
  Handle base_;                    // moves forward only: history_ without its last `tail_` tokens
  Handle live_;                    // the present state
  std::vector<uint32_t> history_;  // every consumed token
  size_t tail_ = 0;
  bool dead_ = false;        // no token is legal: LLGuidance has given up on `live_`
  bool terminated_ = false;  // by a stop token, beyond the consumed ones
};

}  // namespace graft::guide::llguidance
