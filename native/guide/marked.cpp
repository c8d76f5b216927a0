// Matcher of free text that is followed by a grammar. A scanner searches the free text for a
// marker, such as the tag that ends a reasoning section; the matcher of the grammar starts after
// the marker.
//
// Invariants
// 1. The grammar begins with the token after the one that completes the marker. A token that
//    contains the end of the marker and further text is illegal, so no byte bypasses the grammar.
//    If `max_skipped` of the marker is positive, up to this number of white-space characters may
//    lie between the marker and the grammar, and tokens may join them with the end of the marker or
//    with the beginning of the grammar's text. A token that the grammar accepts as a whole begins
//    the grammar's text. Otherwise, leading white space of the token is skipped, and the matcher of
//    the grammar accepts tokens that spell the rest of the token's text.
// 2. The marker may extend over several tokens. After an incomplete part of the marker, a token
//    without text is illegal. Decoding may omit this token or print its name, so it would be
//    undefined whether the text contains the marker.
// 3. rollback() may undo tokens of the grammar and then tokens of the free text, for which it
//    restores the state of the scanner. At most the last kHistory tokens of the free text can be
//    undone.
// 4. A stop token in the free text terminates the matcher. If the marker is required, a stop token
//    in the free text is illegal.
// 5. If the marker has an opening text, the output has free text only if it begins with this text,
//    after at most `max_space` white-space characters. Otherwise, the grammar applies from the
//    first token. As long as the tokens can still become the opening text, both cases are possible:
//    legal tokens are those that continue the opening and those that continue the text of the
//    grammar. The matcher of the grammar therefore accepts these tokens too, up to the first one
//    that the grammar does not allow. When the opening is complete, the matcher returns to its
//    start. All tokens up to the end of the opening can be undone. They are few, because each of
//    them has at least one character of the opening or of the white space before it.
// 6. The distance before the end of the marker is the number of tokens that complete opening and
//    marker plus the distance of the grammar's start. It is known if the grammar's distance is
//    known and tokens can spell every suffix of opening and marker. The limit of free tokens works
//    like a budget for opening and marker alone: tokens after which they could not be complete
//    within the limit are illegal. Budgets and the limit do not affect stop tokens in the free
//    text.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <climits>
#include <functional>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "matcher.h"

namespace nb = nanobind;

namespace graft::guide {
namespace {

constexpr int32_t kUnreachable = INT32_MAX / 4;

constexpr std::string_view kSpace = " \t\r\n";

bool is_space(char byte) noexcept { return kSpace.find(byte) != std::string_view::npos; }

// Scanner that searches free text for a marker, for the tokens of one vocabulary. Immutable and
// shared by the matchers with this marker.
class Marker {
 public:
  // The marker is `text`, as bytes, or any single token of `ids`; one of the two may be empty. If
  // it is `required`, a stop token in the free text is illegal. `tokens` has the bytes of each id,
  // which are empty for ids without text. If there is an `opening` text or one of `opening_ids`, an
  // output has free text only if it begins with it (invariant 5). Throws std::invalid_argument if
  // there is neither an id nor a text, or if an id is out of range.
  Marker(const std::vector<int32_t>& ids, const std::string& text, std::vector<std::string> tokens,
         int64_t vocab_size, bool required, const std::vector<int32_t>& opening_ids,
         const std::string& opening, int32_t max_space, int32_t max_skipped);

  // `found`: the token completes the marker. `rest` is the number of bytes of the token after the
  // marker; if it is positive, the token is not `legal` by itself, but see `Join`.
  struct Step {
    bool legal;
    bool found;
    int32_t state;
    size_t rest = 0;
  };
  // Returns how the scanner moves from `state` when it reads a token. The token id must be less
  // than the vocabulary size and must not be a stop id.
  Step step(int32_t state, int32_t token) const noexcept;

  // Returns the bitmask of the legal ids in `state`, including the stop ids. Returns null if all
  // ids are legal.
  const int32_t* row(int32_t state) const noexcept;

  // Says whether the tokens of an output begin with the opening (invariant 5 of this file). kNone:
  // they do not begin with it. kPartial: further tokens can complete it. kComplete: they begin with
  // it, and the rest is free text. kIllegal: they begin with it, but the last token is illegal in
  // the free text.
  enum class Opening { kNone, kPartial, kComplete, kIllegal };

  // Result of opening_step(), which reads one token of the opening. For kPartial, `state` must be
  // passed to the next call of opening_step(). For kComplete, the token completes the opening:
  // `state` must be passed to the next call of step(), which searches for the marker, and `found`
  // says whether the token has already completed the marker, too.
  struct OpeningStep {
    Opening result;
    int32_t state;
    bool found;
  };
  // Says whether the output still begins with the opening after `token`. `state` is the state from
  // the previous call; 0 for the first token of the output.
  OpeningStep opening_step(int32_t state, int32_t token) const noexcept;

  // Returns the bitmask of the ids for which opening_step() returns kPartial or kComplete in
  // `state`.
  const int32_t* opening_row(int32_t state) const noexcept {
    return opening_rows_[static_cast<size_t>(state)].data();
  }
  // Returns the ids for which opening_step() returns kIllegal in `state`.
  const std::vector<int32_t>& opening_illegal(int32_t state) const noexcept {
    return opening_illegal_[static_cast<size_t>(state)];
  }
  // A token that contains white space to skip, and possibly text after it (invariant 1 of this
  // file). `space` is the number of white-space characters. The `size` ids of
  // spelling() are tokens that spell the text after it; `size` is 0 if no text follows.
  struct Join {
    int32_t token;
    int32_t space;
    size_t spelling;
    int32_t size;
  };
  const int32_t* spelling(const Join& join) const noexcept {
    return spellings_.data() + join.spelling;
  }
  // joins_after_marker() returns the tokens after the marker that begin with white space. joins()
  // returns the tokens that complete the marker after `state` of the scanner and contain further
  // text. Both are in ascending order.
  const std::vector<Join>& joins_after_marker() const noexcept { return joins_.back(); }
  const std::vector<Join>& joins(int32_t state) const noexcept {
    return joins_[row_index(static_cast<size_t>(state))];
  }
  int32_t max_skipped() const noexcept { return max_skipped_; }
  // Returns the number of tokens that complete the marker after `state` of the scanner.
  int32_t distance(int32_t state) const noexcept { return distances_[static_cast<size_t>(state)]; }
  // Returns the number of tokens that complete opening and marker after `state` of opening_step().
  int32_t opening_distance(int32_t state) const noexcept {
    return opening_distances_[static_cast<size_t>(state)] + distances_[0];
  }
  // Maximum of distance(), and maximum of distance() and opening_distance(), over all states.
  int32_t max_distance() const noexcept { return max_distance_; }
  int32_t max_opening_distance() const noexcept { return max_opening_distance_; }
  // Whether tokens of the vocabulary can complete opening and marker from every state.
  bool is_spelled() const noexcept {
    return std::max(max_distance_, max_opening_distance_) < kUnreachable;
  }
  bool has_opening() const { return !opening_.empty() || !opening_ids_.empty(); }
  // Maximum number of tokens for which opening_step() can return kPartial.
  size_t max_opening_tokens() const {
    return static_cast<size_t>(max_space_) + opening_.size() + 1;
  }
  int64_t vocab_size() const { return vocab_size_; }
  int64_t words() const { return (vocab_size_ + 31) / 32; }
  bool required() const { return required_; }

 private:
  void make_rows();
  void make_opening_rows();
  void make_joins();
  std::vector<int32_t> spelling_distances(const std::string& text) const;
  int32_t next(int32_t state, unsigned char byte) const noexcept;
  Step scan(int32_t state, const char* bytes, size_t size) const noexcept;
  size_t text_size(int32_t token) const noexcept {
    const auto at = static_cast<size_t>(token);
    return at < tokens_.size() ? tokens_[at].size() : 0;
  }
  size_t row_index(size_t state) const noexcept {
    if (state >= shared_) return 2 + state - shared_;
    return state == 0 ? 0 : 1;
  }

  std::vector<int32_t> ids_;
  std::string text_;
  // Knuth-Morris-Pratt: state at which matching continues if the next byte does not match. States
  // that would fail on the same byte are skipped, so that repetitive texts need few steps.
  std::vector<int32_t> fallback_;
  std::vector<std::string> tokens_;
  int64_t vocab_size_;
  bool required_;
  // Bitmasks of the legal ids; see row_index(). A token can extend past the end of the marker only
  // in the last states of the scanner, so each of these states has its own row. The first
  // `shared_` states need only two rows: row 0 for state 0, and row 1 for the others. An empty row
  // means that every id is legal and no mask is needed.
  size_t shared_ = 0;
  std::vector<std::vector<int32_t>> rows_;
  std::vector<int32_t> opening_ids_;
  std::string opening_;
  int32_t max_space_;
  int32_t max_skipped_;
  // Results of joins() by row_index(), then the result of joins_after_marker().
  std::vector<std::vector<Join>> joins_;
  std::vector<int32_t> spellings_;  // results of spelling(), one after the other
  std::vector<int32_t> distances_;  // results of distance()
  // Number of tokens that complete the opening, by state of opening_step().
  std::vector<int32_t> opening_distances_;
  int32_t max_distance_ = 0;
  int32_t max_opening_distance_ = 0;
  // Results of opening_row() and opening_illegal(), by state of opening_step(). A state up to
  // `max_space_` is the number of white-space characters read so far. In state max_space_ + n, n
  // bytes of the opening text have been read.
  std::vector<std::vector<int32_t>> opening_rows_;
  std::vector<std::vector<int32_t>> opening_illegal_;
};

Marker::Marker(const std::vector<int32_t>& ids, const std::string& text,
               std::vector<std::string> tokens, int64_t vocab_size, bool required,
               const std::vector<int32_t>& opening_ids, const std::string& opening,
               int32_t max_space, int32_t max_skipped)
    : ids_(ids),
      text_(text),
      fallback_(text.size()),
      tokens_(std::move(tokens)),
      vocab_size_(vocab_size),
      required_(required),
      opening_ids_(opening_ids),
      opening_(opening),
      max_space_(max_space),
      max_skipped_(max_skipped) {
  if (ids.empty() && text.empty()) throw std::invalid_argument("the marker is empty");
  if (static_cast<int64_t>(tokens_.size()) > vocab_size_) {
    throw std::invalid_argument("there are more tokens than the vocabulary has ids");
  }
  for (const std::vector<int32_t>* some : {&ids_, &opening_ids_}) {
    for (const int32_t id : *some) {
      if (id < 0 || id >= vocab_size_) throw std::invalid_argument("a marker id is out of range");
    }
  }
  if (max_space < 0 || max_skipped < 0) {
    throw std::invalid_argument("a maximum of white space is negative");
  }
  const auto at = [&](int32_t state) { return text[static_cast<size_t>(state)]; };
  // In the loop: length of the longest proper prefix of text[0 .. i) that is also its suffix.
  int32_t border = 0;
  if (!text.empty()) fallback_[0] = -1;
  for (size_t i = 1; i < text.size(); ++i) {
    fallback_[i] = text[i] == at(border) ? fallback_[static_cast<size_t>(border)] : border;
    while (border >= 0 && text[i] != at(border)) border = fallback_[static_cast<size_t>(border)];
    ++border;
  }
  make_rows();
  distances_ = ids_.empty() ? spelling_distances(text_)
                            : std::vector<int32_t>(std::max<size_t>(text_.size(), 1), 1);
  max_distance_ = *std::max_element(distances_.begin(), distances_.end());
  if (has_opening()) {
    make_opening_rows();
    std::vector<int32_t> spelling = spelling_distances(opening_);
    if (!opening_ids_.empty()) spelling.front() = 1;
    opening_distances_.assign(static_cast<size_t>(max_space_), spelling.front());
    opening_distances_.insert(opening_distances_.end(), spelling.begin(), spelling.end());
    const int32_t most = *std::max_element(spelling.begin(), spelling.end());
    max_opening_distance_ = std::max(max_distance_, most + distances_.front());
  }
  make_joins();
}

void Marker::make_joins() {
  joins_.resize(rows_.size() + 1);
  if (max_skipped_ == 0) return;
  std::unordered_map<std::string_view, int32_t> ids;
  ids.reserve(tokens_.size());
  for (size_t token = 0; token < tokens_.size(); ++token) {
    if (!tokens_[token].empty()) ids.try_emplace(tokens_[token], static_cast<int32_t>(token));
  }
  // Adds `token`, whose part after the marker is `text`, to `joins`, unless `text` begins with too
  // much white space or tokens cannot spell the rest of it.
  const auto add = [&](std::vector<Join>& joins, int32_t token, std::string_view text) {
    const std::string_view rest =
        text.substr(std::min(text.find_first_not_of(kSpace), text.size()));
    const size_t space = text.size() - rest.size();
    if (space > static_cast<size_t>(max_skipped_)) return;
    // The spelling always takes the longest token, so it may miss spellings if the vocabulary lacks
    // some tokens of single bytes. The token then stays illegal.
    const size_t first = spellings_.size();
    for (size_t at = 0; at < rest.size();) {
      size_t size = rest.size() - at;
      while (size > 0 && ids.count(rest.substr(at, size)) == 0) --size;
      if (size == 0) return spellings_.resize(first);
      spellings_.push_back(ids.at(rest.substr(at, size)));
      at += size;
    }
    const auto size = static_cast<int32_t>(spellings_.size() - first);
    joins.push_back({token, static_cast<int32_t>(space), first, size});
  };
  for (int32_t token = 0; token < static_cast<int32_t>(tokens_.size()); ++token) {
    const std::string_view bytes = tokens_[static_cast<size_t>(token)];
    if (bytes.empty()) continue;
    if (is_space(bytes.front())) add(joins_.back(), token, bytes);
    for (size_t state = text_.size() - std::min(text_.size(), bytes.size() - 1);
         state < text_.size(); ++state) {
      const Step step = this->step(static_cast<int32_t>(state), token);
      if (step.rest == 0) continue;
      add(joins_[row_index(state)], token, bytes.substr(bytes.size() - step.rest));
    }
  }
}

void Marker::make_rows() {
  size_t longest = 1;
  for (const std::string& token : tokens_) longest = std::max(longest, token.size());
  const size_t states = text_.size();
  const size_t num_rows = std::min(states, longest - 1);
  shared_ = states == 0 ? 1 : states - num_rows;
  std::vector<int32_t> all(static_cast<size_t>(words()), -1);
  all.back() = last_word_bits(vocab_size_);
  rows_.assign(2 + num_rows, all);
  for (int32_t token = 0; token < static_cast<int32_t>(vocab_size_); ++token) {
    const auto remove = [&](size_t row) {
      rows_[row][static_cast<size_t>(token >> 5)] &= static_cast<int32_t>(~(1u << (token & 31)));
    };
    const size_t size = text_size(token);
    if (size == 0) {
      if (states < 2 || step(1, token).legal) continue;
      for (size_t row = 1; row < rows_.size(); ++row) {
        if (row != row_index(0)) remove(row);
      }
      continue;
    }
    for (size_t state = states - std::min(states, size - 1); state < states; ++state) {
      if (!step(static_cast<int32_t>(state), token).legal) remove(row_index(state));
    }
  }
  for (std::vector<int32_t>& row : rows_) {
    if (row == all && !required_) row.clear();
  }
}

void Marker::make_opening_rows() {
  const size_t states = static_cast<size_t>(max_space_) + std::max<size_t>(opening_.size(), 1);
  opening_rows_.assign(states, std::vector<int32_t>(static_cast<size_t>(words()), 0));
  opening_illegal_.resize(states);
  for (int32_t token = 0; token < static_cast<int32_t>(vocab_size_); ++token) {
    for (size_t state = 0; state < states; ++state) {
      const Opening result = opening_step(static_cast<int32_t>(state), token).result;
      if (result == Opening::kIllegal) opening_illegal_[state].push_back(token);
      if (result != Opening::kPartial && result != Opening::kComplete) continue;
      opening_rows_[state][static_cast<size_t>(token >> 5)] |=
          static_cast<int32_t>(1u << (token & 31));
    }
  }
}

// Returns the minimum number of tokens that spell each suffix of a text, by the index of the
// suffix's first byte; kUnreachable if the tokens of the vocabulary cannot spell the suffix.
std::vector<int32_t> Marker::spelling_distances(const std::string& text) const {
  std::vector<std::vector<size_t>> sizes(text.size());  // sizes of the tokens that begin at a byte
  for (const std::string& token : tokens_) {
    if (token.empty() || token.size() > text.size()) continue;
    for (size_t at = text.find(token); at != std::string::npos; at = text.find(token, at + 1)) {
      sizes[at].push_back(token.size());
    }
  }
  std::vector<int32_t> distances(text.size() + 1, kUnreachable);
  distances.back() = 0;
  for (size_t at = text.size(); at-- > 0;) {
    for (const size_t size : sizes[at]) {
      distances[at] = std::min(distances[at], 1 + distances[at + size]);
    }
  }
  if (!text.empty()) distances.pop_back();
  return distances;
}

Marker::OpeningStep Marker::opening_step(int32_t state, int32_t token) const noexcept {
  const OpeningStep other{Opening::kNone, 0, false};
  const bool has_text =
      token < static_cast<int32_t>(tokens_.size()) && !tokens_[static_cast<size_t>(token)].empty();
  if (!has_text) {
    const bool opens =
        std::find(opening_ids_.begin(), opening_ids_.end(), token) != opening_ids_.end();
    return opens && state <= max_space_ ? OpeningStep{Opening::kComplete, 0, false} : other;
  }
  if (opening_.empty()) return other;
  const std::string& bytes = tokens_[static_cast<size_t>(token)];
  for (size_t i = 0; i < bytes.size(); ++i) {
    const char byte = bytes[i];
    if (state < max_space_ && is_space(byte)) {
      ++state;
      continue;
    }
    const int32_t matched = std::max(state - max_space_, 0);
    if (byte != opening_[static_cast<size_t>(matched)]) return other;
    state = max_space_ + matched + 1;
    if (matched + 1 < static_cast<int32_t>(opening_.size())) continue;
    const Step rest = scan(0, bytes.data() + i + 1, bytes.size() - i - 1);
    return {rest.legal ? Opening::kComplete : Opening::kIllegal, rest.state, rest.found};
  }
  return {Opening::kPartial, state, false};
}

int32_t Marker::next(int32_t state, unsigned char byte) const noexcept {
  while (state >= 0 && static_cast<unsigned char>(text_[static_cast<size_t>(state)]) != byte) {
    state = fallback_[static_cast<size_t>(state)];
  }
  return state + 1;
}

Marker::Step Marker::step(int32_t state, int32_t token) const noexcept {
  if (std::find(ids_.begin(), ids_.end(), token) != ids_.end()) return {true, true, 0};
  if (text_size(token) == 0) return {state == 0, false, 0};
  const std::string& bytes = tokens_[static_cast<size_t>(token)];
  return scan(state, bytes.data(), bytes.size());
}

Marker::Step Marker::scan(int32_t state, const char* bytes, size_t size) const noexcept {
  if (text_.empty()) return {true, false, 0};
  for (size_t i = 0; i < size; ++i) {
    state = next(state, static_cast<unsigned char>(bytes[i]));
    if (state == static_cast<int32_t>(text_.size())) {
      return {i + 1 == size, true, 0, size - i - 1};
    }
  }
  return {true, false, state};
}

const int32_t* Marker::row(int32_t state) const noexcept {
  const std::vector<int32_t>& row = rows_[row_index(static_cast<size_t>(state))];
  return row.empty() ? nullptr : row.data();
}

class MarkedMatcher final : public NativeMatcher {
 public:
  // `inner` is the matcher of the grammar, at its start. It is borrowed: the caller keeps it alive.
  // If there is free text, opening and marker are complete within the first `max_free_tokens`
  // tokens; kNoBudget: no limit. Throws std::invalid_argument if they need more tokens.
  MarkedMatcher(NativeMatcher* inner, std::shared_ptr<const Marker> marker,
                const std::vector<int32_t>& stop_ids, int32_t max_free_tokens)
      : inner_(inner),
        marker_(std::move(marker)),
        stop_ids_(stop_ids),
        max_free_tokens_(max_free_tokens),
        may_open_(marker_->has_opening()) {
    const int32_t needed = may_open_ ? marker_->opening_distance(0) : marker_->distance(0);
    const bool spelled = marker_->is_spelled();
    if (max_free_tokens != kNoBudget && (!spelled || needed > max_free_tokens)) {
      throw std::invalid_argument(spelled ? "the marker needs at least " + std::to_string(needed) +
                                                " tokens"
                                          : "the tokens of the vocabulary do not spell the marker");
    }
    ErrorText error;
    if (spelled) answer_distance_ = inner_->distance(&error);
    if (may_open_ && answer_distance_ != kUnknownDistance) avoids_opening_ = avoids_opening();
    if (may_open_) opening_tokens_.reserve(marker_->max_opening_tokens());
    skipped_.reserve(static_cast<size_t>(marker_->max_skipped()));
    if (marker_->max_skipped() > 0) start_row_.reserve(static_cast<size_t>(marker_->words()));
    for (const int32_t stop : stop_ids) {
      if (stop < 0 || stop >= marker_->vocab_size()) {
        throw std::invalid_argument("a stop id is out of range");
      }
    }
  }

  Outcome accept(int32_t token, ErrorText* error) noexcept override {
    if (may_open_) return accept_opening(token, error);
    if (started_) {
      const Outcome outcome = inner_->accept(token, error);
      if (outcome != Outcome::kNo || in_grammar_text()) {
        if (outcome == Outcome::kYes && num_grammar_tokens_++ == 0) first_size_ = 1;
        return outcome;
      }
      const Marker::Join* join = find(marker_->joins_after_marker(), token);
      if (join == nullptr) return Outcome::kNo;
      const Outcome joined = accept_join(*join, error);
      if (joined != Outcome::kYes) return joined;
      if (join->size == 0) {
        skipped_.push_back(join->space);
      } else {
        first_size_ = join->size;
        num_grammar_tokens_ = 1;
      }
      return Outcome::kYes;
    }
    if (stopped_ || token < 0 || token >= marker_->vocab_size()) return Outcome::kNo;
    if (is_stop(token)) {
      if (marker_->required()) return Outcome::kNo;
      push();
      stopped_ = true;
      return Outcome::kYes;
    }
    const Marker::Step step = marker_->step(state_, token);
    if (distance_after(step) > free_tokens_left() - 1) return Outcome::kNo;
    if (!step.legal) {
      const Marker::Join* join = step.found ? find(marker_->joins(state_), token) : nullptr;
      if (join == nullptr) return Outcome::kNo;
      const Outcome joined = accept_join(*join, error);
      if (joined != Outcome::kYes) return joined;
      marker_space_ = join->space;
      marker_size_ = join->size;
    }
    push();
    state_ = step.state;
    started_ = step.found;
    return Outcome::kYes;
  }

  int accept_all(const int32_t* tokens, int count, ErrorText* error) noexcept override {
    if (!started_ || num_grammar_tokens_ == 0) {
      return NativeMatcher::accept_all(tokens, count, error);
    }
    const int accepted = inner_->accept_all(tokens, count, error);
    num_grammar_tokens_ += std::max(accepted, 0);
    return accepted;
  }

  Filled fill(int32_t* row, int64_t words, int32_t budget, ErrorText* error) noexcept override {
    if (may_open_) return fill_opening(row, words, budget, error);
    if (started_) {
      const Filled filled = inner_->fill(row, words, budget, error);
      const bool written = filled == Filled::kMask || filled == Filled::kNarrowed;
      if (!written || in_grammar_text()) return filled;
      const bool limited = budget != kNoBudget;
      if (limited && !fill_start_row(error)) return Filled::kFailed;
      const int32_t* start_row = limited ? start_row_.data() : row;
      return add_joins(marker_->joins_after_marker(), start_row, row, budget, filled, error);
    }
    const int32_t* legal = marker_->row(state_);
    const int32_t max_next = max_distance_after(budget);
    const bool narrows = max_next < marker_->max_distance();
    if (legal == nullptr && !narrows) return Filled::kFree;
    if (!has_size(words, error)) return Filled::kFailed;
    if (legal != nullptr) {
      std::copy(legal, legal + words, row);
    } else {
      allow_all(row, words);
    }
    for (const int32_t stop : stop_ids_) {
      const int32_t bit = static_cast<int32_t>(1u << (stop & 31));
      if (marker_->required()) {
        row[stop >> 5] &= ~bit;
      } else {
        row[stop >> 5] |= bit;
      }
    }
    const Filled filled = narrows ? narrow(row, words, max_next) : Filled::kMask;
    const std::vector<Marker::Join>& joins = marker_->joins(state_);
    if (joins.empty()) return filled;
    if (!fill_start_row(error)) return Filled::kFailed;
    return add_joins(joins, start_row_.data(), row, budget, filled, error);
  }

  int32_t distance(ErrorText* error) noexcept override {
    if (started_) return inner_->distance(error);
    if (stopped_) return 0;
    if (answer_distance_ == kUnknownDistance) return kUnknownDistance;
    if (!may_open_) return marker_->distance(state_) + answer_distance_;
    const int32_t opened = marker_->opening_distance(state_) + answer_distance_;
    // Before the first token, the output can also be completed without free text, with the shortest
    // text of the grammar. This is certain only if no token that can belong to the opening begins a
    // text of the grammar.
    const bool both = avoids_opening_ && opening_tokens_.empty();
    return both ? std::min(opened, answer_distance_) : opened;
  }

  Outcome rollback(int32_t tokens, ErrorText* error) noexcept override {
    if (tokens <= 0) return Outcome::kYes;
    const int64_t inside = std::min<int64_t>(tokens, num_grammar_tokens_);
    const int64_t skipped =
        std::min<int64_t>(tokens - inside, static_cast<int64_t>(skipped_.size()));
    const int64_t free = std::min(tokens - inside - skipped, num_free_tokens_);
    const int64_t first = tokens - inside - skipped - free;
    if (free > std::min(num_free_tokens_ - first_undoable_, kHistory) ||
        first > static_cast<int64_t>(opening_tokens_.size())) {
      error->keep("rollback of more tokens of free text than the history has");
      return Outcome::kFailed;
    }
    // The grammar's matcher may have accepted several tokens for one: see Marker::Join.
    int64_t accepted = inside;
    if (inside > 0 && inside == num_grammar_tokens_) accepted += first_size_ - 1;
    if (free > 0) accepted += marker_size_;
    if (accepted > 0) {
      const Outcome outcome = inner_->rollback(static_cast<int32_t>(accepted), error);
      if (outcome == Outcome::kFailed) return outcome;
      num_grammar_tokens_ -= inside;
    }
    // If the output begins like the opening but then differs from it, `opening_tokens_` still
    // contains the matching tokens, and `num_grammar_tokens_` counts only the tokens after them.
    // When all of the counted tokens are undone, the next tokens can again complete the opening.
    const bool in_opening = num_grammar_tokens_ == 0 && marker_->has_opening() && !opened_;
    skipped_.resize(skipped_.size() - static_cast<size_t>(skipped));
    if (inside + skipped == tokens && !in_opening) return Outcome::kYes;
    started_ = stopped_ = false;
    if (free > 0) {
      marker_space_ = marker_size_ = 0;
      // `history_` has one state for each of the last kHistory tokens of the free text: the state
      // before the token. Some of these tokens are now undone. The tokens before these kHistory
      // tokens still cannot be undone later.
      first_undoable_ = std::max(first_undoable_, num_free_tokens_ - kHistory);
      num_free_tokens_ -= free;
      state_ = history_[static_cast<size_t>(num_free_tokens_ % kHistory)];
    }
    const bool changes = first > 0 || in_opening;
    return changes ? roll_back_opening(static_cast<size_t>(first), error) : Outcome::kYes;
  }

  Outcome is_terminated(ErrorText* error) noexcept override {
    if (may_open_) return Outcome::kNo;
    if (started_) return inner_->is_terminated(error);
    return stopped_ ? Outcome::kYes : Outcome::kNo;
  }

 private:
  static constexpr int64_t kHistory = 64;

  // Accepts a token while it is not yet known whether the output begins with the marker's opening
  // text (invariant 5 of this file).
  Outcome accept_opening(int32_t token, ErrorText* error) noexcept {
    if (token < 0 || token >= marker_->vocab_size()) return Outcome::kNo;
    Marker::OpeningStep step{Marker::Opening::kNone, 0, false};
    if (!is_stop(token)) step = marker_->opening_step(state_, token);
    if (step.result == Marker::Opening::kIllegal) return Outcome::kNo;
    if (distance_after(step) > free_tokens_left() - 1) return Outcome::kNo;
    if (step.result == Marker::Opening::kComplete) {
      const Outcome outcome = inner_->rollback(static_cast<int32_t>(in_grammar_), error);
      if (outcome == Outcome::kFailed) return outcome;
      opening_tokens_.push_back(token);
      begin_free_text(step);
      return Outcome::kYes;
    }
    bool in_grammar = in_grammar_ == opening_tokens_.size();
    if (in_grammar) {
      const Outcome outcome = inner_->accept(token, error);
      if (outcome == Outcome::kFailed) return outcome;
      in_grammar = outcome == Outcome::kYes;
    }
    if (step.result == Marker::Opening::kNone) {
      if (!in_grammar) return Outcome::kNo;
      may_open_ = false;
      started_ = true;
      num_grammar_tokens_ = first_size_ = 1;
      return Outcome::kYes;
    }
    opening_tokens_.push_back(token);
    in_grammar_ += in_grammar;
    state_ = step.state;
    return Outcome::kYes;
  }

  void begin_free_text(const Marker::OpeningStep& step) noexcept {
    may_open_ = false;
    opened_ = true;
    state_ = step.state;
    started_ = step.found;
  }

  Filled fill_opening(int32_t* row, int64_t words, int32_t budget, ErrorText* error) noexcept {
    if (!has_size(words, error)) return Filled::kFailed;
    const int32_t* opening = marker_->opening_row(state_);
    const std::vector<int32_t>& illegal = marker_->opening_illegal(state_);
    const int32_t max_next = max_distance_after(budget);
    const bool narrows = max_next < marker_->max_opening_distance();
    Filled filled = Filled::kMask;
    if (in_grammar_ < opening_tokens_.size()) {
      std::copy(opening, opening + words, row);
    } else {
      filled = inner_->fill(row, words, budget, error);
      if (filled == Filled::kFailed) return filled;
      if (filled == Filled::kFree && illegal.empty() && !narrows) return filled;
      if (filled == Filled::kFree) {
        allow_all(row, words);
        filled = Filled::kMask;
      }
      for (int64_t w = 0; w < words; ++w) row[w] |= opening[w];
      for (const int32_t token : illegal) clear(row, token);
    }
    if (narrows && narrow_opening(row, words, max_next) == Filled::kNarrowed) {
      filled = Filled::kNarrowed;
    }
    return filled;
  }

  // Returns the number of further tokens within which opening and marker must be complete;
  // kNoBudget: no limit.
  int32_t free_tokens_left() const noexcept {
    if (max_free_tokens_ == kNoBudget) return kNoBudget;
    return max_free_tokens_ - static_cast<int32_t>(num_free_tokens_) -
           static_cast<int32_t>(opening_tokens_.size());
  }
  // Returns how many tokens the end of opening and marker may be away after the next token: both
  // the limit of free tokens and, if the distance of the grammar is known, `budget` restrict this.
  int32_t max_distance_after(int32_t budget) const noexcept {
    const bool closes = budget != kNoBudget && answer_distance_ != kUnknownDistance;
    return std::min(free_tokens_left() - 1, closes ? budget - 1 - answer_distance_ : kNoBudget);
  }
  // Return how many tokens complete opening and marker after a token of the free text.
  int32_t distance_after(const Marker::Step& step) const noexcept {
    return step.found ? 0 : marker_->distance(step.state);
  }
  int32_t distance_after(const Marker::OpeningStep& step) const noexcept {
    if (step.found || step.result == Marker::Opening::kNone) return 0;
    const bool partial = step.result == Marker::Opening::kPartial;
    return partial ? marker_->opening_distance(step.state) : marker_->distance(step.state);
  }

  // Removes from the row of the free text the tokens after which the marker needs more than
  // `max_next` tokens.
  Filled narrow(int32_t* row, int64_t words, int32_t max_next) const noexcept {
    return remove_if(row, words, [&](int32_t token) {
      return distance_after(marker_->step(state_, token)) > max_next;
    });
  }
  // Does the same for the row of the opening.
  Filled narrow_opening(int32_t* row, int64_t words, int32_t max_next) const noexcept {
    return remove_if(row, words, [&](int32_t token) {
      const Marker::OpeningStep step = marker_->opening_step(state_, token);
      return step.result != Marker::Opening::kNone && distance_after(step) > max_next;
    });
  }
  // Removes tokens from a row, but no stop tokens. Returns kNarrowed if a token was removed.
  template <class Predicate>
  Filled remove_if(int32_t* row, int64_t words, Predicate removes) const noexcept {
    Filled filled = Filled::kMask;
    for (int64_t w = 0; w < words; ++w) {
      for (uint32_t bits = static_cast<uint32_t>(row[w]); bits != 0; bits &= bits - 1) {
        const auto token = static_cast<int32_t>(w * 32 + __builtin_ctz(bits));
        if (is_stop(token) || !removes(token)) continue;
        clear(row, token);
        filled = Filled::kNarrowed;
      }
    }
    return filled;
  }

  static const Marker::Join* find(const std::vector<Marker::Join>& joins, int32_t token) noexcept {
    const auto found = std::lower_bound(
        joins.begin(), joins.end(), token,
        [](const Marker::Join& join, int32_t wanted) { return join.token < wanted; });
    return found != joins.end() && found->token == token ? &*found : nullptr;
  }

  // Makes the grammar's matcher, which must be at its start, accept the text that a token has after
  // the white space. Changes nothing unless the result is kYes.
  Outcome accept_join(const Marker::Join& join, ErrorText* error) noexcept {
    if (join.space > space_left() || is_stop(join.token)) return Outcome::kNo;
    if (join.size == 0) return Outcome::kYes;
    const int32_t* spelling = marker_->spelling(join);
    if (std::any_of(spelling, spelling + join.size, [&](int32_t id) { return is_stop(id); })) {
      return Outcome::kNo;
    }
    const int accepted = inner_->accept_all(spelling, join.size, error);
    if (accepted < 0) return Outcome::kFailed;
    if (accepted == join.size) return Outcome::kYes;
    return inner_->rollback(accepted, error) == Outcome::kFailed ? Outcome::kFailed : Outcome::kNo;
  }

  // Adds the legal tokens of `joins` to a row. The grammar's matcher must be at its start;
  // `start_row` is its row without a budget. `filled` says whether the budget has excluded tokens
  // from `row`.
  Filled add_joins(const std::vector<Marker::Join>& joins, const int32_t* start_row, int32_t* row,
                   int32_t budget, Filled filled, ErrorText* error) noexcept {
    const auto has = [](const int32_t* bits, int32_t id) {
      return ((bits[id >> 5] >> (id & 31)) & 1) != 0;
    };
    const bool closes = budget != kNoBudget && distance(error) != kUnknownDistance;
    for (const Marker::Join& join : joins) {
      if (has(row, join.token)) continue;
      if (join.size > 0 && !has(start_row, *marker_->spelling(join))) continue;
      if (closes && started_) {
        // A token that the grammar accepts as a whole begins the grammar's text. The budget has
        // excluded it from the row.
        const Outcome begins = inner_->accept(join.token, error);
        if (begins == Outcome::kFailed) return Filled::kFailed;
        if (begins == Outcome::kYes) {
          if (inner_->rollback(1, error) == Outcome::kFailed) return Filled::kFailed;
          continue;
        }
      }
      const Outcome joined = accept_join(join, error);
      if (joined == Outcome::kFailed) return Filled::kFailed;
      if (joined == Outcome::kNo) continue;
      const int32_t distance = closes ? inner_->distance(error) : 0;
      if (join.size > 0 && inner_->rollback(join.size, error) == Outcome::kFailed) {
        return Filled::kFailed;
      }
      // The distance is unknown if the vocabulary has no tokens for the rest of the text.
      if (closes && (distance == kUnknownDistance || distance > budget - 1)) {
        filled = Filled::kNarrowed;
        continue;
      }
      row[join.token >> 5] |= static_cast<int32_t>(1u << (join.token & 31));
    }
    return filled;
  }

  // Writes the row of the grammar's start, without a budget, to `start_row_`, unless this row has
  // been written before. The grammar's matcher must be at its start.
  bool fill_start_row(ErrorText* error) noexcept {
    if (!start_row_.empty()) return true;
    start_row_.resize(static_cast<size_t>(marker_->words()));
    const Filled filled = inner_->fill(start_row_.data(), marker_->words(), kNoBudget, error);
    if (filled == Filled::kFree) allow_all(start_row_.data(), marker_->words());
    return filled != Filled::kFailed;
  }

  // Returns whether no text of the grammar begins with a token that can belong to the opening.
  bool avoids_opening() const {
    std::vector<int32_t> row(static_cast<size_t>(marker_->words()));
    ErrorText error;
    const Filled filled = inner_->fill(row.data(), marker_->words(), kNoBudget, &error);
    if (filled != Filled::kMask) return false;
    const int32_t* opening = marker_->opening_row(0);
    for (size_t w = 0; w < row.size(); ++w) {
      if ((row[w] & opening[w]) != 0) return false;
    }
    const std::vector<int32_t>& illegal = marker_->opening_illegal(0);
    return std::none_of(illegal.begin(), illegal.end(), [&](int32_t token) {
      return ((row[static_cast<size_t>(token >> 5)] >> (token & 31)) & 1) != 0;
    });
  }

  void allow_all(int32_t* row, int64_t words) const noexcept {
    std::fill(row, row + words, -1);
    row[words - 1] = last_word_bits(marker_->vocab_size());
  }
  static void clear(int32_t* row, int32_t token) noexcept {
    row[token >> 5] &= static_cast<int32_t>(~(1u << (token & 31)));
  }

  // Undoes the last `count` of `opening_tokens_`. The output must not have any tokens after them.
  Outcome roll_back_opening(size_t count, ErrorText* error) noexcept {
    const size_t left = opening_tokens_.size() - count;
    const size_t in_grammar = std::min(in_grammar_, left);
    if (opened_) {  // the matcher of the grammar is at its start
      const int accepted =
          inner_->accept_all(opening_tokens_.data(), static_cast<int>(in_grammar), error);
      if (accepted != static_cast<int>(in_grammar)) {
        error->keep("the grammar refuses tokens that it has accepted");
        return Outcome::kFailed;
      }
    } else if (in_grammar < in_grammar_) {
      const Outcome outcome =
          inner_->rollback(static_cast<int32_t>(in_grammar_ - in_grammar), error);
      if (outcome == Outcome::kFailed) return outcome;
    }
    opening_tokens_.resize(left);
    in_grammar_ = in_grammar;
    may_open_ = true;
    opened_ = false;
    state_ = 0;
    for (const int32_t token : opening_tokens_) state_ = marker_->opening_step(state_, token).state;
    return Outcome::kYes;
  }

  bool has_size(int64_t words, ErrorText* error) const noexcept {
    if (words == marker_->words()) return true;
    error->keep("the mask row does not have the size of the matcher's vocabulary");
    return false;
  }
  // Number of white-space characters that may still lie between the marker and the grammar.
  int32_t space_left() const noexcept {
    return std::accumulate(skipped_.begin(), skipped_.end(), marker_->max_skipped() - marker_space_,
                           std::minus<int32_t>());
  }
  // Whether the output contains text of the grammar, after which no white space is skipped.
  bool in_grammar_text() const noexcept { return num_grammar_tokens_ > 0 || marker_size_ > 0; }
  void push() noexcept { history_[static_cast<size_t>(num_free_tokens_++ % kHistory)] = state_; }
  bool is_stop(int32_t token) const noexcept {
    return std::find(stop_ids_.begin(), stop_ids_.end(), token) != stop_ids_.end();
  }

  NativeMatcher* inner_;
  std::shared_ptr<const Marker> marker_;
  std::vector<int32_t> stop_ids_;
  const int32_t max_free_tokens_;
  int32_t answer_distance_ = kUnknownDistance;  // distance of the grammar's start
  bool avoids_opening_ = false;                 // result of avoids_opening()
  std::array<int32_t, kHistory> history_{};  // state of the scanner before each of the last tokens
  int64_t num_free_tokens_ = 0;              // number of tokens of the free text after the opening
  int64_t first_undoable_ = 0;      // index of the first free-text token that can be undone
  int64_t num_grammar_tokens_ = 0;  // number of tokens of the grammar's text
  int32_t first_size_ = 1;          // number of tokens that `inner_` has accepted for the first one
  int32_t marker_space_ = 0;        // white-space characters after the marker in its last token
  int32_t marker_size_ = 0;         // number of tokens that `inner_` has accepted for that token
  std::vector<int32_t> start_row_;  // see fill_start_row()
  std::vector<int32_t> skipped_;  // number of characters of each white-space token after the marker
  int32_t state_ = 0;             // for the next call of opening_step() or Marker::step()
  bool started_ = false;          // whether the grammar applies to the next token: the marker is
                                  // complete, or the output does not begin with the opening
  bool stopped_ = false;          // whether a stop token has ended the free text
  // The tokens at the start of the output that match the opening or its beginning. Until the
  // opening is complete, `inner_` has also accepted the first `in_grammar_` of these tokens.
  std::vector<int32_t> opening_tokens_;
  size_t in_grammar_ = 0;
  bool may_open_;        // whether the tokens so far can become the opening
  bool opened_ = false;  // whether the output has begun with the complete opening
};

}  // namespace

void bind_marked(nb::module_& guide) {
  nb::class_<Marker>(guide, "Marker")
      .def(
          "__init__",
          [](Marker* self, const std::vector<int32_t>& ids, const nb::bytes& text,
             const std::vector<nb::bytes>& tokens, int64_t vocab_size, bool required,
             const std::vector<int32_t>& opening_ids, const nb::bytes& opening, int32_t max_space,
             int32_t max_skipped) {
            std::vector<std::string> bytes;
            bytes.reserve(tokens.size());
            for (const nb::bytes& token : tokens) bytes.emplace_back(token.c_str(), token.size());
            const std::string marker(text.c_str(), text.size());
            const std::string begin(opening.c_str(), opening.size());
            nb::gil_scoped_release release;  // a large vocabulary takes a tenth of a second
            new (self) Marker(ids, marker, std::move(bytes), vocab_size, required, opening_ids,
                              begin, max_space, max_skipped);
          },
          nb::arg("ids"), nb::arg("text"), nb::arg("tokens"), nb::arg("vocab_size"),
          nb::arg("required"), nb::arg("opening_ids"), nb::arg("opening"), nb::arg("max_space"),
          nb::arg("max_skipped"));
  nb::class_<MarkedMatcher, NativeMatcher>(guide, "MarkedMatcher")
      .def(nb::init<NativeMatcher*, std::shared_ptr<const Marker>, const std::vector<int32_t>&,
                    int32_t>(),
           nb::arg("inner"), nb::arg("marker"), nb::arg("stop_ids"),
           nb::arg("max_free_tokens") = kNoBudget, nb::keep_alive<1, 2>());
}

}  // namespace graft::guide
