// Enumerates the values of counted shapes in canonical form, for arrays of which nearly all
// possible items have been used.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "guide/unique/shapes.h"

namespace graft::guide {

// Each method calls `use(form)` with the canonical form of one value after the other until a call
// returns true. The method then returns true, and otherwise false. A value may be enumerated
// several times. The methods throw std::runtime_error if the search takes too long.
class ValueSearch {
 public:
  using Use = std::function<bool(const std::string&)>;
  using Members = std::vector<std::pair<std::string, std::string>>;

  explicit ValueSearch(const Shapes& shapes) : shapes_(shapes) {}

  bool each_value(int32_t shape, const Use& use);
  // Enumerates the scalars whose text begins with `text`, which leads to `state`.
  bool each_scalar(const ScalarSet& scalars, int32_t state, const std::string& text,
                   const Use& use);
  // Enumerates the arrays that begin with `items`.
  bool each_array(const Shape& shape, std::vector<std::string>* items, const Use& use);
  // Enumerates the objects of an alternative with `members` and with further members whose names
  // have the index `first` or a larger one. `written` says which names `members` contains.
  bool each_object(const Shape& shape, int32_t alternative, Members* members,
                   const std::vector<uint8_t>& written, size_t first, const Use& use);

 private:
  void count_step();

  const Shapes& shapes_;
  int64_t steps_ = 0;
  int32_t nesting_ = 0;
};

}  // namespace graft::guide
