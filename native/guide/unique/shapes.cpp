// Counts the values of shapes.
#include "guide/unique/shapes.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <stdexcept>
#include <utility>

#include "guide/unique/value_search.h"

namespace graft::guide {
namespace {

// Largest number of further items of an array whose combinations are counted.
constexpr int32_t kMaxCounted = 64;

}  // namespace

Shapes::Shapes(std::vector<Shape> shapes, std::vector<ScalarSet> scalars, bool any_order)
    : shapes_(std::move(shapes)), scalars_(std::move(scalars)), any_order_(any_order) {
  check();
  for (const Shape& shape : shapes_) {
    std::vector<int32_t> order(shape.names.size());
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&shape](int32_t a, int32_t b) {
      return shape.names[at(a)].name < shape.names[at(b)].name;
    });
    by_name_.push_back(std::move(order));
  }
  count_all();
  check_minimums();
}

// Requires that every array whose items must differ can have enough items.
void Shapes::check_minimums() const {
  for (const Shape& shape : shapes_) {
    if (!shape.unique) continue;
    for (const int32_t item : shape.prefix) {
      if (count(item) < kMany || count(shape.items) < kMany) {
        throw std::domain_error("the first items have other schemas, of which one has few values");
      }
    }
    if (count(shape.items) >= shape.low) continue;
    std::set<std::string> items;
    ValueSearch search(*this);
    const bool enough = search.each_value(shape.items, [&](const std::string& form) {
      items.insert(form);
      return static_cast<int32_t>(items.size()) >= shape.low;
    });
    if (!enough) {
      throw std::domain_error("minItems is " + std::to_string(shape.low) + ", but there are only " +
                              std::to_string(items.size()) + " different items");
    }
  }
}

void Shapes::check() const {
  const auto require = [](bool valid) {
    if (!valid) throw std::runtime_error("shapes: a number is out of range");
  };
  const auto size = static_cast<int32_t>(shapes_.size());
  const auto require_shape = [&](int32_t shape) { require(Shape::kNone <= shape && shape < size); };
  require(size > 0);
  for (const Shape& shape : shapes_) {
    require(-1 <= shape.scalars && shape.scalars < static_cast<int32_t>(scalars_.size()));
    require_shape(shape.items);
    std::for_each(shape.prefix.begin(), shape.prefix.end(), require_shape);
    for (const Shape::Name& name : shape.names) require_shape(name.shape);
    for (const Shape::Pattern& pattern : shape.patterns) {
      require_shape(pattern.shape);
      require(0 <= pattern.names && pattern.names < static_cast<int32_t>(scalars_.size()));
    }
    require(1 <= shape.alternatives && shape.alternatives <= 64);
    require_shape(shape.additional);
    require(shape.low >= 0 && shape.high >= -1);
  }
}

int32_t Shapes::find_name(int32_t shape, std::string_view name) const {
  const std::vector<Shape::Name>& names = shapes_[at(shape)].names;
  const std::vector<int32_t>& order = by_name_[at(shape)];
  const auto found = std::lower_bound(
      order.begin(), order.end(), name,
      [&names](int32_t index, std::string_view wanted) { return names[at(index)].name < wanted; });
  return found != order.end() && names[at(*found)].name == name ? *found : -1;
}

int32_t Shapes::other_property(int32_t index, std::string_view name) const {
  const Shape& shape = shapes_[at(index)];
  for (const Shape::Pattern& pattern : shape.patterns) {
    const Machine& machine = scalars(pattern.names).machine();
    int32_t state = 0;
    for (size_t i = 0; i < name.size() && state >= 0; ++i) {
      state = machine.next(state, static_cast<uint8_t>(name[i]));
    }
    if (state >= 0 && machine.accepting(state)) return pattern.shape;
  }
  return shape.additional;
}

size_t Shapes::nbytes() const {
  size_t bytes = 0;
  for (const ScalarSet& set : scalars_)
    bytes += set.machine().nbytes() + 6 * at(set.machine().num_states());
  for (const Shape& shape : shapes_) {
    bytes += sizeof(Shape) + shape.prefix.size() * 4 + sizeof(int64_t);
    for (const Shape::Name& name : shape.names) bytes += sizeof(name) + name.name.size() + 4;
  }
  return bytes;
}

// Counts the values of finite nesting: after n rounds, those of nesting up to n. If counts still
// grow after as many rounds as there are shapes, some values contain a value of the same shape, so
// there are infinitely many.
void Shapes::count_all() {
  counts_.assign(shapes_.size(), 0);
  for (size_t round = 0;; ++round) {
    bool changed = false;
    std::vector<int64_t> next(shapes_.size());
    for (size_t i = 0; i < shapes_.size(); ++i) {
      next[i] = std::max(counts_[i], count_once(shapes_[i]));
      if (next[i] > counts_[i] && round > shapes_.size()) next[i] = kMany;
      changed |= next[i] != counts_[i];
    }
    counts_ = std::move(next);
    if (!changed) return;
  }
}

int64_t Shapes::count_once(const Shape& shape) const {
  int64_t total = shape.scalars < 0 ? 0 : scalars(shape.scalars).count(0);
  if (shape.has_arrays) {
    total = add_counts(total, shape.open_arrays ? kMany : count_rest(shape, 0));
  }
  if (shape.has_objects) {
    int64_t objects = 0;
    const std::vector<uint8_t> written(shape.names.size());
    for (int32_t i = 0; i < shape.alternatives; ++i) {
      objects = std::max(objects, count_rest(shape, i, written, 0));
    }
    total = add_counts(total, shape.open_objects ? kMany : objects);
  }
  return total;
}

int64_t Shapes::count_rest(const Shape& array, int32_t items) const {
  int64_t total = 0;
  int64_t product = 1;
  for (int32_t size = items;; ++size) {
    if (size >= array.low) total = add_counts(total, product);
    if (total == kMany || size == array.high) return total;
    int64_t choices = count(array.item(size));
    if (array.unique && choices < kMany) choices = std::max<int64_t>(choices - size, 0);
    product = multiply_counts(product, choices);
    if (product == 0) return total;
    if (size - items >= kMaxCounted && size >= array.low) return total;
  }
}

int64_t Shapes::count_rest(const Shape& object, int32_t alternative,
                           const std::vector<uint8_t>& written, size_t first) const {
  int64_t ways = 1;
  for (size_t i = first; i < object.names.size(); ++i) {
    const Shape::Name& name = object.names[i];
    if (written[i] || (name.allowed >> alternative & 1) == 0) continue;
    const int64_t absent = (name.required >> alternative & 1) != 0 ? 0 : 1;
    ways = multiply_counts(ways, count(name.shape) + absent);
  }
  return ways;
}

}  // namespace graft::guide
