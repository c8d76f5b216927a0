// Enumerates the values of counted shapes.
#include "guide/unique/value_search.h"

#include <algorithm>
#include <stdexcept>

#include "guide/unique/json_value.h"

namespace graft::guide {
namespace {

// About 20 ms of processor time.
constexpr int64_t kMaxSteps = 100'000;
constexpr int32_t kMaxNesting = 100;

// Whether a number that begins with `text` is 0 whatever its exponent.
bool is_zero(const std::string& text) {
  return text[0] != '"' && text.find_first_of("123456789") >= text.find_first_of("eE") &&
         text.find_first_of("0") != std::string::npos;
}

// Whether a string ends with an escape sequence that begins at `begin` or later, and whose
// character has a spelling that is enumerated instead: the character itself, or a short or
// lower-case escape.
bool ends_with_other_spelling(const std::string& text, size_t begin) {
  const size_t size = text.size();
  size_t length = 2;  // of the escape sequence
  if (size >= begin + 6 && text[size - 6] == '\\' && text[size - 5] == 'u') length = 6;
  if (size < begin + length || text[size - length] != '\\') return false;
  size_t backslashes = 0;  // an even number of them does not begin an escape sequence
  while (backslashes <= size - length && text[size - length - backslashes] == '\\') ++backslashes;
  if (backslashes % 2 == 0) return false;
  if (length == 2) return text.back() == '/';
  const std::string_view digits = std::string_view(text).substr(size - 4);
  if (digits == "007f") return false;
  const uint32_t code = static_cast<uint32_t>(std::stoul(std::string(digits), nullptr, 16));
  const bool has_upper = digits.find_first_of("ABCDEF") != std::string_view::npos;
  constexpr std::string_view kShort = "\b\f\n\r\t";
  return code >= 0x20 || has_upper ||
         kShort.find(static_cast<char>(code)) != std::string_view::npos;
}

}  // namespace

void ValueSearch::count_step() {
  if (++steps_ > kMaxSteps) throw std::runtime_error("uniqueItems: the search takes too long");
}

bool ValueSearch::each_scalar(const ScalarSet& scalars, int32_t state, const std::string& text,
                              const Use& use) {
  const Machine& machine = scalars.machine();
  // After a zero, all exponents lead to the same value.
  const bool is_number = !text.empty() && text[0] != '"';
  const bool zero = is_number && is_zero(text);
  if (zero && text.find_first_of("eE") != std::string::npos) return use(canonical("0"));
  struct Visit {
    int32_t state;
    size_t size;  // of the text before the byte
    char byte;
  };
  std::string current = text;
  if (machine.accepting(state) && use(canonical(current))) return true;
  std::vector<Visit> pending;
  const auto add_edges = [&](int32_t from) {
    const bool skips_exponent = !current.empty() && current[0] != '"' && is_zero(current);
    int previous = -1;  // class of the previous byte
    int16_t next = Machine::kDead;
    for (int byte = 255; byte >= 0; --byte) {
      const int byte_class = machine.classes()[static_cast<size_t>(byte)];
      if (byte_class != previous) next = machine.of_class(from, byte_class);
      previous = byte_class;
      if (next < 0 || byte == '"' || (skips_exponent && (byte == 'e' || byte == 'E'))) continue;
      pending.push_back({next, current.size(), static_cast<char>(byte)});
    }
    const int16_t end = machine.next(from, '"');  // is visited first, because it ends a string
    if (end >= 0) pending.push_back({end, current.size(), '"'});
  };
  add_edges(state);
  while (!pending.empty()) {
    count_step();
    const Visit visit = pending.back();
    pending.pop_back();
    current.resize(visit.size);
    current.push_back(visit.byte);
    if (current[0] == '"' && ends_with_other_spelling(current, text.size())) continue;
    if (machine.accepting(visit.state) && use(canonical(current))) return true;
    add_edges(visit.state);
  }
  return false;
}

bool ValueSearch::each_array(const Shape& shape, std::vector<std::string>* items, const Use& use) {
  count_step();
  const auto size = static_cast<int32_t>(items->size());
  if (size >= shape.low && use(canonical_array(*items))) return true;
  if (size == shape.high) return false;
  return each_value(shape.item(size), [&](const std::string& form) {
    if (shape.unique && std::find(items->begin(), items->end(), form) != items->end()) return false;
    items->push_back(form);
    const bool found = each_array(shape, items, use);
    items->pop_back();
    return found;
  });
}

bool ValueSearch::each_object(const Shape& shape, int32_t alternative, Members* members,
                              const std::vector<uint8_t>& written, size_t first, const Use& use) {
  count_step();
  const auto is_in = [alternative](uint64_t mask) { return (mask >> alternative & 1) != 0; };
  while (first < shape.names.size() && (written[first] || !is_in(shape.names[first].allowed))) {
    ++first;
  }
  if (first == shape.names.size()) return use(canonical_object(*members));
  const Shape::Name& name = shape.names[first];
  if (!is_in(name.required) && each_object(shape, alternative, members, written, first + 1, use)) {
    return true;
  }
  return each_value(name.shape, [&](const std::string& form) {
    members->emplace_back(name.name, form);
    const bool found = each_object(shape, alternative, members, written, first + 1, use);
    members->pop_back();
    return found;
  });
}

bool ValueSearch::each_value(int32_t index, const Use& use) {
  count_step();
  if (index == Shape::kNone || !shapes_.shape(index).counted || ++nesting_ > kMaxNesting) {
    throw std::runtime_error("uniqueItems: the values of an item cannot be listed");
  }
  const Shape& shape = shapes_.shape(index);
  if ((shape.has_arrays && shape.open_arrays) || (shape.has_objects && shape.open_objects)) {
    throw std::runtime_error("uniqueItems: the values of an item cannot be listed");
  }
  bool found = shape.scalars >= 0 && each_scalar(shapes_.scalars(shape.scalars), 0, {}, use);
  if (!found && shape.has_arrays) {
    std::vector<std::string> items;
    found = each_array(shape, &items, use);
  }
  if (!found && shape.has_objects) {
    Members members;
    const std::vector<uint8_t> written(shape.names.size());
    for (int32_t i = 0; i < shape.alternatives && !found; ++i) {
      found = each_object(shape, i, &members, written, 0, use);
    }
  }
  --nesting_;
  return found;
}

}  // namespace graft::guide
