// Construction of token tries.
#include "guide/automaton/token_trie.h"

#include <algorithm>
#include <stdexcept>

namespace graft::guide {
namespace {

// Returns the number of bytes of the UTF-8 character at the beginning of `text`, or 0 if there is
// no complete one or if it cannot be part of a text token.
size_t text_character(std::string_view text) {
  const auto byte = [text](size_t i) {
    return i < text.size() ? static_cast<uint8_t>(text[i]) : uint8_t{0};
  };
  const uint8_t first = byte(0);
  if (first < 0x80) return TokenTrie::is_text(first) ? 1 : 0;
  if (first < 0xC2 || first > 0xF4) return 0;
  const size_t length = first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
  }
  // Overlong encodings, surrogates and codes above U+10FFFF are not characters.
  const uint8_t second = byte(1);
  const bool valid = (first != 0xE0 || second >= 0xA0) && (first != 0xED || second < 0xA0) &&
                     (first != 0xF0 || second >= 0x90) && (first != 0xF4 || second < 0x90);
  return valid ? length : 0;
}

// Returns the number of characters of a text token, and 0 for other tokens.
int text_length(std::string_view text) {
  int characters = 0;
  while (!text.empty()) {
    const size_t bytes = text_character(text);
    if (bytes == 0 || ++characters > TokenTrie::kMaxTextLength) return 0;
    text.remove_prefix(bytes);
  }
  return characters;
}

}  // namespace

TokenTrie::TokenTrie(const std::vector<uint32_t>& lengths, std::string bytes, int32_t vocab_size)
    : vocab_size_(vocab_size), bytes_(std::move(bytes)), offsets_{0} {
  for (const uint32_t length : lengths) {
    offsets_.push_back(offsets_.back() + length);
    if (length > kMaxTokenLength) {
      throw std::runtime_error("token trie: a token is longer than 4095 bytes");
    }
  }
  if (offsets_.back() != bytes_.size() || lengths.size() > static_cast<size_t>(vocab_size)) {
    throw std::runtime_error("token trie: the lengths do not fit the bytes or the vocabulary");
  }
  next_equal_.assign(lengths.size(), -1);
  std::vector<int32_t> order;
  for (size_t token = 0; token < lengths.size(); ++token) {
    if (lengths[token] > 0) order.push_back(static_cast<int32_t>(token));
    const std::string_view bytes = text(static_cast<int32_t>(token));
    const auto later = std::count_if(bytes.begin(), bytes.end(), [](char c) {
      return (static_cast<uint8_t>(c) & 0xC0) == 0x80;  // not the first byte of a character
    });
    // The token may also contain the end of a character that began in the token before it.
    most_characters_ = std::max(
        most_characters_, static_cast<int32_t>(bytes.size()) - static_cast<int32_t>(later) + 1);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return text(a) < text(b); });
  const auto row_words = static_cast<size_t>(words());
  text_rows_.assign((kMaxTextLength + 1) * row_words, 0);
  std::vector<int32_t> text_tokens;
  std::vector<int32_t> others;
  for (const int32_t token : order) {
    const int length = text_length(text(token));
    (length > 0 ? text_tokens : others).push_back(token);
    for (int row = length; length > 0 && row <= kMaxTextLength; ++row) {
      text_rows_[static_cast<size_t>(row) * row_words + static_cast<size_t>(token >> 5)] |=
          static_cast<int32_t>(1u << (token & 31));
    }
  }
  add_nodes(kText, text_tokens);
  add_nodes(kOther, others);
}

void TokenTrie::add_nodes(Part part, const std::vector<int32_t>& tokens) {
  std::array<int32_t, 256>& first = first_[part];
  first.fill(-1);
  ranges_[part].begin = static_cast<int32_t>(nodes_.size());
  std::vector<int32_t> open;  // nodes on the path of the current token, by depth
  const auto node_at = [this, &open](size_t depth) -> Node& {
    return nodes_[static_cast<size_t>(open[depth])];
  };
  for (size_t i = 0; i < tokens.size(); ++i) {
    const std::string_view now = text(tokens[i]);
    if (i > 0 && now == text(tokens[i - 1])) {
      next_equal_[static_cast<size_t>(tokens[i - 1])] = tokens[i];
      continue;
    }
    size_t common = 0;
    while (common < now.size() && common < open.size() &&
           node_at(common).byte == static_cast<uint8_t>(now[common])) {
      ++common;
    }
    for (size_t depth = common; depth < open.size(); ++depth) {
      node_at(depth).end = static_cast<int32_t>(nodes_.size());
    }
    open.resize(common);
    for (size_t depth = common; depth < now.size(); ++depth) {
      const auto byte = static_cast<uint8_t>(now[depth]);
      if (depth == 0) first[byte] = static_cast<int32_t>(nodes_.size());
      open.push_back(static_cast<int32_t>(nodes_.size()));
      nodes_.push_back({-1, 0, static_cast<uint16_t>(depth), byte});
    }
    nodes_.back().token = tokens[i];
  }
  for (size_t depth = 0; depth < open.size(); ++depth) {
    node_at(depth).end = static_cast<int32_t>(nodes_.size());
  }
  ranges_[part].end = static_cast<int32_t>(nodes_.size());
}

int32_t TokenTrie::child(int32_t parent, uint8_t byte) const {
  int32_t i = parent + 1;
  while (i < node(parent).end && node(i).byte < byte) i = node(i).end;
  return i < node(parent).end && node(i).byte == byte ? i : -1;
}

}  // namespace graft::guide
