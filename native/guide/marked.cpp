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
  for (size_t i = 1; i < text.size(); ++i) {
    int32_t length = fallback_[i - 1];
    while (length > 0 && text[i] != text[static_cast<size_t>(length)]) {
      length = fallback_[static_cast<size_t>(length - 1)];
    }
    fallback_[i] = length + (text[i] == text[static_cast<size_t>(length)] ? 1 : 0);
  }
  const size_t states = std::max<size_t>(text.size(), 1);
  rows_.resize(states);
  for (size_t state = 0; state < states; ++state) {
    std::vector<int32_t> row(static_cast<size_t>(words()));
    bool all = true;
    for (int32_t token = 0; token < vocab_size_; ++token) {
      if (!step(static_cast<int32_t>(state), token).legal) {
        all = false;
        continue;
      }
      row[static_cast<size_t>(token >> 5)] |= static_cast<int32_t>(1u << (token & 31));
    }
    if (!all || required) rows_[state] = std::move(row);
  }
}

int32_t Marker::next(int32_t state, unsigned char byte) const noexcept {
  while (state > 0 && static_cast<unsigned char>(text_[static_cast<size_t>(state)]) != byte) {
    state = fallback_[static_cast<size_t>(state - 1)];
  }
  return state + (static_cast<unsigned char>(text_[static_cast<size_t>(state)]) == byte ? 1 : 0);
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
  const std::vector<int32_t>& row = rows_[static_cast<size_t>(state)];
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
