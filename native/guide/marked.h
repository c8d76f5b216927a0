// Free text until a marker, then the grammar: a scanner of bytes or ids in front of a matcher.
//
// 1. The grammar begins with the token after the one that completes the marker. A token that would
//    carry the marker's end and further text is illegal, so no byte escapes the grammar.
// 2. Text is scanned across tokens; a token that is no text breaks a marker that had begun.
// 3. Rollback counts tokens over both parts: it un-starts the matcher and restores the scanner. Of
//    the free part the last kHistory tokens can be undone.
// 4. A stop token in the free part terminates, unless the marker is required; it is then illegal.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "matcher.h"

namespace graft::guide {

// A marker for one vocabulary, read-only and shared by its matchers.
class Marker {
 public:
  // `ids` are tokens that are the marker by themselves; `text` is the marker as bytes, or empty.
  // `tokens` are the bytes of each id, empty for what is no text. Throws std::invalid_argument when
  // there is no marker, or an id is out of range.
  Marker(const std::vector<int32_t>& ids, const std::string& text, std::vector<std::string> tokens,
         int64_t vocab_size, bool required);

  struct Step {
    bool legal;
    bool found;
    int32_t state;
  };
  // Where the scanner goes from `state` with an id of [0, vocab_size) that is no stop id.
  Step step(int32_t state, int32_t token) const noexcept;
  // The legal ids in `state`, stop ids included; null: all of them.
  const int32_t* row(int32_t state) const noexcept;
  int64_t vocab_size() const { return vocab_size_; }
  int64_t words() const { return (vocab_size_ + 31) / 32; }
  bool required() const { return required_; }

 private:
  void make_rows();
  int32_t next(int32_t state, unsigned char byte) const noexcept;

  std::vector<int32_t> ids_;
  std::string text_;
  // Knuth-Morris-Pratt: where to go on in the text if the next byte is not the one at a state. A
  // state with the same byte is left out, so that a repetitive text takes few steps back too.
  std::vector<int32_t> fallback_;
  std::vector<std::string> tokens_;
  int64_t vocab_size_;
  bool required_;
  // A token can run over the marker's end in the last states only: each of those has a row, and the
  // `shared_` states before them share row 0, where every id is legal. Empty: every id is.
  size_t shared_ = 0;
  std::vector<std::vector<int32_t>> rows_;
};

class MarkedMatcher final : public NativeMatcher {
 public:
  static constexpr int64_t kHistory = 64;

  // `inner` is borrowed and stands at the start of its grammar.
  MarkedMatcher(NativeMatcher* inner, std::shared_ptr<const Marker> marker,
                const std::vector<int32_t>& stop_ids);

  Answer accept(int32_t token, ErrorText* error) noexcept override;
  Filled fill(int32_t* row, int64_t words, ErrorText* error) noexcept override;
  Answer rollback(int32_t tokens, ErrorText* error) noexcept override;
  Answer is_terminated(ErrorText* error) noexcept override;

 private:
  void push() noexcept { history_[static_cast<size_t>(scanned_++ % kHistory)] = state_; }
  bool is_stop(int32_t token) const noexcept;

  NativeMatcher* inner_;
  std::shared_ptr<const Marker> marker_;
  std::vector<int32_t> stop_ids_;
  std::array<int32_t, kHistory> history_{};  // the scanner's state before each of the last tokens
  int64_t scanned_ = 0;                      // tokens of the free part
  int64_t undone_to_ = 0;                    // tokens of the free part that cannot be undone
  int64_t inside_ = 0;                       // tokens the matcher has accepted
  int32_t state_ = 0;
  bool started_ = false;  // the marker is complete
  bool stopped_ = false;  // by a stop token in the free part
};

}  // namespace graft::guide
