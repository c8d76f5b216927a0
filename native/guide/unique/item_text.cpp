// Follows the text of a JSON document.
#include "guide/unique/item_text.h"

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <utility>

#include "guide/unique/json_value.h"

namespace graft::guide {
namespace {

// Sizes for which memory is allocated in advance.
constexpr size_t kText = 1 << 14;
constexpr size_t kLevels = 1 << 10;

bool is_in_number(char byte) {
  return (byte >= '0' && byte <= '9') || byte == '.' || byte == '-' || byte == '+' || byte == 'e' ||
         byte == 'E';
}

}  // namespace

ItemText::ItemText(const Shapes& shapes) : shapes_(shapes) {
  text_.reserve(kText);
  levels_.reserve(kLevels);
  parts_.reserve(kLevels);
  canonical_.reserve(kText);
}

void ItemText::restore(const Mark& mark) {
  for (size_t i = mark.sizes.parts; i < parts_.size(); ++i) {
    if (parts_[i].size > 0) --items_with_hash_[parts_[i].hash % kHashes];
  }
  place_ = mark.place;
  text_.resize(mark.sizes.text);
  levels_.resize(mark.sizes.levels);
  parts_.resize(mark.sizes.parts);
  canonical_.resize(mark.sizes.canonical);
}

bool ItemText::read(std::string_view bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [this](char byte) { return read_byte(byte); });
}

bool ItemText::read_byte(char byte) {
  text_.push_back(byte);
  switch (place_.lexeme) {
    case Lexeme::kFirstItem:
      if (byte == ']') return close();
      [[fallthrough]];
    case Lexeme::kValue:
      if (!is_json_space(byte)) begin_value(byte);
      return true;
    case Lexeme::kString:
      if (place_.scalar_state >= 0) {
        const Shape& shape = shapes_.shape(place_.shape);
        place_.scalar_state = shapes_.scalars(shape.scalars)
                                  .machine()
                                  .next(place_.scalar_state, static_cast<uint8_t>(byte));
      }
      if (byte == '"' && !place_.escaped) return end_value(text_.size());
      place_.escaped = byte == '\\' && !place_.escaped;
      return true;
    case Lexeme::kNumber:
    case Lexeme::kWord: {
      const bool continues =
          place_.lexeme == Lexeme::kNumber ? is_in_number(byte) : byte >= 'a' && byte <= 'z';
      if (!continues) return end_value(text_.size() - 1) && read_after_value(byte);
      if (place_.scalar_state >= 0) {
        const Shape& shape = shapes_.shape(place_.shape);
        place_.scalar_state = shapes_.scalars(shape.scalars)
                                  .machine()
                                  .next(place_.scalar_state, static_cast<uint8_t>(byte));
      }
      if (byte == 'e' || byte == 'E') place_.in_exponent = true;
      if (byte >= '1' && byte <= '9' && !place_.in_exponent) place_.is_nonzero = true;
      return true;
    }
    case Lexeme::kAfter:
      return read_after_value(byte);
    case Lexeme::kFirstName:
    case Lexeme::kName:
      if (byte == '}') return close();
      if (byte == '"') {
        place_.lexeme = Lexeme::kInName;
        place_.begin = static_cast<int32_t>(text_.size());
      }
      return true;
    case Lexeme::kInName:
      if (byte == '"' && !place_.escaped) {
        end_name();
      } else {
        place_.escaped = byte == '\\' && !place_.escaped;
      }
      return true;
    case Lexeme::kColon:
      if (byte == ':') place_.lexeme = Lexeme::kValue;
      return true;
  }
  return true;
}

bool ItemText::read_after_value(char byte) {
  if (byte == ']' || byte == '}') return close();
  if (byte != ',' || place_.level < 0) return true;
  if (level(place_.level).is_object) {
    place_.lexeme = Lexeme::kName;
  } else {
    place_.lexeme = Lexeme::kValue;
    place_.shape = next_item(place_.level);
  }
  return true;
}

int32_t ItemText::next_item(int32_t index) const {
  const Shape* shape = shape_of(index);
  return shape == nullptr ? Shape::kNone : shape->item(level(index).num_parts);
}

void ItemText::begin_value(char byte) {
  const Shape* shape = place_.shape == Shape::kNone ? nullptr : &shapes_.shape(place_.shape);
  place_.begin = static_cast<int32_t>(text_.size()) - 1;
  if (byte != '{' && byte != '[') {
    const bool is_word = byte >= 'a' && byte <= 'z';
    place_.lexeme = byte == '"' ? Lexeme::kString : is_word ? Lexeme::kWord : Lexeme::kNumber;
    place_.escaped = place_.in_exponent = false;
    place_.is_nonzero = byte >= '1' && byte <= '9';
    place_.scalar_state = -1;
    if (shape != nullptr && shape->counted && shape->scalars >= 0) {
      const Machine& machine = shapes_.scalars(shape->scalars).machine();
      place_.scalar_state = machine.next(0, static_cast<uint8_t>(byte));
    }
    return;
  }
  const bool is_object = byte == '{';
  const int32_t num_unique = place_.level < 0 ? 0 : level(place_.level).num_unique;
  const bool unique = shape != nullptr && !is_object && shape->unique;
  levels_.push_back({place_.level, place_.shape, place_.begin, 0, -1, -1,
                     num_unique + (unique ? 1 : 0), is_object});
  place_.level = static_cast<int32_t>(levels_.size()) - 1;
  place_.lexeme = is_object ? Lexeme::kFirstName : Lexeme::kFirstItem;
  place_.shape = is_object ? Shape::kNone : next_item(place_.level);
}

bool ItemText::close() {
  if (place_.level < 0) return true;
  place_.begin = level(place_.level).begin;
  place_.level = level(place_.level).parent;
  return end_value(text_.size());
}

void ItemText::end_name() {
  place_.lexeme = Lexeme::kColon;
  place_.shape = Shape::kNone;
  const Shape* shape = shape_of(place_.level);
  if (shape == nullptr) return;
  const std::string_view raw =
      std::string_view(text_).substr(at(place_.begin), text_.size() - 1 - at(place_.begin));
  const int32_t shape_index = level(place_.level).shape;
  const bool has_escapes = raw.find('\\') != std::string_view::npos;
  const int32_t name = has_escapes ? shapes_.find_name(shape_index, characters(raw))
                                   : shapes_.find_name(shape_index, raw);
  const std::string_view quoted = std::string_view(text_).substr(at(place_.begin) - 1);
  place_.shape =
      name >= 0 ? shape->names[at(name)].shape : shapes_.other_property(shape_index, quoted);
  if (!keeps_parts(place_.level)) return;
  levels_.push_back(level(place_.level));
  levels_.back().name = name;
  place_.level = static_cast<int32_t>(levels_.size()) - 1;
}

bool ItemText::end_value(size_t end) {
  place_.lexeme = Lexeme::kAfter;
  if (place_.level < 0 || !keeps_parts(place_.level)) return true;
  Level next = level(place_.level);
  ++next.num_parts;
  Part part{next.last_part, next.name, 0, 0, 0};
  if (is_unique(place_.level)) {
    const std::string form =
        canonical(std::string_view(text_).substr(at(place_.begin), end - at(place_.begin)));
    part.hash = std::hash<std::string>()(form);
    if (contains(place_.level, form, part.hash)) return false;
    part.begin = canonical_.size();
    part.size = form.size();
    canonical_ += form;
    ++items_with_hash_[part.hash % kHashes];
  }
  next.last_part = static_cast<int32_t>(parts_.size());
  parts_.push_back(part);
  place_.level = static_cast<int32_t>(levels_.size());
  levels_.push_back(next);
  return true;
}

bool ItemText::contains(int32_t index, std::string_view form, uint64_t hash) const {
  if (items_with_hash_[hash % kHashes] == 0) return false;
  for (int32_t i = level(index).last_part; i >= 0; i = parts_[at(i)].previous) {
    const Part& part = parts_[at(i)];
    if (part.hash == hash && std::string_view(canonical_).substr(part.begin, part.size) == form) {
      return true;
    }
  }
  return false;
}

ItemText::Safe ItemText::safe_tokens() const {
  const bool in_string = place_.lexeme == Lexeme::kString || place_.lexeme == Lexeme::kInName;
  if (!is_unique(place_.level) && ends_count(place_.level)) {
    return in_string ? Safe::kWithoutBoth : Safe::kWithoutBracket;
  }
  const auto stays_many = [this](int32_t shape, int32_t state) {
    return state >= 0 && shapes_.scalars(shapes_.shape(shape).scalars).stays_many(state);
  };
  if (place_.lexeme == Lexeme::kString && stays_many(place_.shape, place_.scalar_state)) {
    return Safe::kWithoutQuote;
  }
  if (place_.lexeme == Lexeme::kNumber && place_.is_nonzero &&
      stays_many(place_.shape, place_.scalar_state)) {
    return Safe::kNumber;
  }
  int32_t next = Shape::kNone;
  if (place_.lexeme == Lexeme::kValue || place_.lexeme == Lexeme::kFirstItem) {
    next = place_.shape;
  } else if (place_.lexeme == Lexeme::kAfter && !level(place_.level).is_object) {
    next = next_item(place_.level);
  }
  if (next == Shape::kNone || !shapes_.shape(next).counted || shapes_.shape(next).scalars < 0) {
    return Safe::kNone;
  }
  const Machine& machine = shapes_.scalars(shapes_.shape(next).scalars).machine();
  bool any = false;
  for (const char first : {'"', '1', '2', '3', '4', '5', '6', '7', '8', '9'}) {
    const int16_t state = machine.next(0, static_cast<uint8_t>(first));
    if (state >= 0 && !stays_many(next, state)) return Safe::kNone;
    any |= state >= 0;
  }
  return any ? Safe::kFirstText : Safe::kNone;
}

// Returns the number of items of a level that the string which has begun could repeat.
int32_t ItemText::count_repetitions(int32_t index) const {
  const std::string_view begun = std::string_view(text_).substr(at(place_.begin));
  if (begun.find('\\') != std::string_view::npos) return level(index).num_parts;
  int32_t count = 0;
  for (int32_t i = level(index).last_part; i >= 0; i = parts_[at(i)].previous) {
    const std::string_view form =
        std::string_view(canonical_).substr(parts_[at(i)].begin, parts_[at(i)].size);
    // The canonical form of a string is a quotation mark and the characters.
    if (form.substr(0, begun.size()) == begun) ++count;
  }
  return count;
}

// Lower bounds of the number of completions ----------------------------------------------------

bool ItemText::can_complete() const {
  int32_t index = place_.level;
  if (index < 0 || level(index).num_unique == 0) return true;
  int64_t ways = 1;  // to complete the value that begins or continues within the level
  switch (place_.lexeme) {
    case Lexeme::kString:
    case Lexeme::kNumber:
    case Lexeme::kWord:
      ways = count_scalars();
      break;
    case Lexeme::kValue:
    case Lexeme::kColon:
      ways = shapes_.count(place_.shape);
      break;
    case Lexeme::kFirstItem:
    case Lexeme::kAfter:
    case Lexeme::kFirstName:
    case Lexeme::kName:
    case Lexeme::kInName: {
      if (ends_count(index)) return true;
      const bool needs_name = place_.lexeme == Lexeme::kName || place_.lexeme == Lexeme::kInName;
      ways = needs_name ? count_next_name(index) : count_rest(index, false);
      index = level(index).parent;
      break;
    }
  }
  for (; index >= 0 && level(index).num_unique > 0; index = level(index).parent) {
    if (is_unique(index)) {
      const bool is_own = index == place_.level && place_.lexeme == Lexeme::kString;
      const int64_t repeated = ways > level(index).num_parts || !is_own ? level(index).num_parts
                                                                        : count_repetitions(index);
      ways -= repeated;
      if (ways < 1) return finds_completion();
      if (level(index).num_unique == 1) return true;
    }
    if (ends_count(index)) return true;
    ways = multiply_counts(ways, count_rest(index, true));
  }
  return true;
}

int64_t ItemText::count_scalars() const {
  if (place_.scalar_state < 0) return 1;
  const ScalarSet& scalars = shapes_.scalars(shapes_.shape(place_.shape).scalars);
  if (place_.in_exponent) {
    return place_.is_nonzero && scalars.has_many_exponents(place_.scalar_state) ? kMany : 1;
  }
  return scalars.count(place_.scalar_state);
}

int64_t ItemText::count_rest(int32_t index, bool in_part) const {
  if (level(index).is_object) {
    const std::vector<uint8_t> written = written_names(index);
    int64_t most = 1;
    for (const int32_t alternative : alternatives(index, written, first_name(index))) {
      most = std::max(
          most, shapes_.count_rest(*shape_of(index), alternative, written, first_name(index)));
    }
    return most;
  }
  const int32_t items = level(index).num_parts + (in_part ? 1 : 0);
  return std::max<int64_t>(1, shapes_.count_rest(*shape_of(index), items));
}

int64_t ItemText::count_next_name(int32_t index) const {
  const Shape& shape = *shape_of(index);
  std::vector<uint8_t> written = written_names(index);
  int64_t most = 1;
  for (const int32_t alternative : alternatives(index, written, first_name(index))) {
    for (const size_t name : next_names(index, alternative, written)) {
      if (most == kMany) return most;
      written[name] = 1;
      const size_t first = shapes_.any_order() ? 0 : name + 1;
      const int64_t rest = shapes_.count_rest(shape, alternative, written, first);
      most = std::max(most, multiply_counts(shapes_.count(shape.names[name].shape), rest));
      written[name] = 0;
    }
  }
  return most;
}

std::vector<int32_t> ItemText::alternatives(int32_t index, const std::vector<uint8_t>& written,
                                            size_t first) const {
  const Shape& shape = *shape_of(index);
  uint64_t possible = ~uint64_t{0};
  for (size_t i = 0; i < shape.names.size(); ++i) {
    if (written[i]) possible &= shape.names[i].allowed;
    if (!written[i] && i < first) possible &= ~shape.names[i].required;
  }
  std::vector<int32_t> found;
  for (int32_t i = 0; i < shape.alternatives; ++i) {
    if ((possible >> i & 1) != 0) found.push_back(i);
  }
  return found;
}

std::vector<uint8_t> ItemText::written_names(int32_t index) const {
  std::vector<uint8_t> written(shape_of(index)->names.size());
  if (level(index).name >= 0) written[at(level(index).name)] = 1;
  for (int32_t i = level(index).last_part; i >= 0; i = parts_[at(i)].previous) {
    if (parts_[at(i)].name >= 0) written[at(parts_[at(i)].name)] = 1;
  }
  return written;
}

size_t ItemText::first_name(int32_t index) const {
  return shapes_.any_order() ? 0 : at(level(index).name + 1);
}

std::vector<size_t> ItemText::next_names(int32_t index, int32_t alternative,
                                         const std::vector<uint8_t>& written) const {
  const std::vector<Shape::Name>& names = shape_of(index)->names;
  const std::string_view begun = place_.lexeme == Lexeme::kInName
                                     ? std::string_view(text_).substr(at(place_.begin))
                                     : std::string_view();
  std::vector<size_t> next;
  for (size_t i = first_name(index); i < names.size(); ++i) {
    if (written[i] || (names[i].allowed >> alternative & 1) == 0) continue;
    if (std::string_view(names[i].name).substr(0, begun.size()) == begun) next.push_back(i);
    if ((names[i].required >> alternative & 1) != 0 && !shapes_.any_order()) break;
  }
  return next;
}

// Search for a completion ----------------------------------------------------------------------

bool ItemText::finds_completion() const {
  ValueSearch search(shapes_);
  const int32_t index = place_.level;
  const auto use = [&](const std::string& form) { return complete(index, form, &search); };
  switch (place_.lexeme) {
    case Lexeme::kString:
    case Lexeme::kNumber:
    case Lexeme::kWord:
      if (place_.scalar_state < 0) break;
      return search.each_scalar(shapes_.scalars(shapes_.shape(place_.shape).scalars),
                                place_.scalar_state, text_.substr(at(place_.begin)), use);
    case Lexeme::kValue:
    case Lexeme::kColon:
      return search.each_value(place_.shape, use);
    case Lexeme::kFirstItem:
    case Lexeme::kAfter:
    case Lexeme::kFirstName:
      return complete_rest(index, &search);
    case Lexeme::kName:
    case Lexeme::kInName: {
      std::vector<uint8_t> written = written_names(index);
      for (const int32_t alternative : alternatives(index, written, first_name(index))) {
        for (const size_t name : next_names(index, alternative, written)) {
          const Shape::Name& next = shape_of(index)->names[name];
          written[name] = 1;
          const bool found = search.each_value(next.shape, [&](const std::string& form) {
            ValueSearch::Members members = written_members(index);
            members.emplace_back(next.name, form);
            const size_t first = shapes_.any_order() ? 0 : name + 1;
            return complete_object(index, std::move(members), written, first, &search);
          });
          if (found) return true;
          written[name] = 0;
        }
      }
      return false;
    }
  }
  throw std::runtime_error("uniqueItems: the values of an item cannot be listed");
}

// Returns whether the document can be completed if the value that has begun in a level becomes the
// one with the canonical form `form`.
bool ItemText::complete(int32_t index, const std::string& form, ValueSearch* search) const {
  if (index < 0 || level(index).num_unique == 0) return true;
  if (is_unique(index)) {
    if (contains(index, form, std::hash<std::string>()(form))) return false;
    if (level(index).num_unique == 1) return true;
  }
  if (ends_count(index)) return true;
  if (!level(index).is_object) {
    std::vector<std::string> items = written_items(index);
    items.push_back(form);
    return complete_array(index, std::move(items), search);
  }
  ValueSearch::Members members = written_members(index);
  members.emplace_back(shape_of(index)->names[at(level(index).name)].name, form);
  return complete_object(index, std::move(members), written_names(index), first_name(index),
                         search);
}

// Returns whether the document can be completed after the last complete part of a level.
bool ItemText::complete_rest(int32_t index, ValueSearch* search) const {
  if (ends_count(index)) return true;
  if (!level(index).is_object) return complete_array(index, written_items(index), search);
  return complete_object(index, written_members(index), written_names(index), first_name(index),
                         search);
}

bool ItemText::complete_array(int32_t index, std::vector<std::string> items,
                              ValueSearch* search) const {
  return search->each_array(*shape_of(index), &items, [&](const std::string& form) {
    return complete(level(index).parent, form, search);
  });
}

bool ItemText::complete_object(int32_t index, ValueSearch::Members members,
                               const std::vector<uint8_t>& written, size_t first,
                               ValueSearch* search) const {
  const auto use = [&](const std::string& form) {
    return complete(level(index).parent, form, search);
  };
  for (const int32_t alternative : alternatives(index, written, first)) {
    if (search->each_object(*shape_of(index), alternative, &members, written, first, use)) {
      return true;
    }
  }
  return false;
}

std::vector<std::string> ItemText::written_items(int32_t index) const {
  const std::string_view text = text_;
  std::vector<std::string> items;
  size_t begin = at(level(index).begin) + 1;
  while (static_cast<int32_t>(items.size()) < level(index).num_parts) {
    while (text[begin] == ',' || is_json_space(text[begin])) ++begin;
    const size_t end = end_of_value(text, begin);
    items.push_back(canonical(text.substr(begin, end - begin)));
    begin = end;
  }
  return items;
}

ValueSearch::Members ItemText::written_members(int32_t index) const {
  const std::string_view text = text_;
  ValueSearch::Members members;
  size_t begin = at(level(index).begin) + 1;
  const auto next = [&] {
    while (text[begin] == ',' || text[begin] == ':' || is_json_space(text[begin])) ++begin;
    const size_t end = end_of_value(text, begin);
    const std::string_view found = text.substr(begin, end - begin);
    begin = end;
    return found;
  };
  while (static_cast<int32_t>(members.size()) < level(index).num_parts) {
    const std::string_view name = next();
    std::string characters_of_name = characters(name.substr(1, name.size() - 2));
    members.emplace_back(std::move(characters_of_name), canonical(next()));
  }
  return members;
}

}  // namespace graft::guide
