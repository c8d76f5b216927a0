// Converts the expressions of rules to a nondeterministic automaton.
#include "guide/automaton/nfa.h"

#include <algorithm>
#include <deque>
#include <map>
#include <numeric>
#include <unordered_map>
#include <utility>

#include "guide/automaton/machine.h"

namespace graft::guide {
namespace {

// Whether a node matches only texts from a finite list, none of which is empty, such as one
// character in all of its spellings.
bool is_finite(const ExpressionTree& tree, int32_t index) {
  const ExpressionTree::Node& node = tree.node(index);
  if (node.op == Op::kSet) return true;
  if (node.op != Op::kConcat && node.op != Op::kUnion) return false;
  for (int32_t i = 0; i < node.num_children; ++i) {
    if (!is_finite(tree, tree.child(node, i))) return false;
  }
  return true;
}

// Neighbouring bytes with the same transition.
struct ByteRun {
  int16_t next;
  int16_t end;  // one more than the last byte
};
constexpr ByteRun kDeadRun = {Machine::kDead, 256};

// The transitions of all states of a machine as runs of bytes.
class ByteRuns {
 public:
  explicit ByteRuns(const Machine& machine) {
    std::array<int16_t, 256> ends{};  // by class: one more than the last byte
    for (int16_t byte = 0; byte < 256; ++byte) {
      ends[machine.classes()[at(byte)]] = static_cast<int16_t>(byte + 1);
    }
    runs_.reserve(machine.runs().size());
    for (const Machine::Run& run : machine.runs()) {
      if (runs_.empty() || runs_.back().end == 256) begins_.push_back(runs_.size());
      runs_.push_back({run.next, ends[at(run.last)]});
    }
  }

  // The last run of a state ends with 256.
  const ByteRun* begin(int32_t state) const { return &runs_[begins_[at(state)]]; }

 private:
  std::vector<ByteRun> runs_;
  std::vector<size_t> begins_;  // by state
};

// Maximum number of repetitions of a counted loop that a product unrolls.
constexpr int32_t kMaxTail = 64;

// `machine` reads texts that consist of parts, and `part` reads one part. Returns the number of
// parts that suffice to complete a text of `machine` after any number of parts.
int32_t longest_ending(const Machine& machine, const Machine& part, Work* work) {
  std::map<std::pair<int32_t, int32_t>, int32_t> numbers;  // by states of both machines
  std::vector<std::pair<int32_t, int32_t>> pairs;
  std::vector<std::vector<std::pair<int32_t, int32_t>>> sources;  // of edges: pair, parts that end
  const auto number_of = [&](int32_t state, int32_t part_state) {
    const auto [found, is_new] =
        numbers.try_emplace({state, part_state}, static_cast<int32_t>(pairs.size()));
    if (is_new) {
      pairs.push_back(found->first);
      sources.emplace_back();
    }
    return found->second;
  };
  number_of(0, 0);
  for (size_t i = 0; i < pairs.size(); ++i) {
    work->count(64);
    const auto [state, part_state] = pairs[i];
    for (size_t byte = 0; byte < 256; ++byte) {
      if (byte > 0 && machine.classes()[byte] == machine.classes()[byte - 1] &&
          part.classes()[byte] == part.classes()[byte - 1]) {
        continue;
      }
      const int16_t next = machine.next(state, static_cast<uint8_t>(byte));
      const int16_t part_next = part.next(part_state, static_cast<uint8_t>(byte));
      if (next < 0 || part_next < 0) continue;
      const bool ends = part.accepting(part_next);
      sources[at(number_of(next, ends ? 0 : part_next))].emplace_back(static_cast<int32_t>(i),
                                                                      ends);
    }
  }
  std::vector<int32_t> lengths(pairs.size(), -1);
  std::deque<std::pair<int32_t, int32_t>> queue;  // pair, length
  for (size_t i = 0; i < pairs.size(); ++i) {
    if (machine.accepting(pairs[i].first) && pairs[i].second == 0) {
      queue.emplace_back(static_cast<int32_t>(i), 0);
    }
  }
  int32_t longest = 0;
  while (!queue.empty()) {
    const auto [pair, length] = queue.front();
    queue.pop_front();
    if (lengths[at(pair)] >= 0) continue;
    lengths[at(pair)] = length;
    if (pairs[at(pair)].second == 0) longest = length;
    for (const auto& [source, ends] : sources[at(pair)]) {
      if (ends > 0) {
        queue.emplace_back(source, length + 1);
      } else {
        queue.emplace_front(source, length);
      }
    }
  }
  return longest;
}

}  // namespace

Nfa::Nfa(const std::vector<Rule>& all, int32_t max_states, int32_t max_unrolled, Work* work)
    : max_states_(max_states), max_unrolled_(max_unrolled), tail_(0), work_(work) {
  if (all.empty()) throw std::runtime_error("automaton: a grammar needs at least one rule");
  for (const Rule& rule : all) {
    const ExpressionTree tree(rule.program, static_cast<int32_t>(all.size()));
    add_rule(rule.open, rule.close, tree, tree.root());
  }
  find_live_states();
}

Nfa::Nfa(const ExpressionTree& tree, int32_t node, int32_t max_states, int32_t max_unrolled,
         int32_t tail, Work* work)
    : max_states_(max_states), max_unrolled_(max_unrolled), tail_(tail), work_(work) {
  add_rule(0, 0, tree, node);
  find_live_states();
}

void Nfa::add_rule(uint8_t open, uint8_t close, const ExpressionTree& tree, int32_t node) {
  const int32_t start = add_state();
  const int32_t end = add_state();
  connect(emit(tree, node, start), end);
  states[at(end)].ends = static_cast<int32_t>(rules.size());
  rules.push_back({open, close, start});
}

int32_t Nfa::add_state() {
  if (static_cast<int32_t>(states.size()) >= max_states_) {
    throw std::length_error("automaton: expression is too large");
  }
  states.emplace_back();
  return static_cast<int32_t>(states.size()) - 1;
}

void Nfa::connect(int32_t from, int32_t to) {
  free_edges.push_back({to, states[at(from)].free});
  states[at(from)].free = static_cast<int32_t>(free_edges.size()) - 1;
}

void Nfa::add_byte_edge(int32_t from, ByteRange range, int32_t to) {
  if (byte_edges.size() >= at(kMaxEdges) * at(max_states_)) {
    throw std::length_error("automaton: expression is too large");
  }
  byte_edges.push_back({range.low, range.high, to, states[at(from)].edge});
  states[at(from)].edge = static_cast<int32_t>(byte_edges.size()) - 1;
}

int32_t Nfa::emit(const ExpressionTree& tree, int32_t index, int32_t from) {
  work_->count(1);  // repetitions of the empty text take time but add no states
  const ExpressionTree::Node& node = tree.node(index);
  switch (node.op) {
    case Op::kEmpty:
      return from;
    case Op::kSet:
      return emit_set(tree, node, from);
    case Op::kConcat:
      for (int32_t i = 0; i < node.num_children; ++i) from = emit(tree, tree.child(node, i), from);
      return from;
    case Op::kUnion:
      return emit_union(tree, node, from);
    case Op::kRepeat:
      return emit_repeat(tree, node, from);
    case Op::kCall:
      return emit_call(tree.operand(node, 0), from);
    case Op::kMembers:
    case Op::kMembersWithAny:
      return emit_members(tree, node, from);
    case Op::kBoth:
    case Op::kMinus:
      return add_product(tree, node, from);
    case Op::kMultiple:
      return emit_multiple(tree.operand(node, 0), tree.operand(node, 1), from);
  }
  return from;
}

int32_t Nfa::emit_set(const ExpressionTree& tree, const ExpressionTree::Node& node, int32_t from) {
  sequences_.clear();
  for (int32_t i = 0; i < tree.operand(node, 0); ++i) {
    split_utf8(static_cast<uint32_t>(tree.operand(node, 1 + 2 * i)),
               static_cast<uint32_t>(tree.operand(node, 2 + 2 * i)), &sequences_);
  }
  const int32_t end = add_state();
  // The bytes after the first one are often the same, so their states are shared: state by the
  // ranges of the bytes that are still to be read.
  std::vector<std::pair<uint64_t, int32_t>> shared;
  for (const ByteSequence& sequence : sequences_) {
    int32_t next = end;
    uint64_t rest = 0;
    for (int i = sequence.length - 1; i > 0; --i) {
      const ByteRange range = sequence.ranges[at(i)];
      rest = rest << 16 | static_cast<uint64_t>(range.low << 8 | range.high);
      const auto found = std::find_if(shared.begin(), shared.end(),
                                      [rest](const auto& item) { return item.first == rest; });
      if (found == shared.end()) {
        const int32_t state = add_state();
        add_byte_edge(state, range, next);
        shared.emplace_back(rest, state);
        next = state;
      } else {
        next = found->second;
      }
    }
    add_byte_edge(from, sequence.ranges[0], next);
  }
  return end;
}

int32_t Nfa::emit_union(const ExpressionTree& tree, const ExpressionTree::Node& node,
                        int32_t from) {
  const int32_t end = add_state();
  for (int32_t i = 0; i < node.num_children; ++i) {
    const int32_t begin = add_state();
    connect(from, begin);
    connect(emit(tree, tree.child(node, i), begin), end);
  }
  return end;
}

int32_t Nfa::emit_repeat(const ExpressionTree& tree, const ExpressionTree::Node& node,
                         int32_t from) {
  const int32_t child = tree.child(node, 0);
  const int32_t min = tree.operand(node, 0);
  const int32_t max = tree.operand(node, 1);
  for (int32_t i = 0; i < min; ++i) from = emit(tree, child, from);
  if (max < 0) {
    const int32_t loop = add_state();
    connect(from, loop);
    const int32_t body = add_state();
    connect(loop, body);
    connect(emit(tree, child, body), loop);
    const int32_t end = add_state();
    connect(loop, end);
    return end;
  }
  if (max - min - tail_ > max_unrolled_ && is_finite(tree, child)) {
    return emit_counted_loop(tree, child, max - min, from);
  }
  const int32_t end = add_state();
  connect(from, end);
  for (int32_t i = min; i < max; ++i) {
    from = emit(tree, child, from);
    connect(from, end);
  }
  return end;
}

// Adds a loop that reads a node at most `max` times.
int32_t Nfa::emit_counted_loop(const ExpressionTree& tree, int32_t node, int32_t max,
                               int32_t from) {
  const int32_t start = add_state();
  const int32_t loop = add_state();
  const int32_t end = add_state();
  connect(from, start);
  connect(start, loop);
  connect(loop, end);
  states[at(start)].enters = true;
  const int32_t limit = max - tail_;
  const int32_t body = add_state();
  connect(loop, body);
  const int32_t body_end = emit(tree, node, body);
  for (size_t i = at(body); i < states.size(); ++i) states[i].limit = limit;
  states[at(body_end)].count = static_cast<int32_t>(counts.size());
  int32_t rest = add_state();
  counts.push_back({limit, loop, rest});
  connect(body_end, rest);  // for find_live_states()
  connect(rest, end);
  for (int32_t i = 0; i < tail_; ++i) {
    rest = emit(tree, node, rest);
    connect(rest, end);
  }
  return end;
}

int32_t Nfa::emit_call(int32_t rule, int32_t from) {
  const int32_t begin = add_state();
  connect(from, begin);
  const int32_t end = add_state();
  states[at(begin)].call = rule;
  states[at(begin)].next = end;
  return end;
}

// Adds the items of members one after the other. Before each item there are three states: `empty`
// before any item is written; `ended` after an item with which the members may end; and `separated`
// after a separator, which an item must follow. An optional item can be skipped in all three
// states. Further occurrences of an item are only reached from the occurrence before them.
//
// For kMembersWithAny, there are two groups of these states: before and after the first item with a
// flag. The members may end in the second group.
int32_t Nfa::emit_members(const ExpressionTree& tree, const ExpressionTree::Node& node,
                          int32_t from) {
  struct Before {
    int32_t empty;  // kNone in the second group
    int32_t ended;
    int32_t separated;
  };
  const bool has_flags = node.op == Op::kMembersWithAny;
  const int32_t operands = has_flags ? 3 : 2;  // per item
  const auto add_group = [&](bool is_first) {
    return Before{is_first ? add_state() : kNone, add_state(), add_state()};
  };
  std::vector<Before> groups = {{from, add_state(), add_state()}};
  if (has_flags) groups.push_back(add_group(false));
  for (int32_t i = 1; i < node.num_children; ++i) {
    const int32_t first_operand = 1 + operands * (i - 1);
    const int32_t min = tree.operand(node, first_operand);
    const int32_t max = tree.operand(node, first_operand + 1);
    const bool has_flag = has_flags && tree.operand(node, first_operand + 2) == 1;
    std::vector<Before> next;
    for (size_t g = 0; g < groups.size(); ++g) {
      next.push_back(add_group(g == 0));
      if (min > 0) continue;
      if (g == 0) connect(groups[g].empty, next[g].empty);
      connect(groups[g].ended, next[g].ended);
      connect(groups[g].separated, next[g].separated);
    }
    // An item with a flag leads from both groups to the second one, and needs only one copy.
    for (size_t g = has_flag ? 1 : 0; g < groups.size(); ++g) {
      const int32_t begin = add_state();
      for (size_t source = has_flag ? 0 : g; source <= g; ++source) {
        if (source == 0) connect(groups[source].empty, begin);
        connect(groups[source].separated, begin);
      }
      emit_item(tree, tree.child(node, 0), tree.child(node, i), {min, max}, begin, next[g].ended,
                next[g].separated);
    }
    groups = std::move(next);
  }
  const int32_t end = add_state();
  if (!has_flags) connect(groups[0].empty, end);
  connect(groups.back().ended, end);
  return end;
}

// Adds the occurrences of an item of members: at least `limits.first`, and at most `limits.second`.
void Nfa::emit_item(const ExpressionTree& tree, int32_t separator, int32_t item,
                    std::pair<int32_t, int32_t> limits, int32_t begin, int32_t ended,
                    int32_t separated) {
  const auto [min, max] = limits;
  const int32_t copies = max < 0 ? std::max(min, 1) : max;
  for (int32_t copy = 1; copy <= copies; ++copy) {
    const int32_t end = emit(tree, item, begin);
    const int32_t after = emit(tree, separator, end);
    if (copy >= min) {
      connect(end, ended);
      connect(after, separated);
    }
    if (copy < copies) {
      begin = add_state();
      connect(after, begin);
    } else if (max < 0) {
      connect(after, begin);
    }
  }
}

// Adds the decimal numbers with `places` digits after the point that, without the point, are
// multiples of `divisor`. There is a state for each remainder of the digits before the point and,
// after the point, for each remainder and number of digits.
int32_t Nfa::emit_multiple(int32_t divisor, int32_t places, int32_t from) {
  const int32_t levels = places > 0 ? places + 2 : 1;
  const int32_t first = static_cast<int32_t>(states.size());
  for (int32_t i = 0; i < levels; ++i) {
    for (int32_t remainder = 0; remainder < divisor; ++remainder) add_state();
  }
  const auto state_of = [&](int32_t level, int64_t remainder) {
    return first + level * divisor + static_cast<int32_t>(remainder % divisor);
  };
  const auto add_digits = [&](int32_t state, int64_t remainder, int32_t level) {
    work_->count(10);
    for (uint8_t digit = 0; digit < 10; ++digit) {
      const auto byte = static_cast<uint8_t>('0' + digit);
      add_byte_edge(state, {byte, byte}, state_of(level, 10 * remainder + digit));
    }
  };
  add_digits(from, 0, 0);
  for (int32_t remainder = 0; remainder < divisor; ++remainder) {
    add_digits(state_of(0, remainder), remainder, 0);
    if (places == 0) continue;
    add_byte_edge(state_of(0, remainder), {'.', '.'}, state_of(1, remainder));
    for (int32_t level = 1; level <= places; ++level) {
      add_digits(state_of(level, remainder), remainder, level + 1);
    }
  }
  const int32_t end = add_state();
  connect(state_of(levels - 1, 0), end);
  return end;
}

std::array<int32_t, 4> Nfa::sizes() const {
  const auto size = [](const auto& items) { return static_cast<int32_t>(items.size()); };
  return {size(states), size(byte_edges), size(free_edges), size(counts)};
}

// Adds a product, or a copy of it if the same product has been added before.
int32_t Nfa::add_product(const ExpressionTree& tree, const ExpressionTree::Node& node,
                         int32_t from) {
  std::vector<int32_t> expression = tree.expression(node);
  const auto found = products_.find(expression);
  if (found != products_.end()) return add_copy(found->second, from);
  const std::array<int32_t, 4> begins = sizes();
  const int32_t end = emit_product(tree, node, from);
  products_.emplace(std::move(expression), Product{begins, sizes()});
  return end;
}

int32_t Nfa::add_copy(const Product& product, int32_t from) {
  const auto [first_state, first_byte_edge, first_free_edge, first_count] = product.begins;
  const auto [last_state, last_byte_edge, last_free_edge, last_count] = product.ends;
  const std::array<int32_t, 4> new_begins = sizes();
  const auto end = new_begins[0];
  const auto moved = [&](int32_t index, size_t kind) {
    return index == kNone ? kNone : index + new_begins[kind] - product.begins[kind];
  };
  const size_t num_byte_edges = byte_edges.size() + at(last_byte_edge - first_byte_edge);
  if (last_state - first_state > max_states_ - end ||
      num_byte_edges > at(kMaxEdges) * at(max_states_)) {
    throw std::length_error("automaton: expression is too large");
  }
  work_->count(last_state - first_state);
  add_state();
  for (int32_t i = first_state + 1; i < last_state; ++i) {
    State state = states[at(i)];
    state.edge = moved(state.edge, 1);
    state.free = moved(state.free, 2);
    state.count = moved(state.count, 3);
    states.push_back(state);
  }
  for (int32_t i = first_byte_edge; i < last_byte_edge; ++i) {
    const ByteEdge edge = byte_edges[at(i)];
    byte_edges.push_back({edge.low, edge.high, moved(edge.to, 0), moved(edge.next, 1)});
  }
  if (last_state > first_state + 1) connect(from, end + 1);  // like the first free edge
  for (int32_t i = first_free_edge + 1; i < last_free_edge; ++i) {
    const FreeEdge edge = free_edges[at(i)];
    free_edges.push_back({moved(edge.to, 0), moved(edge.next, 2)});
  }
  for (int32_t i = first_count; i < last_count; ++i) {
    const Count count = counts[at(i)];
    counts.push_back({count.limit, moved(count.below, 0), moved(count.reached, 0)});
  }
  return end;
}

// Adds the product of two deterministic automata: the texts of the first one that the second one
// matches too (kBoth) or does not match (kMinus).
//
// If the second one has a counted loop, so does the product. A text must be able to end when the
// counter reaches its limit, but the first automaton may not allow the end there: an email address
// cannot end after `user@`. Therefore the last repetitions of the loop are unrolled, as many as are
// necessary to complete any text of the first automaton.
int32_t Nfa::emit_product(const ExpressionTree& tree, const ExpressionTree::Node& node,
                          int32_t from) {
  const int32_t end = add_state();
  const auto determinized = [&](int32_t child, int32_t max_unrolled, int32_t tail, Machine* out) {
    const Nfa part(tree, child, max_states_, max_unrolled, tail, work_);
    if (!part.states[at(part.rules[0].start)].live) return false;
    *out = Machine::determinize(part, max_states_, work_);
    return true;
  };
  Machine first;
  Machine second;
  const bool first_has_text = determinized(tree.child(node, 0), INT32_MAX, 0, &first);
  int32_t max_unrolled = INT32_MAX;
  int32_t tail = 0;
  if (first_has_text && node.op == Op::kBoth && tree.node(tree.child(node, 1)).op == Op::kRepeat) {
    const ExpressionTree::Node& repeat = tree.node(tree.child(node, 1));
    Machine part;
    if (determinized(tree.child(repeat, 0), INT32_MAX, 0, &part)) {
      first.build_table();
      part.build_table();
      tail = longest_ending(first, part, work_);
    }
    if (tail <= kMaxTail) max_unrolled = max_unrolled_;
  }
  const bool second_has_text = determinized(tree.child(node, 1), max_unrolled, tail, &second);
  if (!first_has_text || (!second_has_text && node.op == Op::kBoth)) return end;

  const ByteRuns runs_of_first(first);
  const ByteRuns runs_of_second(second);
  // States of both automata. For the second one, also kDead, or a result of Machine::next() that
  // changes the counter before the next state.
  using Pair = std::pair<int32_t, int32_t>;
  std::unordered_map<uint64_t, int32_t> numbers;  // states of this automaton by pair
  std::vector<std::pair<Pair, int32_t>> pending;  // all pairs with their numbers
  const auto state_of = [&](Pair pair) {
    const uint64_t key =
        uint64_t{static_cast<uint32_t>(pair.first)} << 32 | static_cast<uint32_t>(pair.second);
    const auto [found, is_new] = numbers.try_emplace(key, 0);
    if (is_new) {
      found->second = add_state();
      pending.emplace_back(pair, found->second);
    }
    return found->second;
  };
  const int32_t start = add_state();
  connect(from, start);
  states[at(start)].enters = second_has_text && second.limit(0) != Machine::kNoLimit;
  connect(start, state_of({0, second_has_text ? 0 : Machine::kDead}));
  for (size_t i = 0; i < pending.size(); ++i) {
    const auto [pair, state] = pending[i];
    if (pair.second <= Machine::kFirstAction) {
      const auto change = static_cast<int16_t>(pair.second);
      if (const Machine::Count* count = second.count(change)) {
        const int32_t below = state_of({pair.first, count->below});
        const int32_t reached = state_of({pair.first, count->reached});
        states[at(state)].count = static_cast<int32_t>(counts.size());
        counts.push_back({count->limit, below, reached});
        connect(state, reached);
      } else {
        states[at(state)].enters = true;
        connect(state, state_of({pair.first, second.action(change).target}));
      }
      continue;
    }
    if (pair.second >= 0 && second.limit(pair.second) != Machine::kNoLimit) {
      states[at(state)].limit = second.limit(pair.second);
    }
    const bool is_dead = pair.second == Machine::kDead;
    const bool accepts = !is_dead && second.accepting(pair.second);
    if (first.accepting(pair.first) && accepts == (node.op == Op::kBoth)) connect(state, end);
    // The next run of each machine, and the pair that the current run of bytes leads to.
    const ByteRun* run = runs_of_first.begin(pair.first);
    const ByteRun* other = is_dead ? &kDeadRun : runs_of_second.begin(pair.second);
    for (int low = 0; low < 256;) {
      const Pair target = {run->next, other->next};
      int high = low;  // one more than the last byte with this target
      for (; high < 256 && Pair{run->next, other->next} == target; work_->count(1)) {
        high = std::min(run->end, other->end);
        if (run->end == high && high < 256) ++run;
        if (other->end == high && high < 256) ++other;
      }
      const bool leads_to_text = target.first != Machine::kDead &&
                                 (target.second != Machine::kDead || node.op == Op::kMinus);
      if (leads_to_text) {
        add_byte_edge(state, {static_cast<uint8_t>(low), static_cast<uint8_t>(high - 1)},
                      state_of(target));
      }
      low = high;
    }
  }
  return end;
}

// Marks the live states, from which a text leads to the end of their rule. A state with a call is
// live if the first state of the called rule and the state after the call are live. Throws
// AmbiguousCount if a text that can go on below the limit of a loop cannot end at the limit.
void Nfa::find_live_states() {
  const size_t count = states.size();
  std::vector<int32_t> rule_of_start(count, kNone);
  for (size_t rule = 0; rule < rules.size(); ++rule) {
    rule_of_start[at(rules[rule].start)] = static_cast<int32_t>(rule);
  }
  // Pairs (target, source) of all edges, sorted by target with a counting sort: the sources of
  // state t are `sources[begins[t]]` to `sources[begins[t + 1]]`. A call of a rule counts as an
  // edge to the state after the call and, in `callers`, as an edge to the rule.
  std::vector<std::vector<int32_t>> callers(rules.size());
  std::vector<int32_t> begins(count + 1);
  std::vector<int32_t> pending;
  const auto for_each_edge = [&](auto visit) {
    for (size_t i = 0; i < count; ++i) {
      if (states[i].call != kNone) visit(static_cast<int32_t>(i), states[i].next);
      for (int32_t e = states[i].edge; e != kNone; e = byte_edges[at(e)].next) {
        visit(static_cast<int32_t>(i), byte_edges[at(e)].to);
      }
      for (int32_t e = states[i].free; e != kNone; e = free_edges[at(e)].next) {
        visit(static_cast<int32_t>(i), free_edges[at(e)].to);
      }
    }
  };
  for_each_edge([&](int32_t, int32_t to) { ++begins[at(to)]; });
  std::partial_sum(begins.begin(), begins.end(), begins.begin());
  std::vector<int32_t> sources(at(begins[count]));
  for_each_edge([&](int32_t from, int32_t to) { sources[at(--begins[at(to)])] = from; });
  for (size_t i = 0; i < count; ++i) {
    if (states[i].call != kNone) callers[at(states[i].call)].push_back(static_cast<int32_t>(i));
    if (states[i].ends != kNone) pending.push_back(static_cast<int32_t>(i));
  }
  const auto rule_is_live = [&](int32_t rule) { return states[at(rules[at(rule)].start)].live; };
  while (!pending.empty()) {
    const int32_t index = pending.back();
    pending.pop_back();
    if (states[at(index)].live) continue;
    states[at(index)].live = true;
    work_->count(1);
    for (int32_t i = begins[at(index)]; i < begins[at(index) + 1]; ++i) {
      const int32_t source = sources[at(i)];
      if (states[at(source)].call == kNone || rule_is_live(states[at(source)].call)) {
        pending.push_back(source);
      }
    }
    if (rule_of_start[at(index)] == kNone) continue;
    for (const int32_t caller : callers[at(rule_of_start[at(index)])]) {
      if (states[at(states[at(caller)].next)].live) pending.push_back(caller);
    }
  }
  for (const Count& count : counts) {
    if (states[at(count.below)].live && !states[at(count.reached)].live) throw AmbiguousCount();
  }
}

}  // namespace graft::guide
