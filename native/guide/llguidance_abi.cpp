// LLGuidance's matchers, called through the C symbols that its Python module exports: no GIL.
//
// Invariants
// 1. load() runs once, before the first call. It checks the release, every symbol, the layout of
//    the options struct and the masks of a small grammar. If one of them differs from what graft
//    expects, load() throws std::runtime_error that names the difference.
// 2. A Tokenizer is immutable and shared by its matchers, which keep it alive.
// 3. A Grammar holds one matcher in the start state, and each request gets a copy of this matcher.
//    In release 1.9.1, copies share no mutable state. Two copies that fill masks on two threads
//    each take the same processor time as one copy alone and do not wait for each other (0 to 5
//    voluntary context switches in 24,000 fills; 2 to 8 with two separately compiled grammars).
//    LLGuidance builds lexer states on demand, and a copy does not see the lexer states that
//    another copy has built. Grammar::reuse() therefore resets a finished matcher and makes later
//    copies from it, but only if it can replace the mask that the matcher caches with the mask of
//    the start state (invariant 5).
// 4. An illegal token puts LLGuidance into a permanent error state, so each token is validated
//    first. LLGuidance never consumes a stop token: LLGuidanceMatcher itself tracks termination.
//    LLGuidance's own end-of-text token is an id after the vocabulary, so that a grammar can name a
//    stop token. A stop token that a grammar names is legal only as the last token of the grammar,
//    because it ends the request.
// 5. LLGuidance caches the last mask and returns it again for a state whose parser row and lexer
//    state have the same numbers. In release 1.9.1, rollback does not invalidate this cache. If
//    other tokens are accepted after a rollback, a new parser row can have the number of an undone
//    row, and LLGuidance may return the mask of the undone row.
//    Let T be the tokens that had been accepted when the cached mask was computed. If the tokens
//    that are accepted now are the first tokens of T, equal row numbers mean the same row, and the
//    returned mask is right. If they differ from T after a common beginning (the fork), a returned
//    mask that equals the cached one may be wrong. The matcher then goes back to the fork or a
//    state before it and computes the mask there, which replaces the cached mask. Afterwards, it
//    computes the mask of its state again.
//    If the grammar has ended, LLGuidance does not cache the mask that it computes. If a mask
//    allows a token with text, the grammar has not ended, so LLGuidance has cached the mask. For
//    any other mask, it is not known whether LLGuidance has cached it or kept the previous one.
// 6. If no token is legal, LLGuidance refuses all further calls. rollback() then makes another copy
//    of the start state, which consumes the accepted tokens again. It does the same if the grammar
//    has lexemes that LLGuidance cannot roll back.
#include <dlfcn.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "hostwork/gate.h"
#include "matcher.h"
#include "threads.h"

namespace nb = nanobind;

namespace graft::guide {
namespace {

constexpr char kRelease[] = "llguidance@1.9.";
// Maximum number of regular expressions that the lexer of a matcher may construct at its start, and
// in one step. LLGuidance's defaults (1 million and 200,000) are too low for patterns with long
// length bounds, because a request would fail in the middle of its text.
// `graft.grammar.schema.llguidance_check` has the same limits.
constexpr uint64_t kLexerFuel = 10'000'000;

// Maximum number of parser items in one row of the parser's chart, and in one step. With
// LLGuidance's defaults (2,000 and 50,000), a request whose grammar has a large choice would fail
// in the middle of its text. The time budget limits the cost of a grammar instead.
constexpr size_t kItems = 1'000'000;

// Error of LLGuidance if no token is legal.
constexpr char kDeadEnd[] = "NoExtensionBias";

// Error of LLGuidance if a lexeme has an attribute that prevents rollback.
constexpr char kNoRollback[] = "rollback not supported";

// Limits of a matcher; 0 selects LLGuidance's default.
struct Limits {
  size_t max_items_in_row;
  uint64_t initial_lexer_fuel;
  uint64_t step_lexer_fuel;
  size_t step_max_items;
  size_t max_lexer_states;
  size_t max_grammar_size;
  bool precompute_large_lexemes;
  bool verbose_errors;
};

struct MatcherOptions {
  const void* tokenizer;
  uint32_t log_buffer_level;
  uint32_t log_stderr_level;
  bool ff_tokens_ok;
  bool backtrack_ok;
  Limits limits;
};

using TokenizeFunction = size_t (*)(const void*, const uint8_t*, size_t, uint32_t*, size_t);

struct TokenizerOptions {
  size_t struct_size;
  uint32_t vocab_size;
  uint32_t tok_eos;
  const uint32_t* token_lens;
  const uint8_t* token_bytes;
  const char* tokenizer_json;
  bool tokenize_assumes_string;
  TokenizeFunction tokenize_fn;
  bool use_approximate_greedy_tokenize_fn;
  const void* tokenize_user_data;
  const char* const* slices;
  const uint32_t* tok_eos_extra;
  uint32_t tok_eos_extra_count;
};

static_assert(sizeof(MatcherOptions) == 80 && sizeof(TokenizerOptions) == 96,
              "the C ABI is declared for 64-bit machines");

struct Api {
  const char* (*version)() = nullptr;
  void* (*new_tokenizer)(const TokenizerOptions*, char*, size_t) = nullptr;
  void (*free_tokenizer)(void*) = nullptr;
  void (*set_defaults)(MatcherOptions*, const void*) = nullptr;
  void* (*new_matcher)(const MatcherOptions*, const char*, const char*) = nullptr;
  void (*free_matcher)(void*) = nullptr;
  const char* (*get_error)(void*) = nullptr;
  int32_t (*validate)(void*, const uint32_t*, size_t) = nullptr;
  int32_t (*consume)(void*, uint32_t) = nullptr;
  int32_t (*consume_all)(void*, const uint32_t*, size_t) = nullptr;
  void* (*clone)(const void*) = nullptr;
  int32_t (*rollback)(void*, size_t) = nullptr;
  int32_t (*reset)(void*) = nullptr;
  int32_t (*compute_mask)(void*) = nullptr;
  const uint32_t* (*get_mask)(void*) = nullptr;
  bool (*is_accepting)(void*) = nullptr;
};

Api api;

template <typename Function>
void symbol(void* library, const char* name, Function* out) {
  void* address = dlsym(library, name);
  if (address == nullptr) throw std::runtime_error(std::string("LLGuidance has no symbol ") + name);
  *out = reinterpret_cast<Function>(address);
}

// LLGuidance's options struct does not contain its own size. The layout is therefore checked by
// having LLGuidance write its defaults and comparing which bytes have changed.
void check_layout(const Api& loaded) {
  alignas(MatcherOptions) std::array<unsigned char, 160> bytes{};
  bytes.fill(0xCC);
  auto* options = reinterpret_cast<MatcherOptions*>(bytes.data());
  int tokenizer = 0;
  loaded.set_defaults(options, &tokenizer);
  const bool inside = std::all_of(bytes.begin() + sizeof(MatcherOptions), bytes.end(),
                                  [](unsigned char byte) { return byte == 0xCC; });
  const bool placed =
      options->tokenizer == &tokenizer && options->log_stderr_level <= 2 && bytes[16] <= 1 &&
      bytes[17] <= 1 && options->limits.max_items_in_row != 0xCCCCCCCCCCCCCCCC &&
      options->limits.max_grammar_size != 0xCCCCCCCCCCCCCCCC && bytes[72] <= 1 && bytes[73] <= 1;
  if (!inside || !placed) {
    throw std::runtime_error("LLGuidance's matcher options have another layout than release 1.9");
  }
}

bool contains(const std::vector<uint32_t>& ids, uint32_t id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

MatcherOptions options_for(const void* tokenizer) {
  MatcherOptions options{};
  api.set_defaults(&options, tokenizer);
  options.log_buffer_level = options.log_stderr_level = 0;
  options.limits.initial_lexer_fuel = options.limits.step_lexer_fuel = kLexerFuel;
  options.limits.max_items_in_row = options.limits.step_max_items = kItems;
  return options;
}

class Tokenizer {
 public:
  // `bytes` is the concatenation of all tokens' texts. The text of token i has lengths[i] bytes
  // (0: no text). The text of a special token is a byte 0xFF and its name. The matchers allow every
  // sequence of tokens that spells a legal text. Throws std::runtime_error if an argument is
  // invalid or LLGuidance refuses it.
  Tokenizer(const std::vector<uint32_t>& lengths, const std::string& bytes,
            const std::vector<uint32_t>& stop_ids)
      : vocab_size_(static_cast<int64_t>(lengths.size())), text_((lengths.size() + 31) / 32) {
    if (api.version == nullptr || stop_ids.empty()) {
      throw std::runtime_error("an LLGuidance tokenizer needs a loaded library and a stop id");
    }
    uint64_t total = 0;
    for (const uint32_t length : lengths) total += length;
    if (total != bytes.size()) {
      throw std::runtime_error("the lengths of the tokens do not add up to the number of bytes");
    }
    std::vector<uint32_t> all_lengths = lengths;
    all_lengths.push_back(0);  // LLGuidance's end-of-text token (invariant 4 of this file)
    TokenizerOptions options{};
    options.struct_size = sizeof(options);
    options.vocab_size = static_cast<uint32_t>(all_lengths.size());
    options.tok_eos = static_cast<uint32_t>(lengths.size());
    options.token_lens = all_lengths.data();
    options.token_bytes = reinterpret_cast<const uint8_t*>(bytes.data());
    options.use_approximate_greedy_tokenize_fn = true;
    for (size_t id = 0; id < lengths.size(); ++id) {
      if (lengths[id] != 0) text_[id >> 5] |= 1u << (id & 31);
    }
    for (const uint32_t stop : stop_ids) text_[stop >> 5] &= ~(1u << (stop & 31));
    char error[512] = {};
    tokenizer_ = api.new_tokenizer(&options, error, sizeof(error));
    if (tokenizer_ == nullptr) throw std::runtime_error(error);
  }

  ~Tokenizer() { api.free_tokenizer(tokenizer_); }
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;

  const void* get() const { return tokenizer_; }
  int64_t vocab_size() const { return vocab_size_; }
  // Returns whether a mask allows an id that has text and is not a stop id. Only of such a mask is
  // it certain that LLGuidance has put it into its cache (invariant 5 of this file).
  bool allows_text(const uint32_t* mask) const noexcept {
    for (size_t w = 0; w < text_.size(); ++w) {
      if ((mask[w] & text_[w]) != 0) return true;
    }
    return false;
  }

 private:
  void* tokenizer_ = nullptr;
  int64_t vocab_size_;
  std::vector<uint32_t> text_;  // one bit per id with text
};

struct Free {
  void operator()(void* matcher) const { api.free_matcher(matcher); }
};
using Handle = std::unique_ptr<void, Free>;

class Grammar {
 public:
  // `text` is a grammar in LLGuidance's JSON form. Throws std::runtime_error with LLGuidance's
  // message if LLGuidance refuses the grammar.
  Grammar(std::shared_ptr<const Tokenizer> tokenizer, const std::string& text)
      : tokenizer_(std::move(tokenizer)) {
    const MatcherOptions options = options_for(tokenizer_->get());
    start_.reset(api.new_matcher(&options, "llguidance", text.c_str()));
    if (const char* message = api.get_error(start_.get())) throw std::runtime_error(message);
  }

  const Tokenizer& tokenizer() const { return *tokenizer_; }

  // Returns a new matcher in the start state.
  Handle start() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return Handle(api.clone(start_.get()));
  }

  // Resets the matcher of a finished request to the start state. Later calls of start() copy this
  // matcher, because its lexer already has states that other requests need (invariant 3). The
  // matcher is dropped instead if kMaxReuses matchers have been reused, if LLGuidance reports an
  // error, or if the mask of the start state is perhaps not in LLGuidance's cache (see
  // Tokenizer::allows_text). The caller must not hold the GIL.
  void reuse(Handle matcher) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (reuses_ >= kMaxReuses) return;
      ++reuses_;
    }
    // The matcher caches its last mask. The mask of the start state must replace that mask, or else
    // copies of this matcher could return a wrong mask (invariant 5 of this file).
    const int64_t begun = clock_ns(CLOCK_THREAD_CPUTIME_ID);
    if (api.reset(matcher.get()) != 0 || api.compute_mask(matcher.get()) != 0) return;
    const bool slow = clock_ns(CLOCK_THREAD_CPUTIME_ID) - begun > kSlowNs;
    const bool is_cached = tokenizer_->allows_text(api.get_mask(matcher.get()));
    const std::lock_guard<std::mutex> lock(mutex_);
    if (slow || !is_cached) reuses_ = kMaxReuses;
    if (is_cached) start_.swap(matcher);
  }

 private:
  // Maximum number of finished matchers that reuse() accepts. The lexer gains states with each
  // reuse; the maximum keeps the lexer of a long-lived grammar below LLGuidance's limit of states.
  static constexpr int kMaxReuses = 32;

  // If computing the mask of the start state, which reuse() needs, takes longer than this, later
  // matchers of the grammar are dropped instead.
  static constexpr int64_t kSlowNs = 1'000'000;

  std::shared_ptr<const Tokenizer> tokenizer_;
  mutable std::mutex mutex_;
  Handle start_;
  int reuses_ = 0;
};

class LLGuidanceMatcher final : public NativeMatcher {
 public:
  // `stop_ids` are the stop ids of this request. Stop ids have no text.
  LLGuidanceMatcher(std::shared_ptr<Grammar> grammar, const std::vector<uint32_t>& stop_ids)
      : grammar_(std::move(grammar)),
        tokenizer_(grammar_->tokenizer()),
        stop_ids_(stop_ids),
        live_(grammar_->start()) {
    path_.reserve(4096);
  }

  ~LLGuidanceMatcher() override {
    // Python deallocates objects while it holds the GIL. Release it, because resetting a matcher
    // and computing its mask take time.
    if (graft::hostwork::holds_gil()) {
      const graft::hostwork::GilRelease release;
      grammar_->reuse(std::move(live_));
    } else {
      grammar_->reuse(std::move(live_));
    }
  }

  Outcome accept(int32_t token, ErrorText* error) noexcept override {
    if (terminated_ || dead_ || token < 0 || token >= tokenizer_.vocab_size()) return Outcome::kNo;
    const uint32_t id = static_cast<uint32_t>(token);
    if (contains(stop_ids_, id)) {
      if (move(size_, error) == Outcome::kFailed) return Outcome::kFailed;
      terminated_ = api.is_accepting(live_.get());
      if (terminated_) return Outcome::kYes;
      const Outcome legal = is_legal(id, error);
      if (legal != Outcome::kYes) return legal;
      terminated_ = ends_with(id);
      return terminated_ ? Outcome::kYes : Outcome::kNo;
    }
    // If `id` is the first undone token of `path_`, it is known to be legal, because it was
    // accepted in this state before.
    if (size_ == path_.size() || path_[size_] != id) {
      if (move(size_, error) == Outcome::kFailed) return Outcome::kFailed;
      const Outcome legal = is_legal(id, error);
      if (legal != Outcome::kYes) return legal;
      leave_path();
      path_.push_back(id);
    }
    ++size_;
    return live_size_ < size_ ? move(size_, error) : Outcome::kYes;
  }

  int accept_all(const int32_t* tokens, int count, ErrorText* error) noexcept override {
    int accepted = accept_text(tokens, count, error);
    // Tokens that accept_text() has refused are tested again. For a few grammars, LLGuidance
    // refuses a token in a call for several tokens but accepts it in a separate call.
    while (accepted >= 0 && accepted < count) {
      const Outcome outcome = accept(tokens[accepted], error);
      if (outcome == Outcome::kNo) break;
      accepted = outcome == Outcome::kYes ? accepted + 1 : -1;
    }
    return accepted;
  }

  Filled fill(int32_t* row, int64_t words, int32_t, ErrorText* error) noexcept override {
    if (words != (tokenizer_.vocab_size() + 31) / 32) {
      error->keep("the mask row does not have the size of the matcher's vocabulary");
      return Filled::kFailed;
    }
    if (!dead_ && (move(size_, error) == Outcome::kFailed || compute(error) == Outcome::kFailed)) {
      return Filled::kFailed;
    }
    if (dead_) {
      std::fill(row, row + words, 0);
      return Filled::kMask;
    }
    std::memcpy(row, api.get_mask(live_.get()), static_cast<size_t>(words) * 4);
    auto* bits = reinterpret_cast<uint32_t*>(row);
    const bool accepting = api.is_accepting(live_.get());
    for (const uint32_t stop : stop_ids_) {
      uint32_t& word = bits[stop >> 5];
      const uint32_t bit = 1u << (stop & 31);
      if (accepting) {
        word |= bit;
      } else if ((word & bit) != 0 && !ends_with(stop)) {
        word &= ~bit;
      }
    }
    row[words - 1] &= last_word_bits(tokenizer_.vocab_size());
    return Filled::kMask;
  }

  Outcome rollback(int32_t tokens, ErrorText* error) noexcept override {
    if (tokens <= 0) return Outcome::kYes;
    size_t undone = static_cast<size_t>(tokens);
    if (undone > size_ + (terminated_ ? 1 : 0)) {
      error->keep("rollback of more tokens than were accepted");
      return Outcome::kFailed;
    }
    if (terminated_) --undone;
    terminated_ = false;
    size_ -= undone;
    if (!dead_) return Outcome::kYes;
    dead_ = false;
    start_again();
    return move(size_, error);
  }

  Outcome is_terminated(ErrorText*) noexcept override {
    return terminated_ ? Outcome::kYes : Outcome::kNo;
  }

 private:
  // Summary of a mask that LLGuidance has computed. `checksum` is the sum of the mask's words.
  // `is_cached` says whether the mask allows a token with text: LLGuidance has then certainly
  // cached the mask. Otherwise, it is not known whether LLGuidance has cached it.
  struct ComputedMask {
    uint32_t checksum = 0;
    bool is_cached = false;
  };
  // What is known about the one mask in LLGuidance's cache (invariant 5 of this file). It is the
  // last mask with ComputedMask::is_cached. If later masks have been computed without is_cached
  // (`may_be_replaced`), it may also be one of these.
  struct CachedMask {
    static constexpr size_t kNowhere = SIZE_MAX;

    bool is_known = false;         // whether any mask was certainly cached
    bool may_be_replaced = false;  // whether a later mask may have been cached instead
    uint32_t checksum = 0;         // checksum of the last mask that was certainly cached
    size_t max_size = 0;           // longest path at which a possibly cached mask was computed
    // Shortest length to which leave_path() has cut `path_` since the last mask that was certainly
    // cached.
    size_t fork = kNowhere;

    void record(const ComputedMask& computed, size_t size) noexcept {
      if (computed.is_cached) {
        *this = {true, false, computed.checksum, size, kNowhere};
      } else {
        may_be_replaced = true;
        max_size = std::max(max_size, size);
      }
    }
    bool may_equal(const ComputedMask& computed) const noexcept {
      return computed.is_cached ? is_known && computed.checksum == checksum : may_be_replaced;
    }
  };
  // Maximum number of masks that one call of replace_cached_mask() computes.
  static constexpr size_t kMaxTries = 24;

  Outcome failed(ErrorText* error) noexcept {
    const char* message = api.get_error(live_.get());
    error->keep(message != nullptr ? message : "LLGuidance failed without a reason");
    return Outcome::kFailed;
  }

  // Makes `live_` a new copy of the start state.
  void start_again() noexcept {
    live_ = grammar_->start();
    live_size_ = 0;
    cached_mask_ = CachedMask();
  }

  // Accepts tokens with two calls of LLGuidance: one finds how many of the first tokens are legal,
  // the other consumes these. Returns the number of accepted tokens, or -1 for an internal error.
  // The first token that is not accepted may still be legal, see accept_all().
  int accept_text(const int32_t* tokens, int count, ErrorText* error) noexcept {
    const auto* ids = reinterpret_cast<const uint32_t*>(tokens);
    size_t size = 0;
    while (size < static_cast<size_t>(count) && is_text(tokens[size])) ++size;
    // With a result of 0, accept_all() calls accept() for each token. This is faster if LLGuidance
    // has the mask of this state, or if rollback() has undone tokens that are still in `path_`.
    if (size < 2 || terminated_ || dead_ || size_ < path_.size()) return 0;
    if (live_size_ != size_ || api.get_mask(live_.get()) != nullptr) return 0;
    const int32_t valid = api.validate(live_.get(), ids, size);
    if (valid <= 0) return valid == 0 ? 0 : (failed(error), -1);
    if (api.consume_all(live_.get(), ids, static_cast<size_t>(valid)) != 0) {
      start_again();
      return move(size_, error) == Outcome::kFailed ? -1 : 0;
    }
    path_.insert(path_.end(), ids, ids + valid);
    size_ = live_size_ = path_.size();
    return valid;
  }

  bool is_text(int32_t token) const noexcept {
    if (token < 0 || token >= tokenizer_.vocab_size()) return false;
    return !contains(stop_ids_, static_cast<uint32_t>(token));
  }

  // Returns whether the grammar may end after the legal token `id`. Uses a copy of the matcher,
  // because a rollback would affect the cached mask (invariant 5 of this file).
  bool ends_with(uint32_t id) const noexcept {
    const Handle copy(api.clone(live_.get()));
    return api.consume(copy.get(), id) == 0 && api.is_accepting(copy.get());
  }

  // Returns whether a token is legal. Reads the bit of the token if LLGuidance has the mask of this
  // state; otherwise LLGuidance validates the token.
  Outcome is_legal(uint32_t id, ErrorText* error) noexcept {
    const uint32_t* mask = api.get_mask(live_.get());
    if (mask != nullptr) {
      return (mask[id >> 5] >> (id & 31) & 1u) != 0 ? Outcome::kYes : Outcome::kNo;
    }
    const int32_t valid = api.validate(live_.get(), &id, 1);
    if (valid < 0) return failed(error);
    return valid == 0 ? Outcome::kNo : Outcome::kYes;
  }

  // Whether the message of LLGuidance's error begins with `text`.
  bool has_failed_with(const char* text) const noexcept {
    const char* message = api.get_error(live_.get());
    return message != nullptr && std::strncmp(message, text, std::strlen(text)) == 0;
  }

  // Moves `live_` to the state after the first `size` tokens of `path_`.
  Outcome move(size_t size, ErrorText* error) noexcept {
    if (live_size_ > size && api.rollback(live_.get(), live_size_ - size) == 0) {
      live_size_ = size;
    } else if (live_size_ > size) {
      if (!has_failed_with(kNoRollback)) return failed(error);
      start_again();
    }
    for (; live_size_ < size; ++live_size_) {
      if (api.consume(live_.get(), path_[live_size_]) != 0) return failed(error);
    }
    return Outcome::kYes;
  }

  // Removes from `path_` the tokens that rollback() has undone. Called before a token that differs
  // from the first undone one is accepted.
  void leave_path() noexcept {
    if (size_ == path_.size()) return;
    path_.resize(size_);
    if (size_ >= cached_mask_.max_size) return;
    cached_mask_.fork = std::min(cached_mask_.fork, size_);
  }

  // Computes the correct mask after the accepted tokens, or detects that no token is legal.
  Outcome compute(ErrorText* error) noexcept {
    ComputedMask computed;
    if (!compute_once(&computed)) return dead_ ? Outcome::kYes : failed(error);
    if (cached_mask_.fork < size_ &&
        cached_mask_.may_equal(computed)) {  // see replace_cached_mask()
      if (replace_cached_mask(cached_mask_.fork, error) == Outcome::kFailed ||
          move(size_, error) == Outcome::kFailed) {
        return Outcome::kFailed;
      }
      if (!compute_once(&computed)) return failed(error);
    }
    cached_mask_.record(computed, size_);
    return Outcome::kYes;
  }

  // Makes LLGuidance cache the mask of the state after the first `back` tokens, or of an earlier
  // state (invariant 5 of this file). Rolls the matcher back to the first `back` tokens and
  // computes the mask, then goes back one token at a time until a mask is certainly cached. After
  // kMaxTries masks without success, `live_` becomes a new copy of the start state.
  Outcome replace_cached_mask(size_t back, ErrorText* error) noexcept {
    for (size_t tries = kMaxTries; tries-- > 0;) {
      ComputedMask computed;
      if (move(back, error) == Outcome::kFailed) return Outcome::kFailed;
      if (!compute_once(&computed)) return failed(error);
      if (computed.is_cached) {
        cached_mask_.record(computed, back);
        return Outcome::kYes;
      }
      if (back-- == 0) break;
    }
    start_again();  // a new copy caches only the mask of the start state
    return Outcome::kYes;
  }

  // Computes the mask of the current state of `live_`. LLGuidance may return a wrong mask from its
  // cache (invariant 5 of this file); compute() then corrects it.
  bool compute_once(ComputedMask* computed) noexcept {
    if (api.compute_mask(live_.get()) != 0) {
      dead_ = has_failed_with(kDeadEnd);
      return false;
    }
    const uint32_t* mask = api.get_mask(live_.get());
    const int64_t words = (tokenizer_.vocab_size() + 31) / 32;
    computed->checksum = 0;
    for (int64_t w = 0; w < words; ++w) computed->checksum += mask[w];
    computed->is_cached = tokenizer_.allows_text(mask);
    return true;
  }

  std::shared_ptr<Grammar> grammar_;
  const Tokenizer& tokenizer_;
  std::vector<uint32_t> stop_ids_;
  Handle live_;                 // LLGuidance's matcher, at `live_size_` tokens of the path
  std::vector<uint32_t> path_;  // accepted tokens, followed by undone tokens
  size_t size_ = 0;             // number of accepted tokens
  size_t live_size_ = 0;
  CachedMask cached_mask_;
  bool dead_ = false;        // whether no token is legal: all calls of `live_` then fail
  bool terminated_ = false;  // whether a stop token was accepted after the other tokens
};

// Checks how matchers of a small grammar behave, because another release of LLGuidance could have
// the same symbols and layout but behave differently. Throws std::runtime_error that names the
// difference.
void check_behaviour() {
  constexpr char kText[] =
      R"({"grammars": [{"lark_grammar": "%llguidance {\"no_forcing\": true}\nstart: \"ab\""}]})";
  const std::vector<uint32_t> stop_ids{3};  // id 3 ends the text; ids 0 to 2 are a, b and ab
  const auto tokenizer =
      std::make_shared<const Tokenizer>(std::vector<uint32_t>{1, 1, 2, 0}, "abab", stop_ids);
  const auto grammar = std::make_shared<Grammar>(tokenizer, kText);
  ErrorText error;
  const auto require = [&error](bool expected, const char* what) {
    if (expected) return;
    const std::string reason = error.text[0] == '\0' ? "" : std::string(": ") + error.text;
    throw std::runtime_error(
        "LLGuidance behaves differently from release 1.9: " + std::string(what) + reason);
  };
  for (int run = 0; run < 2; ++run) {  // the second run tests a matcher that reuse() has reset
    LLGuidanceMatcher matcher(grammar, stop_ids);
    const auto row = [&] {
      int32_t word = 0;
      return matcher.fill(&word, 1, kNoBudget, &error) == Filled::kMask ? word : -1;
    };
    require(row() == 0b0101, "mask of the start state");
    require(matcher.accept(1, &error) == Outcome::kNo, "an illegal token");
    require(matcher.accept(0, &error) == Outcome::kYes && row() == 0b0010, "mask after a token");
    require(matcher.accept(1, &error) == Outcome::kYes && row() == 0b1000, "mask of a final state");
    require(matcher.accept(3, &error) == Outcome::kYes, "a stop token");
    require(matcher.rollback(3, &error) == Outcome::kYes && row() == 0b0101, "rollback");
    const int32_t tokens[] = {0, 1};
    require(matcher.accept_all(tokens, 2, &error) == 2 && row() == 0b1000, "several tokens");
  }
}

// Loads the symbols from the module that Python has imported, and returns the module's release.
std::string load(const char* library) {
  if (api.version != nullptr) return api.version();
  void* module = dlopen(library, RTLD_NOW | RTLD_NOLOAD);
  if (module == nullptr) {
    throw std::runtime_error(std::string("LLGuidance is not loaded from ") + library);
  }
  Api loaded;
  symbol(module, "llg_get_version", &loaded.version);
  const std::string version = loaded.version();
  if (version.rfind(kRelease, 0) != 0) {
    throw std::runtime_error("LLGuidance's library is " + version + ", graft knows " + kRelease +
                             "x");
  }
  symbol(module, "llg_new_tokenizer_v2", &loaded.new_tokenizer);
  symbol(module, "llg_free_tokenizer", &loaded.free_tokenizer);
  symbol(module, "llg_constraint_init_set_defaults", &loaded.set_defaults);
  symbol(module, "llg_new_matcher", &loaded.new_matcher);
  symbol(module, "llg_free_matcher", &loaded.free_matcher);
  symbol(module, "llg_matcher_get_error", &loaded.get_error);
  symbol(module, "llg_matcher_validate_tokens", &loaded.validate);
  symbol(module, "llg_matcher_consume_token", &loaded.consume);
  symbol(module, "llg_matcher_consume_tokens", &loaded.consume_all);
  symbol(module, "llg_clone_matcher", &loaded.clone);
  symbol(module, "llg_matcher_rollback", &loaded.rollback);
  symbol(module, "llg_matcher_reset", &loaded.reset);
  symbol(module, "llg_matcher_compute_mask", &loaded.compute_mask);
  symbol(module, "llg_matcher_get_mask", &loaded.get_mask);
  symbol(module, "llg_matcher_is_accepting", &loaded.is_accepting);
  check_layout(loaded);
  api = loaded;
  try {
    check_behaviour();
  } catch (...) {
    api = Api();
    throw;
  }
  return version;
}

}  // namespace

void bind_llguidance(nb::module_& guide) {
  using Release = nb::call_guard<graft::hostwork::GilRelease>;
  guide.def("load_llguidance", &load, nb::arg("library"));
  nb::class_<Tokenizer>(guide, "LLGuidanceTokenizer")
      .def(
          "__init__",
          [](Tokenizer* self, const std::vector<uint32_t>& lengths, const nb::bytes& bytes,
             const std::vector<uint32_t>& stop_ids) {
            const std::string text(bytes.c_str(), bytes.size());
            const graft::hostwork::GilRelease release;
            new (self) Tokenizer(lengths, text, stop_ids);
          },
          nb::arg("lengths"), nb::arg("bytes"), nb::arg("stop_ids"));
  nb::class_<Grammar>(guide, "LLGuidanceGrammar")
      .def(nb::init<std::shared_ptr<const Tokenizer>, const std::string&>(), nb::arg("tokenizer"),
           nb::arg("text"), Release());
  nb::class_<LLGuidanceMatcher, NativeMatcher>(guide, "LLGuidanceMatcher")
      .def(nb::init<std::shared_ptr<Grammar>, const std::vector<uint32_t>&>(), nb::arg("grammar"),
           nb::arg("stop_ids"), Release());
}

}  // namespace graft::guide
