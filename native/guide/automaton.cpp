// Compilation of expressions to automata, token bitmasks of automaton states, and their matchers.
#include "automaton.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <set>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include "hostwork/gate.h"

namespace nb = nanobind;

namespace graft::guide {
namespace {

constexpr size_t kMaxTokenLength = 4095;
constexpr int kMaxNesting = 500;
// Maximum number of expressions that building the nondeterministic automaton may visit, as a
// multiple of the maximum number of states.
constexpr int64_t kWorkPerState = 8;

// Maximum number of elementary steps of a determinization, which take about 50 ms.
constexpr int64_t kMaxWork = 10'000'000;

size_t at(int32_t index) { return static_cast<size_t>(index); }

struct CharRange {
  uint32_t low;
  uint32_t high;
};

struct ByteRange {
  uint8_t low;
  uint8_t high;
};

// The set of texts that have one byte from each of one to four ranges, in order.
struct ByteSequence {
  std::array<ByteRange, 4> ranges;
  int length;
};

// Writes the UTF-8 bytes of a character and returns their number.
int encode_utf8(uint32_t character, std::array<uint8_t, 4>* out) {
  const auto tail = [character](int shift) {
    return static_cast<uint8_t>(0x80 | (character >> shift & 0x3F));
  };
  if (character < 0x80) {
    *out = {static_cast<uint8_t>(character)};
    return 1;
  }
  if (character < 0x800) {
    *out = {static_cast<uint8_t>(0xC0 | character >> 6), tail(0)};
    return 2;
  }
  if (character < 0x10000) {
    *out = {static_cast<uint8_t>(0xE0 | character >> 12), tail(6), tail(0)};
    return 3;
  }
  *out = {static_cast<uint8_t>(0xF0 | character >> 18), tail(12), tail(6), tail(0)};
  return 4;
}

// Appends sequences of byte ranges that match exactly the UTF-8 texts of a range of characters.
//
// The range is split into parts, so that one sequence of byte ranges matches each part. All
// characters of a part have the same number of bytes. They share the first bytes; the next byte
// has a range of values; and each byte after it takes all values from 0x80 to 0xBF.
void split_utf8(CharRange range, std::vector<ByteSequence>* out) {
  if (range.low > range.high) return;
  if (range.low <= 0xDFFF && range.high >= 0xD800) {  // surrogates are not characters
    if (range.low < 0xD800) split_utf8({range.low, 0xD7FF}, out);
    if (range.high > 0xDFFF) split_utf8({0xE000, range.high}, out);
    return;
  }
  for (const uint32_t last : {0x7Fu, 0x7FFu, 0xFFFFu}) {  // the last character of each length
    if (range.low <= last && range.high > last) {
      split_utf8({range.low, last}, out);
      split_utf8({last + 1, range.high}, out);
      return;
    }
  }
  std::array<uint8_t, 4> low{};
  std::array<uint8_t, 4> high{};
  const int length = encode_utf8(range.low, &low);
  encode_utf8(range.high, &high);
  for (int tail = length - 1; tail > 0; --tail) {
    const uint32_t mask = (1u << (6 * tail)) - 1;  // the bits of the last `tail` bytes
    if ((range.low & ~mask) == (range.high & ~mask)) continue;
    if ((range.low & mask) != 0) {
      split_utf8({range.low, range.low | mask}, out);
      split_utf8({(range.low | mask) + 1, range.high}, out);
      return;
    }
    if ((range.high & mask) != mask) {
      split_utf8({range.low, (range.high & ~mask) - 1}, out);
      split_utf8({range.high & ~mask, range.high}, out);
      return;
    }
  }
  ByteSequence sequence{{}, length};
  for (int i = 0; i < length; ++i) sequence.ranges[at(i)] = {low[at(i)], high[at(i)]};
  out->push_back(sequence);
}

enum class Op : int32_t { kEmpty = 0, kSet = 1, kConcat = 2, kUnion = 3, kRepeat = 4 };

struct Expression {
  Op op;
  std::vector<int32_t> children;        // operands of kConcat, kUnion and kRepeat (only one)
  std::vector<ByteSequence> sequences;  // kSet
  int32_t min = 0;                      // kRepeat
  int32_t max = 0;                      // kRepeat; -1: no limit
  int nesting = 0;
};

// Reads the postfix notation of an expression.
//
// The program consists of operations with their operands:
//   0                               the empty text
//   1, n, low_1, high_1, ...        one character from n ranges
//   2, n                            the last n expressions, one after the other
//   3, n                            one of the last n expressions
//   4, min, max                     the last expression, repeated; max -1 means no limit
class ProgramReader {
 public:
  explicit ProgramReader(const std::vector<int32_t>& program) : program_(program) {}

  std::vector<Expression> read() {
    while (position_ < program_.size()) read_operation();
    if (stack_.size() != 1) fail();
    return std::move(nodes_);
  }

 private:
  [[noreturn]] static void fail() { throw std::runtime_error("automaton: malformed expression"); }

  int32_t operand(int32_t low) {
    if (position_ >= program_.size() || program_[position_] < low) fail();
    return program_[position_++];
  }

  void read_operation() {
    Expression node{static_cast<Op>(operand(0)), {}, {}};
    switch (node.op) {
      case Op::kEmpty:
        break;
      case Op::kSet:
        read_set(&node);
        break;
      case Op::kConcat:
      case Op::kUnion:
        take_children(&node, operand(1));
        break;
      case Op::kRepeat:
        node.min = operand(0);
        node.max = operand(-1);
        if (node.max >= 0 && node.max < node.min) fail();
        take_children(&node, 1);
        break;
      default:
        fail();
    }
    stack_.push_back(static_cast<int32_t>(nodes_.size()));
    nodes_.push_back(std::move(node));
  }

  void read_set(Expression* node) {
    for (int32_t count = operand(0); count > 0; --count) {
      const int32_t low = operand(0);
      const int32_t high = operand(low);
      if (high > 0x10FFFF) fail();
      split_utf8({static_cast<uint32_t>(low), static_cast<uint32_t>(high)}, &node->sequences);
    }
  }

  void take_children(Expression* node, int32_t count) {
    if (at(count) > stack_.size()) fail();
    node->children.assign(stack_.end() - count, stack_.end());
    stack_.resize(stack_.size() - at(count));
    for (const int32_t child : node->children) {
      node->nesting = std::max(node->nesting, nodes_[at(child)].nesting + 1);
    }
    if (node->nesting > kMaxNesting) {
      throw std::length_error("automaton: expression is nested too deeply");
    }
  }

  const std::vector<int32_t>& program_;
  size_t position_ = 0;
  std::vector<int32_t> stack_;
  std::vector<Expression> nodes_;
};

// A nondeterministic automaton: each state has either one byte edge or edges without a byte.
class Nfa {
 public:
  struct State {
    ByteRange range{1, 0};      // bytes of the byte edge; empty if the state has none
    int32_t next = -1;          // target of the byte edge
    std::vector<int32_t> free;  // targets of the edges without a byte
  };

  Nfa(const std::vector<Expression>& nodes, int32_t max_states)
      : nodes_(nodes), max_states_(max_states) {
    start = add();
    accept = emit(static_cast<int32_t>(nodes.size()) - 1, start);
  }

  std::vector<State> states;
  int32_t start;
  int32_t accept;

 private:
  int32_t add() {
    if (static_cast<int32_t>(states.size()) >= max_states_) {
      throw std::length_error("automaton: expression is too large");
    }
    states.emplace_back();
    return static_cast<int32_t>(states.size()) - 1;
  }

  void connect(int32_t from, int32_t to) { states[at(from)].free.push_back(to); }

  // Adds expression number `index`, which begins at state `from`. Returns the state at its end.
  int32_t emit(int32_t index, int32_t from) {
    // Count the calls, because repetitions of the empty text take time but add no states.
    if (++work_ > kWorkPerState * max_states_) {
      throw std::length_error("automaton: expression is too large");
    }
    const Expression& node = nodes_[at(index)];
    switch (node.op) {
      case Op::kSet:
        return emit_set(node, from);
      case Op::kConcat:
        for (const int32_t child : node.children) from = emit(child, from);
        return from;
      case Op::kUnion:
        return emit_union(node, from);
      case Op::kRepeat:
        return emit_repeat(node, from);
      default:
        return from;
    }
  }

  int32_t emit_set(const Expression& node, int32_t from) {
    const int32_t end = add();
    for (const ByteSequence& sequence : node.sequences) {
      int32_t state = add();
      connect(from, state);
      for (int i = 0; i < sequence.length; ++i) {
        const int32_t next = i + 1 == sequence.length ? end : add();
        states[at(state)].range = sequence.ranges[at(i)];
        states[at(state)].next = next;
        state = next;
      }
    }
    return end;
  }

  int32_t emit_union(const Expression& node, int32_t from) {
    const int32_t end = add();
    for (const int32_t child : node.children) {
      const int32_t begin = add();
      connect(from, begin);
      connect(emit(child, begin), end);
    }
    return end;
  }

  int32_t emit_repeat(const Expression& node, int32_t from) {
    const int32_t child = node.children[0];
    for (int32_t i = 0; i < node.min; ++i) from = emit(child, from);
    if (node.max < 0) {
      const int32_t loop = add();
      connect(from, loop);
      const int32_t body = add();
      connect(loop, body);
      connect(emit(child, body), loop);
      const int32_t end = add();
      connect(loop, end);
      return end;
    }
    const int32_t end = add();
    connect(from, end);
    for (int32_t i = node.min; i < node.max; ++i) {
      from = emit(child, from);
      connect(from, end);
    }
    return end;
  }

  const std::vector<Expression>& nodes_;
  int32_t max_states_;
  int64_t work_ = 0;  // number of calls of emit()
};

struct SetHash {
  size_t operator()(const std::vector<int32_t>& set) const {
    size_t hash = set.size();
    for (const int32_t state : set) hash = hash * 1'000'003 + static_cast<size_t>(state);
    return hash;
  }
};

}  // namespace

// Converts a nondeterministic automaton to a deterministic one with the subset construction.
class Determinizer {
 public:
  Determinizer(const Nfa& nfa, const AutomatonLimits& limits) : nfa_(nfa), limits_(limits) {}

  Automaton run() {
    find_classes();
    marks_.assign(nfa_.states.size(), 0);
    pending_.push_back(nfa_.start);
    close();
    if (state_of_set() == Automaton::kDead) fail_without_text();
    for (size_t state = 0; state < sets_.size(); ++state) add_transitions(state);
    remove_dead_states();
    return std::move(out_);
  }

 private:
  // Assigns the same class to bytes that no edge distinguishes.
  void find_classes() {
    std::array<bool, 257> begins{};
    begins[0] = true;
    for (const Nfa::State& state : nfa_.states) {
      if (state.next < 0) continue;
      begins[state.range.low] = true;
      begins[state.range.high + 1u] = true;
    }
    int index = -1;
    for (size_t byte = 0; byte < 256; ++byte) {
      if (begins[byte]) {
        ++index;
        first_byte_.push_back(static_cast<uint8_t>(byte));
      }
      out_.classes_[byte] = static_cast<uint8_t>(index);
    }
    out_.num_classes_ = first_byte_.size();
  }

  // Stores in `set_`, sorted, the states that can be reached from `pending_` by edges without a
  // byte. States that have only such edges are left out, except the accepting state. Empties
  // `pending_`.
  void close() {
    ++mark_;
    set_.clear();
    while (!pending_.empty()) {
      const int32_t index = pending_.back();
      pending_.pop_back();
      if (marks_[at(index)] == mark_) continue;
      marks_[at(index)] = mark_;
      count_work(1);
      const Nfa::State& state = nfa_.states[at(index)];
      if (state.next >= 0 || index == nfa_.accept) set_.push_back(index);
      pending_.insert(pending_.end(), state.free.begin(), state.free.end());
    }
    std::sort(set_.begin(), set_.end());
  }

  // Returns the deterministic state that represents the states in `set_`. Adds it if it is new.
  int16_t state_of_set() {
    if (set_.empty()) return Automaton::kDead;
    const auto found = numbers_.find(set_);
    if (found != numbers_.end()) return found->second;
    if (static_cast<int32_t>(sets_.size()) >= limits_.states) {
      throw std::length_error("automaton: has more than " + std::to_string(limits_.states) +
                              " states");
    }
    const auto number = static_cast<int16_t>(sets_.size());
    const bool accepting = std::binary_search(set_.begin(), set_.end(), nfa_.accept);
    out_.accepting_.push_back(accepting ? 1 : 0);
    numbers_.emplace(set_, number);
    sets_.push_back(set_);
    return number;
  }

  void add_transitions(size_t state) {
    int16_t previous = Automaton::kDead;
    for (const uint8_t byte : first_byte_) {
      pending_.clear();
      for (const int32_t index : sets_[state]) {
        const Nfa::State& from = nfa_.states[at(index)];
        if (from.next >= 0 && from.range.low <= byte && byte <= from.range.high) {
          pending_.push_back(from.next);
        }
      }
      count_work(static_cast<int64_t>(sets_[state].size()));
      // `pending_` are the targets of this class of bytes, `targets_` those of the previous class.
      // They are often equal. The next state is then also the same and need not be computed again.
      if (byte == 0 || pending_ != targets_) {
        targets_ = pending_;
        close();
        previous = state_of_set();
      }
      out_.table_.push_back(previous);
    }
  }

  [[noreturn]] static void fail_without_text() {
    throw std::domain_error("automaton: expression allows no text");
  }

  void count_work(int64_t steps) {
    work_ += steps;
    if (work_ > kMaxWork) throw std::length_error("automaton: takes too long to compile");
  }

  // Removes the states that cannot reach an accepting state (invariant 2 of automaton.h).
  void remove_dead_states() {
    const size_t classes = out_.num_classes_;
    const size_t count = out_.accepting_.size();
    std::vector<std::vector<size_t>> sources(count);
    for (size_t edge = 0; edge < out_.table_.size(); ++edge) {
      if (out_.table_[edge] >= 0) sources[at(out_.table_[edge])].push_back(edge / classes);
    }
    std::vector<bool> live(count);
    std::vector<size_t> pending;
    for (size_t state = 0; state < count; ++state) {
      if (out_.accepting_[state] != 0) pending.push_back(state);
    }
    while (!pending.empty()) {
      const size_t state = pending.back();
      pending.pop_back();
      if (live[state]) continue;
      live[state] = true;
      pending.insert(pending.end(), sources[state].begin(), sources[state].end());
    }
    if (!live[0]) fail_without_text();
    std::vector<int16_t> number(count, Automaton::kDead);
    int16_t kept = 0;
    for (size_t state = 0; state < count; ++state) {
      if (live[state]) number[state] = kept++;
    }
    std::vector<int16_t> table;
    std::vector<uint8_t> accepting;
    for (size_t state = 0; state < count; ++state) {
      if (!live[state]) continue;
      accepting.push_back(out_.accepting_[state]);
      for (size_t edge = state * classes; edge < (state + 1) * classes; ++edge) {
        const int16_t next = out_.table_[edge];
        table.push_back(next < 0 ? Automaton::kDead : number[at(next)]);
      }
    }
    out_.table_ = std::move(table);
    out_.accepting_ = std::move(accepting);
  }

  const Nfa& nfa_;
  const AutomatonLimits& limits_;
  Automaton out_;
  std::vector<uint8_t> first_byte_;         // smallest byte of each class
  std::vector<std::vector<int32_t>> sets_;  // set of Nfa states for each state of the automaton
  std::unordered_map<std::vector<int32_t>, int16_t, SetHash> numbers_;
  std::vector<int32_t> pending_;  // Nfa states whose edges close() follows
  std::vector<int32_t> targets_;  // Nfa states that the previous byte class leads to
  std::vector<int32_t> set_;      // result of close()
  std::vector<int32_t> marks_;    // by state of the Nfa: number of the last close() that visited it
  int32_t mark_ = 0;
  int64_t work_ = 0;
};

Automaton Automaton::compile(const std::vector<int32_t>& program, const AutomatonLimits& limits) {
  const std::vector<Expression> nodes = ProgramReader(program).read();
  const Nfa nfa(nodes, limits.nfa_states);
  return Determinizer(nfa, limits).run();
}

std::string Automaton::serialize() const {
  const std::array<int32_t, 2> sizes = {num_states(), static_cast<int32_t>(num_classes_)};
  std::string data(reinterpret_cast<const char*>(sizes.data()), sizeof(sizes));
  data.append(reinterpret_cast<const char*>(classes_.data()), classes_.size());
  data.append(reinterpret_cast<const char*>(accepting_.data()), accepting_.size());
  data.append(reinterpret_cast<const char*>(table_.data()), table_.size() * sizeof(int16_t));
  return data;
}

Automaton Automaton::deserialize(const std::string& data) {
  const auto require = [](bool valid) {
    if (!valid) throw std::runtime_error("automaton: invalid data");
  };
  std::array<int32_t, 2> sizes{};
  require(data.size() >= sizeof(sizes));
  std::memcpy(sizes.data(), data.data(), sizeof(sizes));
  require(0 < sizes[0] && sizes[0] <= INT16_MAX && 0 < sizes[1] && sizes[1] <= 256);
  Automaton out;
  out.num_classes_ = at(sizes[1]);
  out.accepting_.resize(at(sizes[0]));
  out.table_.resize(at(sizes[0]) * out.num_classes_);
  const size_t table_bytes = out.table_.size() * sizeof(int16_t);
  const char* position = data.data() + sizeof(sizes);
  require(data.size() == sizeof(sizes) + 256 + out.accepting_.size() + table_bytes);
  std::memcpy(out.classes_.data(), position, 256);
  std::memcpy(out.accepting_.data(), position + 256, out.accepting_.size());
  std::memcpy(out.table_.data(), position + 256 + out.accepting_.size(), table_bytes);
  for (const uint8_t byte_class : out.classes_) require(byte_class < sizes[1]);
  for (const int16_t next : out.table_) require(kDead <= next && next < sizes[0]);
  return out;
}

TokenTrie::TokenTrie(const std::vector<uint32_t>& lengths, std::string bytes, int32_t vocab_size)
    : vocab_size_(vocab_size), bytes_(std::move(bytes)), offsets_{0} {
  for (const uint32_t length : lengths) {
    offsets_.push_back(offsets_.back() + length);
    max_length_ = std::max<size_t>(max_length_, length);
  }
  if (offsets_.back() != bytes_.size() || lengths.size() > at(vocab_size)) {
    throw std::runtime_error("token trie: the lengths do not fit the bytes or the vocabulary");
  }
  if (max_length_ > kMaxTokenLength) {
    throw std::runtime_error("token trie: a token is longer than 4095 bytes");
  }
  std::vector<int32_t> order;
  for (size_t token = 0; token < lengths.size(); ++token) {
    if (lengths[token] > 0) order.push_back(static_cast<int32_t>(token));
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return text_of(a) < text_of(b); });
  next_equal_.assign(lengths.size(), -1);
  plain_row_.assign(static_cast<size_t>(words()), 0);
  std::vector<int32_t> plain;
  std::vector<int32_t> other;
  for (const int32_t token : order) {
    const std::string_view now = text_of(token);
    if (!std::all_of(now.begin(), now.end(), [](char c) { return is_plain(uint8_t(c)); })) {
      other.push_back(token);
      continue;
    }
    plain.push_back(token);
    plain_row_[at(token >> 5)] |= static_cast<int32_t>(1u << (token & 31));
  }
  plain_nodes_ = make_nodes(plain);
  other_nodes_ = make_nodes(other);
}

std::vector<TokenTrie::Node> TokenTrie::make_nodes(const std::vector<int32_t>& tokens) {
  std::vector<Node> nodes;
  std::vector<int32_t> open;  // nodes on the path of the current token, by depth
  for (size_t i = 0; i < tokens.size(); ++i) {
    const std::string_view now = text_of(tokens[i]);
    if (i > 0 && now == text_of(tokens[i - 1])) {
      next_equal_[at(tokens[i - 1])] = tokens[i];
      continue;
    }
    size_t common = 0;
    while (common < now.size() && common < open.size() &&
           static_cast<char>(nodes[at(open[common])].byte) == now[common]) {
      ++common;
    }
    for (size_t depth = common; depth < open.size(); ++depth) {
      nodes[at(open[depth])].end = static_cast<int32_t>(nodes.size());
    }
    open.resize(common);
    for (size_t depth = common; depth < now.size(); ++depth) {
      open.push_back(static_cast<int32_t>(nodes.size()));
      nodes.push_back({-1, 0, static_cast<uint16_t>(depth), static_cast<uint8_t>(now[depth])});
    }
    nodes.back().token = tokens[i];
  }
  for (const int32_t node : open) nodes[at(node)].end = static_cast<int32_t>(nodes.size());
  return nodes;
}

RowPool::RowPool(int64_t words, int64_t bytes)
    : words_(words),
      max_rows_(static_cast<int32_t>(
          std::min<int64_t>(bytes / (words * static_cast<int64_t>(sizeof(int32_t))), INT32_MAX))),
      storage_(new int32_t[at(max_rows_) * static_cast<size_t>(words)]) {
  free_.reserve(at(max_rows_));
}

int32_t* RowPool::take() noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  int32_t index = used_;
  if (!free_.empty()) {
    index = free_.back();
    free_.pop_back();
  } else if (used_ < max_rows_) {
    ++used_;
  } else {
    return nullptr;
  }
  return storage_.get() + at(index) * static_cast<size_t>(words_);
}

void RowPool::give_back(const int32_t* row) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  free_.push_back(static_cast<int32_t>((row - storage_.get()) / words_));
}

int32_t RowPool::rows_in_use() noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  return used_ - static_cast<int32_t>(free_.size());
}

AutomatonGrammar::AutomatonGrammar(Automaton automaton, std::shared_ptr<const TokenTrie> trie,
                                   std::shared_ptr<RowPool> pool)
    : automaton_(std::move(automaton)), trie_(std::move(trie)), pool_(std::move(pool)) {
  if (pool_->words() != trie_->words()) {
    throw std::runtime_error("automaton: the row pool belongs to another vocabulary");
  }
  rows_ = std::vector<std::atomic<const int32_t*>>(at(automaton_.num_states()));
}

AutomatonGrammar::~AutomatonGrammar() {
  for (const std::atomic<const int32_t*>& entry : rows_) {
    const int32_t* row = entry.load(std::memory_order_acquire);
    if (row != nullptr) pool_->give_back(row);
  }
}

void AutomatonGrammar::fill(int16_t state, int32_t* row) const noexcept {
  const auto bytes = static_cast<size_t>(trie_->words()) * sizeof(int32_t);
  std::atomic<const int32_t*>& entry = rows_[at(state)];
  if (const int32_t* stored = entry.load(std::memory_order_acquire); stored != nullptr) {
    std::memcpy(row, stored, bytes);
    return;
  }
  compute(state, row);
  int32_t* copy = pool_->take();
  if (copy == nullptr) return;
  std::memcpy(copy, row, bytes);
  const int32_t* expected = nullptr;
  if (!entry.compare_exchange_strong(expected, copy, std::memory_order_release,
                                     std::memory_order_relaxed)) {
    pool_->give_back(copy);  // another thread has stored this row meanwhile
  }
}

void AutomatonGrammar::compute(int16_t state, int32_t* row) const noexcept {
  const auto bytes = static_cast<size_t>(trie_->words()) * sizeof(int32_t);
  bool stays = true;  // whether every plain byte leads from `state` back to `state`
  for (int byte = 0; byte < 256 && stays; ++byte) {
    const auto value = static_cast<uint8_t>(byte);
    stays = !TokenTrie::is_plain(value) || automaton_.next(state, value) == state;
  }
  if (stays) {
    std::memcpy(row, trie_->plain_row().data(), bytes);
  } else {
    std::memset(row, 0, bytes);
    add_legal(trie_->plain_nodes(), state, row);
  }
  add_legal(trie_->other_nodes(), state, row);
}

// Sets the bits of the tokens of a trie that are legal in a state.
void AutomatonGrammar::add_legal(const std::vector<TokenTrie::Node>& nodes, int16_t state,
                                 int32_t* row) const noexcept {
  std::array<int16_t, kMaxTokenLength + 1> path;  // state before the byte at each depth
  path[0] = state;
  const auto count = static_cast<int32_t>(nodes.size());
  for (int32_t i = 0; i < count;) {
    const TokenTrie::Node& node = nodes[at(i)];
    const int16_t next = automaton_.next(path[node.depth], node.byte);
    if (next == Automaton::kDead) {
      i = node.end;
      continue;
    }
    path[node.depth + 1u] = next;
    for (int32_t token = node.token; token >= 0; token = trie_->next_equal(token)) {
      row[token >> 5] |= static_cast<int32_t>(1u << (token & 31));
    }
    ++i;
  }
}

AutomatonMatcher::AutomatonMatcher(std::shared_ptr<const AutomatonGrammar> grammar,
                                   std::vector<int32_t> stop_ids)
    : grammar_(std::move(grammar)), stop_ids_(std::move(stop_ids)) {
  path_.reserve(4096);
  path_.push_back(0);
}

bool AutomatonMatcher::is_stop(int32_t token) const noexcept {
  return std::find(stop_ids_.begin(), stop_ids_.end(), token) != stop_ids_.end();
}

Outcome AutomatonMatcher::accept(int32_t token, ErrorText*) noexcept {
  if (terminated_) return Outcome::kNo;
  const int16_t state = path_.back();
  if (is_stop(token)) {
    if (!grammar_->automaton().accepting(state)) return Outcome::kNo;
    terminated_ = true;
    return Outcome::kYes;
  }
  const TokenTrie& trie = grammar_->trie();
  if (token < 0 || token >= trie.num_tokens() || trie.length(token) == 0) return Outcome::kNo;
  const int16_t next = grammar_->automaton().walk(state, trie.text(token), trie.length(token));
  if (next == Automaton::kDead) return Outcome::kNo;
  path_.push_back(next);
  return Outcome::kYes;
}

Filled AutomatonMatcher::fill(int32_t* row, int64_t words, int32_t, ErrorText* error) noexcept {
  if (words != grammar_->trie().words()) {
    error->keep("the mask row has another width than the vocabulary");
    return Filled::kFailed;
  }
  const int16_t state = path_.back();
  grammar_->fill(state, row);
  if (grammar_->automaton().accepting(state)) {
    for (const int32_t stop : stop_ids_) row[stop >> 5] |= static_cast<int32_t>(1u << (stop & 31));
  }
  return Filled::kMask;
}

Outcome AutomatonMatcher::rollback(int32_t tokens, ErrorText* error) noexcept {
  const auto accepted = static_cast<int32_t>(path_.size()) - 1 + (terminated_ ? 1 : 0);
  if (tokens < 0 || tokens > accepted) {
    error->keep("rollback: more tokens than were accepted");
    return Outcome::kFailed;
  }
  if (tokens > 0 && terminated_) {
    terminated_ = false;
    --tokens;
  }
  path_.resize(path_.size() - at(tokens));
  return Outcome::kYes;
}

void bind_automaton(nb::module_& guide) {
  using Release = nb::call_guard<graft::hostwork::GilRelease>;
  nb::class_<TokenTrie>(guide, "TokenTrie")
      .def(
          "__init__",
          [](TokenTrie* self, const std::vector<uint32_t>& lengths, const nb::bytes& bytes,
             int32_t vocab_size) {
            std::string text(bytes.c_str(), bytes.size());
            const graft::hostwork::GilRelease release;
            new (self) TokenTrie(lengths, std::move(text), vocab_size);
          },
          nb::arg("lengths"), nb::arg("bytes"), nb::arg("vocab_size"));
  nb::class_<RowPool>(guide, "RowPool")
      .def(nb::init<int64_t, int64_t>(), nb::arg("words"), nb::arg("bytes"))
      .def_prop_ro("rows_in_use", &RowPool::rows_in_use);
  guide.def(
      "compile_automaton",
      [](const std::vector<int32_t>& program, int32_t max_states) {
        AutomatonLimits limits;
        limits.states = max_states;
        std::string data;
        {
          const graft::hostwork::GilRelease release;
          data = Automaton::compile(program, limits).serialize();
        }
        return nb::bytes(data.data(), data.size());
      },
      nb::arg("program"), nb::arg("max_states"));
  nb::class_<AutomatonGrammar>(guide, "AutomatonGrammar")
      .def(
          "__init__",
          [](AutomatonGrammar* self, const nb::bytes& data, std::shared_ptr<const TokenTrie> trie,
             std::shared_ptr<RowPool> pool) {
            const std::string text(data.c_str(), data.size());
            new (self)
                AutomatonGrammar(Automaton::deserialize(text), std::move(trie), std::move(pool));
          },
          nb::arg("data"), nb::arg("trie"), nb::arg("pool"))
      .def_prop_ro("num_states",
                   [](const AutomatonGrammar& grammar) { return grammar.automaton().num_states(); })
      .def_prop_ro("nbytes",
                   [](const AutomatonGrammar& grammar) { return grammar.automaton().nbytes(); })
      .def("serialize", [](const AutomatonGrammar& grammar) {
        const std::string data = grammar.automaton().serialize();
        return nb::bytes(data.data(), data.size());
      });
  nb::class_<AutomatonMatcher, NativeMatcher>(guide, "AutomatonMatcher")
      .def(nb::init<std::shared_ptr<const AutomatonGrammar>, std::vector<int32_t>>(),
           nb::arg("grammar"), nb::arg("stop_ids"), Release())
      .def_prop_ro("grammar",
                   [](const AutomatonMatcher& matcher) {
                     // The cast is safe, because the Python class cannot change a grammar.
                     return std::const_pointer_cast<AutomatonGrammar>(matcher.grammar());
                   })
      .def_prop_ro("state", &AutomatonMatcher::state);
}

}  // namespace graft::guide
