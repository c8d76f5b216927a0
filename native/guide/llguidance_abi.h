// LLGuidance's matchers, called through the C symbols that its Python module exports: no GIL.
//
// 1. load() runs once, before the first call; it checks the release, every symbol and the layout of
//    the options, and throws std::runtime_error naming what differs.
// 2. A Tokenizer is read-only once made and shared by its matchers, which keep it alive.
// 3. A Grammar holds one matcher at the start. Each request gets a copy of it. In release 1.9.1
//    copies share nothing that changes: two that fill on two threads take the processor time of one
//    each that one takes alone and do not wait for each other (0 to 5 voluntary context switches in
//    24,000 fills, with two grammars compiled apart 2 to 8), and what one has learnt the other has
//    to learn again. LLGuidance builds its lexer's states as it needs them: a matcher that is done
//    hands its states back for the next copies.
// 4. A token that LLGuidance refuses to consume leaves it in an error state for good, so each token
//    is validated first. Stop tokens are never consumed: termination is kept here.
// 5. LLGuidance keeps the last mask it computed and gives it out again where parser row and lexer
//    state have the same numbers. In release 1.9.1 its rollback does not drop that mask, so a row
//    that was undone and made anew can get the mask of the undone one. Where the path has left that
//    of the last mask, a mask is therefore suspected if it equals the last one; it is then computed
//    again, behind one at a state that both paths share, a cheap one if there is one close by.
// 6. Where no token is legal LLGuidance gives up on the state for good: going back from there takes
//    another copy of the start and consumes the history again.
// 7. With a canonical tokenizer LLGuidance validates tokens that its own mask forbids, so there a
//    token is held against the mask of its state, which is computed if it is not at hand.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "matcher.h"
#include "tokenize.h"

namespace graft::guide::llguidance {

// Loads from the module Python has imported; returns its release.
std::string load(const char* library);

class Tokenizer {
 public:
  // `bytes` of token i are `lengths[i]` long, one after the other; 0: no text. Special tokens are
  // their name behind a byte 0xFF. With an encoder, forced text is narrowed to the tokens it gives;
  // without, any spelling of a text in tokens is legal. Throws std::runtime_error with LLGuidance's
  // reason.
  Tokenizer(const std::vector<uint32_t>& lengths, const std::string& bytes,
            const std::vector<uint32_t>& stop_ids, std::shared_ptr<const Encoder> encoder);
  ~Tokenizer();
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;

  const void* get() const { return tokenizer_; }
  int64_t vocab_size() const { return vocab_size_; }
  const std::vector<uint32_t>& stop_ids() const { return stop_ids_; }
  bool canonical() const { return encoder_ != nullptr; }

  // What LLGuidance says of a grammar without a matcher being made: empty if it takes it, else
  // "error: " or "warning: " and its words.
  std::string judge(const std::string& grammar) const;

 private:
  void* tokenizer_ = nullptr;
  int64_t vocab_size_;
  std::vector<uint32_t> stop_ids_;
  std::shared_ptr<const Encoder> encoder_;  // LLGuidance's tokenizer calls it
};

struct Free {
  void operator()(void* matcher) const;
};
using Handle = std::unique_ptr<void, Free>;

class Grammar {
 public:
  // `text`: LLGuidance's own JSON form. Throws std::runtime_error with LLGuidance's reason.
  Grammar(std::shared_ptr<const Tokenizer> tokenizer, const std::string& text);

  const Tokenizer& tokenizer() const { return *tokenizer_; }
  Handle start() const;
  void hand_back(Handle matcher);

 private:
  // So that the lexer of a grammar in use for days stays below LLGuidance's limit of states.
  static constexpr int kGenerations = 32;

  std::shared_ptr<const Tokenizer> tokenizer_;
  mutable std::mutex mutex_;
  Handle start_;
  int generation_ = 0;
};

class Matcher final : public NativeMatcher {
 public:
  // `stop_ids`: those of this request, no text.
  Matcher(std::shared_ptr<Grammar> grammar, const std::vector<uint32_t>& stop_ids);
  ~Matcher() override;

  Answer accept(int32_t token, ErrorText* error) noexcept override;
  Filled fill(int32_t* row, int64_t words, ErrorText* error) noexcept override;
  Answer rollback(int32_t tokens, ErrorText* error) noexcept override;
  Answer is_terminated(ErrorText* error) noexcept override;

 private:
  Answer failed(ErrorText* error) noexcept;
  Answer is_legal(uint32_t id, ErrorText* error) noexcept;
  Answer advance(size_t size, ErrorText* error) noexcept;
  Answer compute(ErrorText* error) noexcept;
  bool compute_once(uint64_t* checksum) noexcept;

  std::shared_ptr<Grammar> grammar_;
  const Tokenizer& tokenizer_;
  std::vector<uint32_t> stop_ids_;
  Handle live_;  // the present state
  // A mask with so few words in use was cheap to compute; how far back such a state is looked for.
  static constexpr uint64_t kCheap = 64;
  static constexpr size_t kSearch = 24;

  std::vector<uint32_t> path_;  // consumed tokens; behind them those that were undone last
  std::vector<bool> cheap_;     // by consumed tokens of the path: the mask there is a cheap one
  size_t size_ = 0;             // consumed tokens
  size_t masked_at_ = 0;        // `size_` when the last mask was computed
  size_t lowest_ = 0;           // where the path has left that of the last mask, or masked_at_
  uint64_t checksum_ = 0;       // of that mask
  bool dead_ = false;           // no token is legal: LLGuidance has given up on `live_`
  bool terminated_ = false;     // by a stop token, beyond the consumed ones
};

}  // namespace graft::guide::llguidance
