// Matcher of free text that is followed by a grammar. A scanner searches the free text for a
// marker, such as the tag that ends a reasoning section; the matcher of the grammar starts after
// the marker.
//
// Invariants
// 1. The grammar begins with the token after the one that completes the marker. A token that
//    contains the end of the marker and further text is illegal, so no byte bypasses the grammar.
// 2. The marker may extend over several tokens. A token without text resets the search.
// 3. rollback() may undo tokens of the grammar and then tokens of the free text, for which it
//    restores the state of the scanner. At most the last kHistory tokens of the free text can be
//    undone.
// 4. A stop token in the free text terminates the matcher. If the marker is required, a stop token
//    in the free text is illegal.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "matcher.h"

namespace nb = nanobind;

namespace graft::guide {
namespace {

// Marker for one vocabulary; immutable and shared by its matchers.
class Marker {
 public:
  // `ids` are the tokens that are a complete marker. `text` is the marker as bytes; it may be empty
  // if there are ids. `tokens` has the bytes of each id, which are empty for ids without text.
  // Throws std::invalid_argument if there is neither an id nor a text, or if an id is out of range.
  Marker(const std::vector<int32_t>& ids, const std::string& text, std::vector<std::string> tokens,
         int64_t vocab_size, bool required);

  struct Step {
    bool legal;
    bool found;
    int32_t state;
  };
  // Returns the step of the scanner from `state` for a token id in [0, vocab_size) that is not a
  // stop id.
  Step step(int32_t state, int32_t token) const noexcept;
  // Returns the bitmask of the legal ids in `state`, including the stop ids. Returns null if all
  // ids are legal.
  const int32_t* row(int32_t state) const noexcept;
  int64_t vocab_size() const { return vocab_size_; }
  int64_t words() const { return (vocab_size_ + 31) / 32; }
  bool required() const { return required_; }

 private:
  void make_rows();
  int32_t next(int32_t state, unsigned char byte) const noexcept;

  std::vector<int32_t> ids_;
  std::string text_;
  // Knuth-Morris-Pratt: state at which matching continues if the next byte does not match. States
  // that would fail on the same byte are skipped, so that repetitive texts need few steps.
  std::vector<int32_t> fallback_;
  std::vector<std::string> tokens_;
  int64_t vocab_size_;
  bool required_;
  // Bitmasks of the legal ids by state. A token can extend past the end of the marker only in the
  // last states of the scanner, and each of these states has its own row. The first `shared_`
  // states share row 0, in which every id is legal. An empty row means that every id is legal and
  // no mask is needed.
  size_t shared_ = 0;
  std::vector<std::vector<int32_t>> rows_;
};

Marker::Marker(const std::vector<int32_t>& ids, const std::string& text,
               std::vector<std::string> tokens, int64_t vocab_size, bool required)
    : ids_(ids),
      text_(text),
      fallback_(text.size()),
      tokens_(std::move(tokens)),
      vocab_size_(vocab_size),
      required_(required) {
  if (ids.empty() && text.empty()) throw std::invalid_argument("the marker is empty");
  if (static_cast<int64_t>(tokens_.size()) > vocab_size_) {
    throw std::invalid_argument("there are more tokens than the vocabulary has ids");
  }
  for (const int32_t id : ids) {
    if (id < 0 || id >= vocab_size_) throw std::invalid_argument("a marker id is out of range");
  }
  const auto at = [&](int32_t state) { return text[static_cast<size_t>(state)]; };
  // Length of the longest proper prefix of the first i bytes that is also a suffix of these bytes.
  int32_t border = 0;
  if (!text.empty()) fallback_[0] = -1;
  for (size_t i = 1; i < text.size(); ++i) {
    fallback_[i] = text[i] == at(border) ? fallback_[static_cast<size_t>(border)] : border;
    while (border >= 0 && text[i] != at(border)) border = fallback_[static_cast<size_t>(border)];
    ++border;
  }
  make_rows();
}

void Marker::make_rows() {
  size_t longest = 1;
  for (const std::string& token : tokens_) longest = std::max(longest, token.size());
  const size_t states = text_.size();
  const size_t num_rows = std::min(states, longest - 1);
  shared_ = states == 0 ? 1 : states - num_rows;
  std::vector<int32_t> all(static_cast<size_t>(words()), -1);
  all.back() = last_word_bits(vocab_size_);
  rows_.assign(1 + num_rows, all);
  for (int32_t token = 0; token < static_cast<int32_t>(tokens_.size()); ++token) {
    const size_t size = std::max<size_t>(tokens_[static_cast<size_t>(token)].size(), 1);
    for (size_t state = states - std::min(states, size - 1); state < states; ++state) {
      if (step(static_cast<int32_t>(state), token).legal) continue;
      rows_[1 + state - shared_][static_cast<size_t>(token >> 5)] &=
          static_cast<int32_t>(~(1u << (token & 31)));
    }
  }
  for (std::vector<int32_t>& row : rows_) {
    if (row == all && !required_) row.clear();
  }
}

int32_t Marker::next(int32_t state, unsigned char byte) const noexcept {
  while (state >= 0 && static_cast<unsigned char>(text_[static_cast<size_t>(state)]) != byte) {
    state = fallback_[static_cast<size_t>(state)];
  }
  return state + 1;
}

Marker::Step Marker::step(int32_t state, int32_t token) const noexcept {
  if (std::find(ids_.begin(), ids_.end(), token) != ids_.end()) return {true, true, 0};
  if (text_.empty()) return {true, false, 0};
  if (token >= static_cast<int32_t>(tokens_.size())) return {true, false, 0};
  const std::string& bytes = tokens_[static_cast<size_t>(token)];
  if (bytes.empty()) return {true, false, 0};
  for (size_t i = 0; i < bytes.size(); ++i) {
    state = next(state, static_cast<unsigned char>(bytes[i]));
    if (state == static_cast<int32_t>(text_.size())) {
      const bool last = i + 1 == bytes.size();
      return {last, last, 0};
    }
  }
  return {true, false, state};
}

const int32_t* Marker::row(int32_t state) const noexcept {
  const size_t at = static_cast<size_t>(state);
  const std::vector<int32_t>& row = rows_[at < shared_ ? 0 : 1 + at - shared_];
  return row.empty() ? nullptr : row.data();
}

class MarkedMatcher final : public NativeMatcher {
 public:
  // `inner` is the matcher of the grammar, at its start. It is borrowed: the caller keeps it alive.
  MarkedMatcher(NativeMatcher* inner, std::shared_ptr<const Marker> marker,
                const std::vector<int32_t>& stop_ids)
      : inner_(inner), marker_(std::move(marker)), stop_ids_(stop_ids) {
    for (const int32_t stop : stop_ids) {
      if (stop < 0 || stop >= marker_->vocab_size()) {
        throw std::invalid_argument("a stop id is out of range");
      }
    }
  }

  Answer accept(int32_t token, ErrorText* error) noexcept override {
    if (started_) {
      const Answer answer = inner_->accept(token, error);
      if (answer == Answer::kYes) ++inside_;
      return answer;
    }
    if (stopped_ || token < 0 || token >= marker_->vocab_size()) return Answer::kNo;
    if (is_stop(token)) {
      if (marker_->required()) return Answer::kNo;
      push();
      stopped_ = true;
      return Answer::kYes;
    }
    const Marker::Step step = marker_->step(state_, token);
    if (!step.legal) return Answer::kNo;
    push();
    state_ = step.state;
    started_ = step.found;
    return Answer::kYes;
  }

  int accept_all(const int32_t* tokens, int count, ErrorText* error) noexcept override {
    if (!started_) return NativeMatcher::accept_all(tokens, count, error);
    const int accepted = inner_->accept_all(tokens, count, error);
    inside_ += std::max(accepted, 0);
    return accepted;
  }

  Filled fill(int32_t* row, int64_t words, ErrorText* error) noexcept override {
    if (started_) return inner_->fill(row, words, error);
    const int32_t* legal = marker_->row(state_);
    if (legal == nullptr) return Filled::kFree;
    if (words != marker_->words()) {
      error->keep("the mask row does not have the size of the matcher's vocabulary");
      return Filled::kFailed;
    }
    std::copy(legal, legal + words, row);
    for (const int32_t stop : stop_ids_) {
      const int32_t bit = static_cast<int32_t>(1u << (stop & 31));
      if (marker_->required()) {
        row[stop >> 5] &= ~bit;
      } else {
        row[stop >> 5] |= bit;
      }
    }
    return Filled::kMask;
  }

  Answer rollback(int32_t tokens, ErrorText* error) noexcept override {
    if (tokens <= 0) return Answer::kYes;
    const int64_t inside = std::min<int64_t>(tokens, inside_);
    const int64_t outside = tokens - inside;
    if (outside > std::min(scanned_ - undone_to_, kHistory)) {
      error->keep("rollback of more tokens of free text than the history has");
      return Answer::kFailed;
    }
    if (inside > 0) {
      const Answer answer = inner_->rollback(static_cast<int32_t>(inside), error);
      if (answer == Answer::kFailed) return answer;
      inside_ -= inside;
    }
    if (outside == 0) return Answer::kYes;
    // The tokens that are undone now have overwritten older states in the ring, so a later call
    // cannot undo the tokens of these states.
    undone_to_ = std::max(undone_to_, scanned_ - kHistory);
    scanned_ -= outside;
    state_ = history_[static_cast<size_t>(scanned_ % kHistory)];
    started_ = stopped_ = false;
    return Answer::kYes;
  }

  Answer is_terminated(ErrorText* error) noexcept override {
    if (started_) return inner_->is_terminated(error);
    return stopped_ ? Answer::kYes : Answer::kNo;
  }

 private:
  static constexpr int64_t kHistory = 64;

  void push() noexcept { history_[static_cast<size_t>(scanned_++ % kHistory)] = state_; }
  bool is_stop(int32_t token) const noexcept {
    return std::find(stop_ids_.begin(), stop_ids_.end(), token) != stop_ids_.end();
  }

  NativeMatcher* inner_;
  std::shared_ptr<const Marker> marker_;
  std::vector<int32_t> stop_ids_;
  std::array<int32_t, kHistory> history_{};  // state of the scanner before each of the last tokens
  int64_t scanned_ = 0;                      // number of tokens of the free text
  int64_t undone_to_ = 0;                    // number of leading tokens that cannot be undone
  int64_t inside_ = 0;                       // number of tokens that `inner_` has accepted
  int32_t state_ = 0;
  bool started_ = false;  // whether the marker is complete
  bool stopped_ = false;  // whether a stop token has ended the free text
};

}  // namespace

void bind_marked(nb::module_& guide) {
  nb::class_<Marker>(guide, "Marker")
      .def(
          "__init__",
          [](Marker* self, const std::vector<int32_t>& ids, const nb::bytes& text,
             const std::vector<nb::bytes>& tokens, int64_t vocab_size, bool required) {
            std::vector<std::string> bytes;
            bytes.reserve(tokens.size());
            for (const nb::bytes& token : tokens) bytes.emplace_back(token.c_str(), token.size());
            new (self)
                Marker(ids, {text.c_str(), text.size()}, std::move(bytes), vocab_size, required);
          },
          nb::arg("ids"), nb::arg("text"), nb::arg("tokens"), nb::arg("vocab_size"),
          nb::arg("required"));
  nb::class_<MarkedMatcher, NativeMatcher>(guide, "MarkedMatcher")
      .def(nb::init<NativeMatcher*, std::shared_ptr<const Marker>, const std::vector<int32_t>&>(),
           nb::arg("inner"), nb::arg("marker"), nb::arg("stop_ids"), nb::keep_alive<1, 2>());
}

}  // namespace graft::guide
