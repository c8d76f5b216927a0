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
//    hands its states back for the next copies, if the mask at the start can take the place of the
//    kept one (invariant 5).
// 4. A token that LLGuidance refuses to consume leaves it in an error state for good, so each token
//    is validated first. Stop tokens are never consumed: termination is kept here.
// 5. LLGuidance keeps the last mask it computed and gives it out again where the parser's row and
//    the lexer's state have the same numbers. In release 1.9.1 its rollback does not drop that
//    mask, so a row that was undone and made anew can get the mask of the undone one. On the path
//    to the state of the kept mask it is always right: there an equal row is the same row.
//    Behind the place where a path leaves that path, a mask that equals the kept one is suspected:
//    the kept one is replaced by one at or before the fork, and the mask computed again. A mask
//    does not take the place of the kept one where the grammar has ended. Such a mask is told by
//    the tokens it allows (`is_kept`). Where it is not sure, neither mask counts as gone.
// 6. Where no token is legal LLGuidance gives up on the state for good: going back from there takes
//    another copy of the start and consumes the history again.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
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
  // Whether a mask has surely taken the place of the kept one (invariant 5).
  bool is_kept(const uint32_t* mask) const noexcept;

 private:
  void* tokenizer_ = nullptr;
  int64_t vocab_size_;
  std::vector<uint32_t> stop_ids_;
  std::vector<uint32_t> text_;  // a bit per id that is text
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
  static constexpr int64_t kSlowNs = 1'000'000;  // a grammar whose first mask takes longer: once

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
  // A computed mask: the sum of its words, and whether it surely became the kept one.
  struct Seen {
    uint32_t sum = 0;
    bool sure = false;
  };
  // The mask that LLGuidance keeps: the last that it surely did, or an unsure one since.
  struct Kept {
    static constexpr size_t kNowhere = SIZE_MAX;

    bool some = false, unsure = false;
    uint32_t sum = 0;        // of the sure one
    size_t depth = 0;        // tokens before the deeper of them
    size_t fork = kNowhere;  // the first place where the path has left theirs

    void note(const Seen& seen, size_t size) noexcept;
    bool may_equal(const Seen& seen) const noexcept;
  };
  static constexpr size_t kSearch = 24;  // tokens back, for a mask that replaces the kept one

  Answer failed(ErrorText* error) noexcept;
  Answer is_legal(uint32_t id, ErrorText* error) noexcept;
  Answer move(size_t size, ErrorText* error) noexcept;
  void leave_path() noexcept;
  Answer compute(ErrorText* error) noexcept;
  Answer replace_kept(size_t back, ErrorText* error) noexcept;
  bool compute_once(Seen* seen) noexcept;

  std::shared_ptr<Grammar> grammar_;
  const Tokenizer& tokenizer_;
  std::vector<uint32_t> stop_ids_;
  Handle live_;                 // LLGuidance's matcher: at `live_size_` tokens of the path
  std::vector<uint32_t> path_;  // accepted tokens; behind them those that were undone last
  size_t size_ = 0;             // accepted tokens; undone ones stay in `live_` until they matter
  size_t live_size_ = 0;
  Kept kept_;
  bool dead_ = false;        // no token is legal: LLGuidance has given up on `live_`
  bool terminated_ = false;  // by a stop token, beyond the accepted ones
};

}  // namespace graft::guide::llguidance
