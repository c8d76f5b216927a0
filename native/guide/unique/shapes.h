// Shapes of JSON documents: which arrays must have different items, and how many values can
// complete an item. graft.grammar.automaton.unique_items computes them from a schema.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "guide/unique/scalars.h"

namespace graft::guide {

// The values at a place of a document. The items of arrays whose items must differ, and the parts
// of the items, are *counted*: their shapes describe the values exactly, except for *open* arrays
// and objects. These can be completed with infinitely many values from every incomplete text, so
// their parts need not be counted. Other shapes only say where the arrays are whose items must
// differ.
struct Shape {
  // Shape of values that are not counted and contain no array whose items must differ.
  static constexpr int32_t kNone = -1;

  // A listed name of a property. Counted objects may have several *alternatives*, each of which
  // allows and requires some of the names. Bit i of `allowed` and `required` is for alternative i.
  struct Name {
    std::string name;
    int32_t shape;
    uint64_t allowed;
    uint64_t required;
  };
  // Properties whose names are not listed, but are in the ScalarSet with the index `names`.
  struct Pattern {
    int32_t names;
    int32_t shape;
  };

  bool counted = false;
  int32_t scalars = -1;  // index of a ScalarSet; -1: there are none, or they are not counted
  bool has_arrays = false;
  bool unique = false;  // the items of arrays must differ
  bool open_arrays = false;
  int32_t items = kNone;
  std::vector<int32_t> prefix;  // shapes of the first items
  int32_t low = 0;
  int32_t high = -1;  // -1: no maximum
  bool has_objects = false;
  bool open_objects = false;
  int32_t alternatives = 1;  // of counted objects that are not open
  std::vector<Name> names;   // in the order of the schema
  std::vector<Pattern> patterns;
  int32_t additional = kNone;

  int32_t item(int32_t index) const {
    return index < static_cast<int32_t>(prefix.size()) ? prefix[at(index)] : items;
  }
};

// Immutable after construction.
class Shapes {
 public:
  // Shape 0 is that of the document. If `any_order` is true, the properties of an object may have
  // any order, otherwise they have the order of `Shape::names`. Throws std::runtime_error if a
  // number is out of range, and std::domain_error if fewer different items exist than an array
  // requires.
  Shapes(std::vector<Shape> shapes, std::vector<ScalarSet> scalars, bool any_order);

  const Shape& shape(int32_t index) const { return shapes_[at(index)]; }
  const ScalarSet& scalars(int32_t index) const { return scalars_[at(index)]; }
  bool any_order() const { return any_order_; }
  // Index of a name in Shape::names, or -1.
  int32_t find_name(int32_t shape, std::string_view name) const;
  // Shape of a property with a name that is not listed, given as JSON text.
  int32_t other_property(int32_t shape, std::string_view name) const;
  size_t nbytes() const;

  // The following functions return lower bounds of numbers of different values, at most kMany.

  // Number of values of a shape; 1 if it is not counted.
  int64_t count(int32_t shape) const {
    return shape == Shape::kNone || !shapes_[at(shape)].counted ? 1 : counts_[at(shape)];
  }
  // Number of ways to complete an array that has `items` items.
  int64_t count_rest(const Shape& array, int32_t items) const;
  // Number of ways to complete an object of an alternative with names that are not `written` and
  // have at least the index `first`.
  int64_t count_rest(const Shape& object, int32_t alternative, const std::vector<uint8_t>& written,
                     size_t first) const;

 private:
  void check() const;
  void check_minimums() const;
  void count_all();
  int64_t count_once(const Shape& shape) const;

  std::vector<Shape> shapes_;
  std::vector<ScalarSet> scalars_;
  bool any_order_;
  std::vector<int64_t> counts_;
  std::vector<std::vector<int32_t>> by_name_;  // indices of the names of each shape, sorted by name
};

inline int64_t add_counts(int64_t a, int64_t b) { return a + b < kMany ? a + b : kMany; }
inline int64_t multiply_counts(int64_t a, int64_t b) {  // both are at most kMany
  const int64_t product = a * b;
  return product < kMany ? product : kMany;
}

}  // namespace graft::guide
