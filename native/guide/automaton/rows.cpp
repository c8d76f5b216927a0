// Computes the mask rows of machines.
#include "guide/automaton/rows.h"

#include <algorithm>
#include <array>
#include <bitset>
#include <cstring>
#include <new>
#include <utility>

namespace graft::guide {

// Writes one mask row.
class AutomatonGrammar::Writer {
 public:
  // If `crossings` is not null, the row is a base row, and its crossings are added to `crossings`.
  Writer(const AutomatonGrammar& grammar, StackNodes* stack, int32_t limit,
         std::vector<Crossing>* crossings, int32_t* row)
      : grammar_(grammar),
        trie_(*grammar.trie_),
        walker_(grammar.walker()),
        stack_(*stack),
        limit_(limit),
        crossings_(crossings),
        row_(row) {}

  void write(Position position) {
    if (!write_text_rows(position) && !write_text_exceptions(position)) add_text(position);
    add(trie_.range(TokenTrie::kOther), 0, position);
  }

  // Sets the bits of the legal tokens in a range of trie nodes. The topmost nodes of the range have
  // the depth `depth`. The machine is at `position` before it reads the byte of such a node.
  void add(TokenTrie::Range range, int depth, Position position) {
    walker_.visit(
        trie_, range, depth, position, &stack_,
        [this](int32_t index, Position after) {
          add_node(index, after);
          return true;
        },
        [](int32_t) {}, [this](int32_t index, int16_t exit) { add_crossing(index, exit); });
  }

  void add_node(int32_t index, Position after) {
    const int32_t token = trie_.node(index).token;
    if (token < 0) return;
    if (is_within_limit(after)) {
      set(token, true);
    } else {
      is_narrowed_ = true;
    }
  }

  int32_t largest_distance() const { return largest_distance_; }
  // The TokenTrie::text_row() from which the written row was derived; null if it was derived from
  // the row without tokens.
  const int32_t* start() const { return start_; }
  // Whether the limit has excluded a legal token.
  bool is_narrowed() const { return is_narrowed_; }

 private:
  void clear() { std::memset(row_, 0, static_cast<size_t>(trie_.words()) * sizeof(int32_t)); }

  void set(int32_t token, bool legal) {
    for (; token >= 0; token = trie_.next_equal(token)) {
      const auto bit = static_cast<int32_t>(1u << (token & 31));
      row_[token >> 5] = legal ? row_[token >> 5] | bit : row_[token >> 5] & ~bit;
    }
  }

  bool is_within_limit(Position position) {
    const int32_t distance = grammar_.distances_.of_position(position, stack_);
    largest_distance_ = std::max(largest_distance_, distance);
    return distance <= limit_;
  }

  void add_crossing(int32_t index, int16_t exit) {
    if (crossings_ != nullptr) crossings_->push_back({index, exit});
  }

  // If all characters of text tokens lead to the same next state, and this holds for every
  // following state up to one in which all characters are illegal, the legality of a text token
  // depends only on its length. The row then consists of rows that TokenTrie has stored.
  bool write_text_rows(Position position) {
    const auto words = static_cast<size_t>(trie_.words());
    std::array<bool, TokenTrie::kMaxTextLength + 1> allowed{};  // by number of characters
    int length = 0;
    for (; length < TokenTrie::kMaxTextLength; ++length) {
      const int16_t next = grammar_.text_states_.successor(position.state);
      if (next == TextStates::kSeveral) return false;
      if (next == Machine::kDead) break;
      if (next >= 0) {
        position.state = next;
      } else {
        walker_.act(next, &position, &stack_);
      }
      allowed[at(length) + 1] = is_within_limit(position);
    }
    clear();
    if (length > 0) start_ = trie_.text_row(length);
    for (int last = length; last > 0;) {  // for each range of lengths with equal `allowed`
      int first = last;
      while (first > 0 && allowed[at(first)] == allowed[at(last)]) --first;
      const int32_t* shorter = trie_.text_row(first);
      const int32_t* row = trie_.text_row(last);
      for (size_t i = 0; i < words; ++i) {
        const int32_t tokens = row[i] & ~shorter[i];
        if (allowed[at(last)]) {
          row_[i] |= tokens;
        } else {
          is_narrowed_ = is_narrowed_ || tokens != 0;
        }
      }
      last = first;
    }
    return true;
  }

  // If all text is legal here or after at least half of the printable ASCII characters, copies the
  // row of all text tokens (see TokenTrie), and visits only the tokens that begin with other
  // characters, to remove the illegal ones. Otherwise returns false.
  bool write_text_exceptions(Position position) {
    int count = 0;
    for (int byte = 0x20; byte < 0x7F && !fits_any_text(position); ++byte) {
      const int16_t next = grammar_.machine_.next(position.state, static_cast<uint8_t>(byte));
      count += next >= 0 && fits_any_text({next, position.top, position.count}) ? 1 : 0;
    }
    if (!fits_any_text(position) && 2 * count < 0x7F - 0x20) return false;
    start_ = trie_.text_row(TokenTrie::kMaxTextLength);
    std::memcpy(row_, start_, static_cast<size_t>(trie_.words()) * sizeof(int32_t));
    if (skips_any_text(position)) return true;
    walker_.visit(
        trie_, trie_.range(TokenTrie::kText), 0, position, &stack_,
        [this](int32_t index, Position after) {
          set(trie_.node(index).token, false);
          add_node(index, after);
          return !skips_any_text(after);
        },
        [this](int32_t index) { remove(index); },
        [this](int32_t index, int16_t exit) {
          remove(index);
          add_crossing(index, exit);
        });
    return true;
  }

  // Whether all text is legal in a position, within the limit. This is false within a character,
  // because only bytes from 0x80 to 0xBF are legal there.
  bool fits_any_text(Position position) const { return any_text_distance(position) <= limit_; }
  bool skips_any_text(Position position) {
    if (!fits_any_text(position)) return false;
    largest_distance_ =
        std::max(largest_distance_, static_cast<int32_t>(any_text_distance(position)));
    return true;
  }
  // Returns the largest distance after any text, or more than any limit if a text is illegal.
  int64_t any_text_distance(Position position) const {
    const int32_t distance = grammar_.text_states_.any_text_distance(position.state);
    if (distance < 0 || !grammar_.is_far_from_limit(position)) return int64_t{INT32_MAX} + 1;
    return add_distances(distance, stack_.cost(position.top));
  }

  // Writes the row of the text tokens by visiting them one by one. If the limit excludes a state
  // from which every character leads back to this state, it excludes all longer tokens as well, so
  // these are not visited.
  void add_text(Position position) {
    clear();
    walker_.visit(
        trie_, trie_.range(TokenTrie::kText), 0, position, &stack_,
        [this](int32_t index, Position after) {
          if (grammar_.text_states_.successor(after.state) == after.state &&
              !is_within_limit(after)) {
            is_narrowed_ = true;
            return false;
          }
          add_node(index, after);
          return true;
        },
        [](int32_t) {}, [this](int32_t index, int16_t exit) { add_crossing(index, exit); });
  }

  // Clears the bits of a node and its descendants.
  void remove(int32_t index) {
    for (int32_t i = index; i < trie_.node(index).end; ++i) {
      if (trie_.node(i).token >= 0) set(trie_.node(i).token, false);
    }
  }

  const AutomatonGrammar& grammar_;
  const TokenTrie& trie_;
  const Walker walker_;
  StackNodes& stack_;
  int32_t limit_;
  std::vector<Crossing>* crossings_;
  int32_t* row_;
  const int32_t* start_ = nullptr;
  int32_t largest_distance_ = 0;
  bool is_narrowed_ = false;
};

int64_t AutomatonGrammar::BaseRow::nbytes() const {
  return static_cast<int64_t>(sizeof(BaseRow) + (bits.size() + changed.size()) * sizeof(int32_t) +
                              crossings.size() * sizeof(Crossing));
}

void AutomatonGrammar::BaseRow::copy_to(int32_t* row, int64_t words) const noexcept {
  const size_t nbytes = static_cast<size_t>(words) * sizeof(int32_t);
  if (!bits.empty()) {
    std::memcpy(row, bits.data(), nbytes);
    return;
  }
  if (start == nullptr) {
    std::memset(row, 0, nbytes);
  } else {
    std::memcpy(row, start, nbytes);
  }
  for (const int32_t token : changed) row[token >> 5] ^= static_cast<int32_t>(1u << (token & 31));
}

AutomatonGrammar::AutomatonGrammar(Machine machine, std::shared_ptr<const TokenTrie> trie,
                                   std::shared_ptr<RowMemory> memory)
    : machine_(std::move(machine)),
      trie_(std::move(trie)),
      memory_(std::move(memory)),
      distances_(machine_, *trie_),
      text_states_(machine_, distances_) {
  machine_.drop_runs();
  rows_ = std::vector<std::atomic<const BaseRow*>>(at(machine_.num_states()));
}

AutomatonGrammar::~AutomatonGrammar() {
  const auto remove = [this](const std::atomic<const BaseRow*>& entry) {
    const BaseRow* row = entry.load(std::memory_order_acquire);
    if (row != nullptr) memory_->give_back(row->nbytes());
    delete row;
  };
  std::for_each(rows_.begin(), rows_.end(), remove);
  for (const auto& item : near_rows_) remove(item.second);
}

size_t AutomatonGrammar::nbytes() const {
  return machine_.nbytes() + distances_.nbytes() + text_states_.nbytes() +
         rows_.size() * sizeof(rows_[0]);
}

bool AutomatonGrammar::fill(Position position, StackNodes* stack, int32_t limit,
                            int32_t* row) const noexcept {
  Writer writer(*this, stack, limit, nullptr, row);
  const BaseRow* base = base_row(position, stack, row);
  if (base == nullptr || add_distances(base->largest_distance, stack->cost(position.top)) > limit) {
    writer.write(position);
    return writer.is_narrowed();
  }
  base->copy_to(row, trie_->words());
  if (position.top == kEmptyStack) return false;
  const StackNodes::Node top = stack->node(position.top);
  for (const Crossing& crossing : base->crossings) {
    const int16_t state = machine_.return_state(top.entry, crossing.exit);
    if (state == Machine::kDead) continue;
    const Position after{state, top.parent};
    const TokenTrie::Node& node = trie_->node(crossing.node);
    writer.add_node(crossing.node, after);
    if (node.end > crossing.node + 1) {
      writer.add({crossing.node + 1, node.end}, node.depth + 1, after);
    }
  }
  return writer.is_narrowed();
}

// Returns whether no token can make the counter reach a limit.
bool AutomatonGrammar::is_far_from_limit(Position position) const noexcept {
  const int32_t limit = machine_.limit(position.state);
  return limit == Machine::kNoLimit || limit - position.count > trie_->most_characters();
}

// Returns where the base row of a position is stored. Throws std::bad_alloc.
std::atomic<const AutomatonGrammar::BaseRow*>& AutomatonGrammar::stored_row(
    Position position) const {
  if (is_far_from_limit(position)) return rows_[at(position.state)];
  const std::lock_guard<std::mutex> lock(near_rows_mutex_);
  return near_rows_[{position.state, position.count}];
}

// Returns the base row of a position, and computes it if this has not been done. Returns null if
// there is no memory to store it. The call may overwrite `row`.
const AutomatonGrammar::BaseRow* AutomatonGrammar::base_row(Position position, StackNodes* stack,
                                                            int32_t* row) const noexcept {
  const int64_t largest = static_cast<int64_t>(sizeof(BaseRow)) + trie_->words() * 4;
  int64_t taken = 0;
  try {
    std::atomic<const BaseRow*>& entry = stored_row(position);
    if (const BaseRow* stored = entry.load(std::memory_order_acquire)) return stored;
    if (!memory_->take(largest)) return nullptr;
    taken = largest;
    if (is_far_from_limit(position)) position.count = 0;
    std::unique_ptr<BaseRow> base = compute_base_row(position, stack, row);
    memory_->give_back(largest - base->nbytes());
    taken = base->nbytes();
    const BaseRow* expected = nullptr;
    if (entry.compare_exchange_strong(expected, base.get(), std::memory_order_acq_rel)) {
      return base.release();
    }
    memory_->give_back(taken);  // another thread has stored this row meanwhile
    return expected;
  } catch (const std::bad_alloc&) {
    memory_->give_back(taken);
    return nullptr;
  }
}

std::unique_ptr<AutomatonGrammar::BaseRow> AutomatonGrammar::compute_base_row(Position position,
                                                                              StackNodes* stack,
                                                                              int32_t* row) const {
  auto base = std::make_unique<BaseRow>();
  Writer writer(*this, stack, kNoLimit, &base->crossings, row);
  writer.write({position.state, kEmptyStack, position.count});
  base->crossings.shrink_to_fit();
  base->largest_distance = writer.largest_distance();
  base->start = writer.start();
  const auto words = static_cast<size_t>(trie_->words());
  const auto changed_bits = [&](size_t i) {
    return static_cast<uint32_t>(row[i] ^ (base->start == nullptr ? 0 : base->start[i]));
  };
  size_t count = 0;
  for (size_t i = 0; i < words; ++i) count += std::bitset<32>(changed_bits(i)).count();
  if (2 * count > words) {
    base->bits.assign(row, row + words);
    return base;
  }
  base->changed.reserve(count);
  for (size_t i = 0; i < words; ++i) {
    for (uint32_t bits = changed_bits(i); bits != 0; bits &= bits - 1) {
      const int bit = __builtin_ctz(bits);
      base->changed.push_back(static_cast<int32_t>(32 * i) + bit);
    }
  }
  return base;
}

}  // namespace graft::guide
