// Text to token ids as a byte-level BPE tokenizer does it, without Python and without the GIL.
//
// 1. An Encoder is read-only once made: any number of threads may encode with one.
// 2. Text is cut into pieces by steps, each a regular expression that is tried at every place; what
//    matches is a piece, what lies between matches too. Bytes that are no UTF-8 count as U+FFFD.
// 3. Each piece is merged by rank, lowest first, leftmost among equals.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace graft::guide {

// One item of a pattern: between `least` and `most` characters of a set, as many as possible, then
// fewer; or, with `absent`, the demand that no character of the set follows.
struct PatternItem {
  std::string set;  // a bit per code point, little-endian within bytes
  uint32_t least, most;
  bool absent;
};
using Pattern = std::vector<std::vector<PatternItem>>;  // alternatives, the first that matches wins

struct Merge {
  uint32_t left, right, merged;
};

class Encoder {
 public:
  // `tokens`: bytes by id, empty for what is not of the model; `merges` in order of rank. With
  // `whole_pieces`, a piece that is a token is that token whatever the merges say. Throws
  // std::invalid_argument when a byte has no token, or an id or a set is out of range.
  Encoder(std::vector<std::string> tokens, const std::vector<Merge>& merges,
          std::vector<Pattern> steps, bool whole_pieces);

  std::vector<uint32_t> encode(const uint8_t* text, size_t size) const;

 private:
  void cut(const Pattern& pattern, const std::vector<char32_t>& characters, size_t begin,
           size_t end, std::vector<size_t>* ends) const;
  void merge(const uint8_t* piece, size_t size, std::vector<uint32_t>* out) const;

  struct Result {
    uint32_t rank, merged;
  };
  std::vector<std::string> tokens_;
  std::unordered_map<std::string, uint32_t> ids_;
  std::unordered_map<uint64_t, Result> merges_;
  std::vector<Pattern> steps_;
  uint32_t byte_ids_[256];
  bool whole_pieces_;
};

}  // namespace graft::guide
