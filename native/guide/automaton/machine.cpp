// Serialized form of machines.
#include "guide/automaton/machine.h"

#include <array>
#include <cstring>
#include <stdexcept>

namespace graft::guide {
namespace {

// Sizes at the beginning of the serialized form. The arrays follow without gaps.
struct Header {
  int32_t states;
  int32_t classes;
  int32_t runs;
  int32_t entries;
  int32_t exits;
  int32_t actions;
  int32_t returns;
  int32_t counts;
};

void require(bool valid) {
  if (!valid) throw std::runtime_error("automaton: invalid data");
}

template <typename Item>
void append(std::string* data, const std::vector<Item>& items) {
  data->append(reinterpret_cast<const char*>(items.data()), items.size() * sizeof(Item));
}

// Reads the next `count` items of the data.
template <typename Item>
void read(const std::string& data, size_t* position, size_t count, std::vector<Item>* items) {
  require(count <= (data.size() - *position) / sizeof(Item));
  items->resize(count);
  if (count > 0) std::memcpy(items->data(), data.data() + *position, count * sizeof(Item));
  *position += count * sizeof(Item);
}

}  // namespace

size_t Machine::nbytes() const {
  return classes_.size() + runs_.size() * sizeof(Run) + next_.size() * sizeof(int16_t) +
         actions_.size() * sizeof(Action) + returns_begin_.size() * sizeof(int32_t) +
         returns_.size() * sizeof(Return) + accepting_.size() + counts_.size() * sizeof(Count) +
         limits_.size() * sizeof(int32_t);
}

std::string Machine::serialize() const {
  const Header header{num_states(),
                      num_classes_,
                      static_cast<int32_t>(runs_.size()),
                      num_entries(),
                      num_exits_,
                      static_cast<int32_t>(actions_.size()),
                      static_cast<int32_t>(returns_.size()),
                      static_cast<int32_t>(counts_.size())};
  std::string data;
  data.reserve(sizeof(header) + nbytes());
  data.append(reinterpret_cast<const char*>(&header), sizeof(header));
  append(&data, returns_begin_);
  append(&data, counts_);
  append(&data, limits_);
  append(&data, runs_);
  append(&data, actions_);
  append(&data, returns_);
  append(&data, classes_);
  append(&data, accepting_);
  return data;
}

Machine Machine::deserialize(const std::string& data) {
  Header header{};
  require(data.size() >= sizeof(header));
  std::memcpy(&header, data.data(), sizeof(header));
  require(0 < header.states && header.states <= kMaxStates);
  require(0 < header.classes && header.classes <= 256);
  require(0 < header.runs);
  require(0 <= header.entries && header.entries <= INT16_MAX);
  require(0 <= header.exits && header.exits <= INT16_MAX);
  require(0 <= header.actions && header.actions <= kMaxActions && 0 <= header.returns);
  require(0 <= header.counts && header.counts <= INT16_MAX);
  Machine out;
  out.num_classes_ = header.classes;
  out.num_exits_ = header.exits;
  size_t position = sizeof(header);
  read(data, &position, at(header.entries) + 1, &out.returns_begin_);
  read(data, &position, at(header.counts), &out.counts_);
  read(data, &position, header.counts > 0 ? at(header.states) : 0, &out.limits_);
  read(data, &position, at(header.runs), &out.runs_);
  read(data, &position, at(header.actions), &out.actions_);
  read(data, &position, at(header.returns), &out.returns_);
  read(data, &position, 256, &out.classes_);
  read(data, &position, at(header.states), &out.accepting_);
  require(position == data.size());
  out.check();
  out.build_table();
  return out;
}

void Machine::build_table() {
  next_.clear();
  next_.reserve(accepting_.size() * at(num_classes_));
  int16_t first = 0;  // class
  for (const Run& run : runs_) {
    next_.insert(next_.end(), at(run.last + 1 - first), run.next);
    first = run.last + 1 == num_classes_ ? 0 : static_cast<int16_t>(run.last + 1);
  }
}

// Requires that all numbers are within their ranges (invariant 4).
void Machine::check() const {
  const auto states = static_cast<int32_t>(accepting_.size());
  for (size_t byte = 0; byte < 256; ++byte) {  // the classes ascend without gaps from 0
    const int32_t previous = byte == 0 ? 0 : classes_[byte - 1];
    require(classes_[byte] == previous || (byte > 0 && classes_[byte] == previous + 1));
  }
  require(classes_[255] == num_classes_ - 1);
  int32_t ends = 0;   // states whose runs end
  int16_t first = 0;  // first class of the next run
  for (const Run& run : runs_) {
    require(run.next < states && kFirstAction - run.next < static_cast<int32_t>(actions_.size()));
    require(first <= run.last && run.last < num_classes_);
    const bool is_end = run.last + 1 == num_classes_;
    ends += is_end ? 1 : 0;
    first = is_end ? 0 : static_cast<int16_t>(run.last + 1);
  }
  require(first == 0 && ends == states);
  for (const Action& action : actions_) {
    const int32_t targets = action.entry == kPop     ? num_exits_
                            : action.entry == kCount ? static_cast<int32_t>(counts_.size())
                                                     : states;
    require(kReset <= action.entry && action.entry < num_entries());
    require(0 <= action.target && action.target < targets);
  }
  for (const Count& count : counts_) {
    require(0 < count.limit && 0 <= count.below && count.below < states);
    require(0 <= count.reached && count.reached < states);
  }
  for (const int32_t limit : limits_) require(0 < limit);
  require(returns_begin_.front() == 0);
  require(returns_begin_.back() == static_cast<int32_t>(returns_.size()));
  for (size_t entry = 0; entry + 1 < returns_begin_.size(); ++entry) {
    require(returns_begin_[entry] < returns_begin_[entry + 1]);
    require(returns_begin_[entry + 1] <= returns_begin_.back());
    for (int32_t i = returns_begin_[entry]; i < returns_begin_[entry + 1]; ++i) {
      const Return& now = returns_[at(i)];
      require(0 <= now.exit && now.exit < num_exits_ && 0 <= now.state && now.state < states);
      require(i == returns_begin_[entry] || returns_[at(i) - 1].exit < now.exit);
    }
  }
  for (const uint8_t accepting : accepting_) require(accepting <= 1);
}

}  // namespace graft::guide
