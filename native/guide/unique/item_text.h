// Follows the text of a JSON document, and keeps the items of the arrays whose items must differ.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "guide/unique/shapes.h"
#include "guide/unique/value_search.h"

namespace graft::guide {

// The text must be a prefix of JSON that another matcher allows. ItemText only decides about
// repeated items.
//
// Invariants
// 1. After read() has returned true, no array whose items must differ contains two equal complete
//    items. An item is complete after its closing byte, a number or literal after the byte that
//    follows it.
// 2. Levels, items and names are never changed once they have been added, so that restore() only
//    has to truncate the vectors. To change a level, a new version of the level is added.
// 3. If a level within an array whose items must differ is open or not counted (see Shape), this
//    level or one around it is open, so the item of the array that contains the level can be
//    completed in infinitely many ways.
class ItemText {
 public:
  static constexpr size_t kHashes = 1024;

  explicit ItemText(const Shapes& shapes);

  struct Sizes {
    size_t text;
    size_t levels;
    size_t parts;
    size_t canonical;
  };
  enum class Lexeme : uint8_t {
    kValue,      // a value begins
    kFirstItem,  // an item begins, or the array ends
    kString,
    kNumber,
    kWord,       // true, false, null
    kAfter,      // a value is complete
    kFirstName,  // a name begins, or the object ends
    kName,       // a name begins
    kInName,
    kColon
  };
  struct Place {
    Lexeme lexeme = Lexeme::kValue;
    bool escaped = false;       // the last byte of a string or name is a backslash
    bool is_nonzero = false;    // a number has a digit other than 0 before its exponent
    bool in_exponent = false;   // whether the position is in the exponent of a number
    int32_t level = -1;         // innermost array or object that has begun, or -1
    int32_t shape = 0;          // shape of the value that begins or continues here
    int32_t scalar_state = -1;  // state of its ScalarSet; -1: the value is not counted
    int32_t begin = 0;          // where the value or name begins
  };
  // A position of the text to which restore() returns.
  struct Mark {
    Place place;
    Sizes sizes;
  };
  // An array or object that has begun.
  struct Level {
    int32_t parent;  // index of the enclosing level: the version in which this level begins
    int32_t shape;
    int32_t begin;       // index of its opening bracket
    int32_t num_parts;   // number of complete items or members, if they are counted
    int32_t last_part;   // index of the last item or member, or -1
    int32_t name;        // counted objects: index of the last listed name, or -1
    int32_t num_unique;  // how many of this level and those around it must have different items
    bool is_object;
  };
  // A complete item of an array whose items must differ, or a complete member of a counted object.
  struct Part {
    int32_t previous;  // index of the part before it in its level, or -1
    int32_t name;      // index of the name of a member if it is listed, or -1
    uint64_t hash;     // hash of the canonical form of an item
    size_t begin;      // place of this form in `canonical_`
    size_t size;       // size of this form; 0 for a member
  };

  // Reads bytes. Returns false if an item is repeated; the caller must then restore() a position.
  bool read(std::string_view bytes);
  // Whether the text can be completed without a repeated item. Throws std::runtime_error if this
  // cannot be determined.
  bool can_complete() const;

  Mark mark() const {
    return {place_, {text_.size(), levels_.size(), parts_.size(), canonical_.size()}};
  }
  void restore(const Mark& mark);

  // Whether the position is within an array whose items must differ.
  bool is_inside() const { return place_.level >= 0 && level(place_.level).num_unique > 0; }
  // Kinds of tokens that need not be read, because the value can be completed after them.
  enum class Safe : uint8_t {
    kNone,
    kWithoutBracket,
    kWithoutQuote,
    kWithoutBoth,  // tokens that do not contain both a bracket and a quotation mark
    kNumber,       // tokens that consist of characters of numbers
    kFirstText     // tokens with separators and one string or number that begins, see TokenKinds
  };
  Safe safe_tokens() const;

 private:
  const Level& level(int32_t index) const { return levels_[at(index)]; }
  const Shape* shape_of(int32_t level) const {
    const int32_t shape = levels_[at(level)].shape;
    return shape == Shape::kNone ? nullptr : &shapes_.shape(shape);
  }
  // Whether a level is open or not counted, so that the values around it need not be counted
  // (invariant 3).
  bool ends_count(int32_t level) const {
    const Shape* shape = shape_of(level);
    if (shape == nullptr || !shape->counted) return true;
    return this->level(level).is_object ? shape->open_objects : shape->open_arrays;
  }
  bool is_unique(int32_t level) const {
    const Shape* shape = shape_of(level);
    return shape != nullptr && shape->unique && !this->level(level).is_object;
  }
  // Whether the parts of a level are stored: to compare them, to count values, or because the shape
  // of the next item depends on their number.
  bool keeps_parts(int32_t level) const {
    if (is_unique(level) || !ends_count(level)) return true;
    return shape_of(level) != nullptr && !shape_of(level)->prefix.empty() &&
           !this->level(level).is_object;
  }

  bool read_byte(char byte);
  bool read_after_value(char byte);
  void begin_value(char byte);
  bool close();
  void end_name();
  // The value ends before the index `end` of the text.
  bool end_value(size_t end);
  int32_t count_repetitions(int32_t level) const;
  bool contains(int32_t level, std::string_view canonical, uint64_t hash) const;
  // Shape of the next item of an array.
  int32_t next_item(int32_t level) const;

  // Lower bounds of the number of different ways to continue.
  int64_t count_scalars() const;
  // `in_part`: an item or member of the level has begun.
  int64_t count_rest(int32_t level, bool in_part) const;
  int64_t count_next_name(int32_t level) const;

  // The names of a counted object that have been written, including the last one.
  std::vector<uint8_t> written_names(int32_t level) const;
  // Indices of the names that may be written next and agree with the part that has been written.
  std::vector<size_t> next_names(int32_t level, int32_t alternative,
                                 const std::vector<uint8_t>& written) const;
  size_t first_name(int32_t level) const;
  // Alternatives of an object (see Shape) that allow the names which have been written, and require
  // no other name with an index below `first`: such names cannot be written any more.
  std::vector<int32_t> alternatives(int32_t level, const std::vector<uint8_t>& written,
                                    size_t first) const;

  // Search for a completion in which no item is repeated.
  bool finds_completion() const;
  bool complete(int32_t level, const std::string& form, ValueSearch* search) const;
  bool complete_rest(int32_t level, ValueSearch* search) const;
  bool complete_array(int32_t level, std::vector<std::string> items, ValueSearch* search) const;
  bool complete_object(int32_t level, ValueSearch::Members members,
                       const std::vector<uint8_t>& written, size_t first,
                       ValueSearch* search) const;
  std::vector<std::string> written_items(int32_t level) const;
  ValueSearch::Members written_members(int32_t level) const;

  const Shapes& shapes_;
  Place place_;
  std::string text_;
  std::vector<Level> levels_;
  std::vector<Part> parts_;
  std::string canonical_;  // canonical forms of the items
  // Number of items of all arrays by their hash modulo kHashes. If it is 0, an item is new, and
  // need not be compared with others.
  std::array<uint32_t, kHashes> items_with_hash_{};
};

}  // namespace graft::guide
