#include "marked.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace graft::guide {

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
    throw std::invalid_argument("more tokens than the vocabulary has ids");
  }
  for (const int32_t id : ids) {
    if (id < 0 || id >= vocab_size_) throw std::invalid_argument("a marker id is out of range");
  }
  const auto at = [&](int32_t state) { return text[static_cast<size_t>(state)]; };
  int32_t border = 0;  // longest proper prefix of the text before i that ends it
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
  const size_t states = text_.size(), most = std::min(states, longest - 1);
  shared_ = states == 0 ? 1 : states - most;
  std::vector<int32_t> all(static_cast<size_t>(words()), -1);
  all.back() = last_word_bits(vocab_size_);
  rows_.assign(1 + most, all);
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

MarkedMatcher::MarkedMatcher(NativeMatcher* inner, std::shared_ptr<const Marker> marker,
                             const std::vector<int32_t>& stop_ids)
    : inner_(inner), marker_(std::move(marker)), stop_ids_(stop_ids) {
  for (const int32_t stop : stop_ids) {
    if (stop < 0 || stop >= marker_->vocab_size()) {
      throw std::invalid_argument("a stop id is out of range");
    }
  }
}

bool MarkedMatcher::is_stop(int32_t token) const noexcept {
  return std::find(stop_ids_.begin(), stop_ids_.end(), token) != stop_ids_.end();
}

Answer MarkedMatcher::accept(int32_t token, ErrorText* error) noexcept {
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

Filled MarkedMatcher::fill(int32_t* row, int64_t words, ErrorText* error) noexcept {
  if (started_) return inner_->fill(row, words, error);
  const int32_t* legal = marker_->row(state_);
  if (legal == nullptr) return Filled::kFree;
  if (words != marker_->words()) {
    error->keep("the mask row is not one of this vocabulary");
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

Answer MarkedMatcher::rollback(int32_t tokens, ErrorText* error) noexcept {
  if (tokens <= 0) return Answer::kYes;
  const int64_t inside = std::min<int64_t>(tokens, inside_);
  const int64_t outside = tokens - inside;
  if (outside > std::min(scanned_ - undone_to_, kHistory)) {
    error->keep("rollback of more free text than is kept");
    return Answer::kFailed;
  }
  if (inside > 0) {
    const Answer answer = inner_->rollback(static_cast<int32_t>(inside), error);
    if (answer == Answer::kFailed) return answer;
    inside_ -= inside;
  }
  if (outside == 0) return Answer::kYes;
  // entries older than the ring were overwritten by those undone now
  undone_to_ = std::max(undone_to_, scanned_ - kHistory);
  scanned_ -= outside;
  state_ = history_[static_cast<size_t>(scanned_ % kHistory)];
  started_ = stopped_ = false;
  return Answer::kYes;
}

Answer MarkedMatcher::is_terminated(ErrorText* error) noexcept {
  if (started_) return inner_->is_terminated(error);
  return stopped_ ? Answer::kYes : Answer::kNo;
}

}  // namespace graft::guide
