#include "tokenize.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <queue>
#include <stdexcept>
#include <tuple>

namespace graft::guide {
namespace {

constexpr size_t kCodePoints = 0x110000;
constexpr size_t kNowhere = std::numeric_limits<size_t>::max();
constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();

bool holds(const std::string& set, char32_t c) {
  return ((static_cast<unsigned char>(set[c >> 3]) >> (c & 7)) & 1) != 0;
}

// Where a sequence of items that begins at `at` ends, or kNowhere.
size_t match(const std::vector<PatternItem>& items, size_t item, const std::vector<char32_t>& text,
             size_t at, size_t end) {
  if (item == items.size()) return at;
  const PatternItem& now = items[item];
  if (now.absent) {
    if (at < end && holds(now.set, text[at])) return kNowhere;
    return match(items, item + 1, text, at, end);
  }
  size_t taken = 0;
  while (taken < now.most && at + taken < end && holds(now.set, text[at + taken])) ++taken;
  for (;; --taken) {
    if (taken < now.least) return kNowhere;
    const size_t found = match(items, item + 1, text, at + taken, end);
    if (found != kNowhere) return found;
    if (taken == 0) return kNowhere;
  }
}

// Length of the character that begins at `at`; 1 for a byte that begins none.
size_t decode(const uint8_t* text, size_t size, size_t at, char32_t* out) {
  const uint8_t first = text[at];
  size_t length = 0;
  if (first < 0x80) length = 1;
  if (first >= 0xC2 && first < 0xE0) length = 2;
  if (first >= 0xE0 && first < 0xF0) length = 3;
  if (first >= 0xF0 && first < 0xF5) length = 4;
  *out = 0xFFFD;
  if (length == 0 || at + length > size) return 1;
  char32_t value = length == 1 ? first : first & (0x7Fu >> length);
  for (size_t i = 1; i < length; ++i) {
    if ((text[at + i] & 0xC0) != 0x80) return 1;
    value = (value << 6) | (text[at + i] & 0x3Fu);
  }
  const bool overlong = (length == 3 && value < 0x800) || (length == 4 && value < 0x10000);
  if (overlong || value >= kCodePoints || (value >= 0xD800 && value < 0xE000)) return 1;
  *out = value;
  return length;
}

}  // namespace

Encoder::Encoder(std::vector<std::string> tokens, const std::vector<Merge>& merges,
                 std::vector<Pattern> steps, bool whole_pieces)
    : tokens_(std::move(tokens)), steps_(std::move(steps)), whole_pieces_(whole_pieces) {
  std::fill(std::begin(byte_ids_), std::end(byte_ids_), kNone);
  for (size_t id = 0; id < tokens_.size(); ++id) {
    const std::string& token = tokens_[id];
    if (token.empty()) continue;
    ids_.emplace(token, static_cast<uint32_t>(id));
    if (token.size() == 1)
      byte_ids_[static_cast<unsigned char>(token[0])] = static_cast<uint32_t>(id);
  }
  for (size_t byte = 0; byte < 256; ++byte) {
    if (byte_ids_[byte] == kNone) {
      throw std::invalid_argument("byte " + std::to_string(byte) + " has no token");
    }
  }
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const Merge& merge = merges[rank];
    if (std::max({merge.left, merge.right, merge.merged}) >= tokens_.size()) {
      throw std::invalid_argument("a merge names an id that is out of range");
    }
    const uint64_t pair = (static_cast<uint64_t>(merge.left) << 32) | merge.right;
    merges_.emplace(pair, Result{static_cast<uint32_t>(rank), merge.merged});
  }
  for (const Pattern& pattern : steps_) {
    for (const std::vector<PatternItem>& items : pattern) {
      for (const PatternItem& item : items) {
        if (item.set.size() != kCodePoints / 8) throw std::invalid_argument("a set is no set");
      }
    }
  }
}

void Encoder::cut(const Pattern& pattern, const std::vector<char32_t>& characters, size_t begin,
                  size_t end, std::vector<size_t>* ends) const {
  size_t open = begin;  // of the piece that no match has claimed so far
  for (size_t at = begin; at < end;) {
    size_t found = kNowhere;
    for (const std::vector<PatternItem>& items : pattern) {
      found = match(items, 0, characters, at, end);
      if (found != kNowhere) break;
    }
    if (found == kNowhere || found == at) {
      ++at;
      continue;
    }
    if (open < at) ends->push_back(at);
    ends->push_back(found);
    open = at = found;
  }
  if (open < end) ends->push_back(end);
}

void Encoder::merge(const uint8_t* piece, size_t size, std::vector<uint32_t>* out) const {
  if (whole_pieces_) {
    const auto whole = ids_.find(std::string(reinterpret_cast<const char*>(piece), size));
    if (whole != ids_.end()) {
      out->push_back(whole->second);
      return;
    }
  }
  // Symbols are a list over positions; a merge widens the left one and removes the right one.
  std::vector<uint32_t> id(size);
  std::vector<size_t> next(size), previous(size);
  for (size_t i = 0; i < size; ++i) {
    id[i] = byte_ids_[piece[i]];
    next[i] = i + 1;
    previous[i] = i - 1;  // of the first: kNowhere
  }
  using Candidate = std::tuple<uint32_t, size_t, uint64_t>;  // rank, position, the pair it was
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<Candidate>> candidates;
  const auto consider = [&](size_t left) {
    if (left == kNowhere || next[left] >= size) return;
    const uint64_t pair = (static_cast<uint64_t>(id[left]) << 32) | id[next[left]];
    const auto found = merges_.find(pair);
    if (found != merges_.end()) candidates.emplace(found->second.rank, left, pair);
  };
  for (size_t i = 0; i + 1 < size; ++i) consider(i);
  while (!candidates.empty()) {
    const auto [rank, left, pair] = candidates.top();
    candidates.pop();
    if (id[left] == kNone || next[left] >= size) continue;
    if (((static_cast<uint64_t>(id[left]) << 32) | id[next[left]]) != pair) continue;
    const size_t right = next[left];
    id[left] = merges_.find(pair)->second.merged;
    id[right] = kNone;
    next[left] = next[right];
    if (next[left] < size) previous[next[left]] = left;
    consider(previous[left]);
    consider(left);
  }
  for (size_t i = 0; i < size; i = next[i]) out->push_back(id[i]);
}

std::vector<uint32_t> Encoder::encode(const uint8_t* text, size_t size) const {
  std::vector<char32_t> characters;
  std::vector<size_t> offsets;  // of each character, and the end
  for (size_t at = 0; at < size;) {
    char32_t character = 0;
    offsets.push_back(at);
    at += decode(text, size, at, &character);
    characters.push_back(character);
  }
  offsets.push_back(size);
  std::vector<size_t> pieces;  // ends, in characters
  if (!characters.empty()) pieces.push_back(characters.size());
  for (const Pattern& step : steps_) {
    std::vector<size_t> finer;
    size_t begin = 0;
    for (const size_t end : pieces) {
      cut(step, characters, begin, end, &finer);
      begin = end;
    }
    pieces = std::move(finer);
  }
  std::vector<uint32_t> out;
  size_t begin = 0;
  for (const size_t end : pieces) {
    merge(text + offsets[begin], offsets[end] - offsets[begin], &out);
    begin = end;
  }
  return out;
}

}  // namespace graft::guide
