// Forced text: the token to draft where a grammar leaves no choice of what to write.
//
// Text is forced where every legal token is a beginning of the longest one: they spell the same
// text and differ in how much of it they take. The longest is drafted, unless only what is certain
// is asked for: then a token counts as forced where it is the one legal id. What is drafted is
// decided by the mask row alone, hence by the prefix alone, and verification tests it as any other
// draft: a target that prefers another spelling refuses it. Where one id is legal it is always
// accepted.
//
// Read-only once made: any number of threads may ask.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace graft::guide {

class Forced {
 public:
  // `bytes` of token i are `lengths[i]` long, one after the other; 0: no text.
  Forced(const std::vector<uint32_t>& lengths, std::string bytes, bool certain)
      : bytes_(std::move(bytes)), most_(certain ? 1 : kMost) {
    starts_.reserve(lengths.size() + 1);
    starts_.push_back(0);
    for (const uint32_t length : lengths) starts_.push_back(starts_.back() + length);
    if (starts_.back() != bytes_.size()) {
      throw std::invalid_argument("the tokens' lengths do not add up to their bytes");
    }
  }

  // The forced token of a mask row; -1: there is a choice.
  int32_t token(const int32_t* row, int64_t words) const noexcept {
    int64_t used = 0;
    for (int64_t w = 0; w < words; ++w) used += row[w] != 0;
    if (used == 0 || used > most_) return -1;
    int32_t ids[kMost];
    int count = 0, longest = 0;
    for (int64_t w = 0; w < words; ++w) {
      for (uint32_t bits = static_cast<uint32_t>(row[w]); bits != 0; bits &= bits - 1) {
        if (count == most_) return -1;
        ids[count] = static_cast<int32_t>(w * 32 + __builtin_ctz(bits));
        if (length(ids[count]) > length(ids[longest])) longest = count;
        ++count;
      }
    }
    if (count == 1) return ids[0];
    const int32_t best = ids[longest];
    for (int i = 0; i < count; ++i) {
      const size_t size = length(ids[i]);
      if (size == 0 || std::memcmp(text(ids[i]), text(best), size) != 0) return -1;
    }
    return best;
  }

 private:
  static constexpr int kMost = 64;  // beginnings of one text: there are never many

  bool known(int32_t id) const noexcept { return static_cast<size_t>(id) + 1 < starts_.size(); }
  size_t length(int32_t id) const noexcept {
    const auto i = static_cast<size_t>(id);
    return known(id) ? starts_[i + 1] - starts_[i] : 0;
  }
  const char* text(int32_t id) const noexcept {
    return bytes_.data() + starts_[static_cast<size_t>(id)];
  }

  std::string bytes_;
  int most_;  // legal ids of a row that is looked at
  std::vector<size_t> starts_;
};

}  // namespace graft::guide
