// Tries of the bytes of a vocabulary's tokens, shared by all grammars of the vocabulary.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace graft::guide {

// There are two tries. *Text tokens* consist of at most kMaxTextLength whole UTF-8 characters,
// none of which is a quotation mark, a backslash or a control character. Within a JSON string, all
// text tokens are legal, up to the maximum length of the string. The first trie contains only text
// tokens, because the mask row of a state inside a JSON string can then be computed without
// visiting them one by one. The second trie contains all other tokens.
//
// A TokenTrie is immutable after construction.
class TokenTrie {
 public:
  static constexpr int kMaxTextLength = 32;
  static constexpr size_t kMaxTokenLength = 4095;  // in bytes

  struct Node {
    int32_t token;   // smallest id whose text ends here, or -1
    int32_t end;     // index of the first later node that is not a descendant
    uint16_t depth;  // number of bytes before this node's byte
    uint8_t byte;
  };
  // The nodes of both tries are in one array, in depth-first order. This is a range of them.
  struct Range {
    int32_t begin;
    int32_t end;
  };
  enum Part { kText, kOther };

  // `lengths[i]` bytes of `bytes` belong to token i; tokens without bytes are never legal.
  TokenTrie(const std::vector<uint32_t>& lengths, std::string bytes, int32_t vocab_size);

  // Says whether text tokens may contain an ASCII character.
  static bool is_text(uint8_t byte) {
    return byte >= 0x20 && byte < 0x7F && byte != '"' && byte != '\\';
  }

  const Node& node(int32_t index) const { return nodes_[static_cast<size_t>(index)]; }
  Range range(Part part) const { return ranges_[part]; }
  // Returns the node of `byte` below the node `parent`, or -1.
  int32_t child(int32_t parent, uint8_t byte) const;
  // Returns the node of the first byte of the tokens of a trie, or -1.
  int32_t first(Part part, uint8_t byte) const { return first_[part][byte]; }
  // Mask row that allows exactly the text tokens with at most `length` characters.
  const int32_t* text_row(int length) const {
    return text_rows_.data() + static_cast<size_t>(length * words());
  }
  int64_t words() const { return (int64_t{vocab_size_} + 31) / 32; }
  // Next id with the same bytes as `token`, or -1.
  int32_t next_equal(int32_t token) const { return next_equal_[static_cast<size_t>(token)]; }
  std::string_view text(int32_t token) const {
    const auto index = static_cast<size_t>(token);
    return {bytes_.data() + offsets_[index], offsets_[index + 1] - offsets_[index]};
  }
  int32_t num_tokens() const { return static_cast<int32_t>(next_equal_.size()); }
  // Upper bound of the number of characters that end within a token.
  int32_t most_characters() const { return most_characters_; }

 private:
  // Appends the trie of `tokens`, which must be sorted by their bytes.
  void add_nodes(Part part, const std::vector<int32_t>& tokens);

  int32_t vocab_size_;
  int32_t most_characters_ = 0;
  std::string bytes_;
  std::vector<size_t> offsets_;
  std::vector<int32_t> next_equal_;
  std::vector<Node> nodes_;
  std::array<Range, 2> ranges_;
  std::array<std::array<int32_t, 256>, 2> first_;
  std::vector<int32_t> text_rows_;  // results of text_row(): [kMaxTextLength + 1][words]
};

}  // namespace graft::guide
