// Compilation of nondeterministic automata to machines with the subset construction.
#include <algorithm>
#include <array>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "guide/automaton/machine.h"
#include "guide/automaton/nfa.h"

namespace graft::guide {
namespace {

// Numbers distinct sequences of integers in the order in which they are added.
class SequenceTable {
 public:
  // Returns the number of a sequence and whether it is new.
  std::pair<int32_t, bool> add(const std::vector<int32_t>& sequence) {
    if (2 * (size() + 1) > static_cast<int32_t>(slots_.size())) grow();
    const size_t hash = hash_of(sequence.data(), sequence.size());
    size_t slot = hash & (slots_.size() - 1);
    for (; slots_[slot] >= 0; slot = (slot + 1) & (slots_.size() - 1)) {
      const int32_t number = slots_[slot];
      if (length(number) == sequence.size() &&
          std::equal(sequence.begin(), sequence.end(), begin(number))) {
        return {number, false};
      }
    }
    slots_[slot] = size();
    items_.insert(items_.end(), sequence.begin(), sequence.end());
    begins_.push_back(items_.size());
    return {slots_[slot], true};
  }

  int32_t size() const { return static_cast<int32_t>(begins_.size()) - 1; }
  // The pointers are valid until the next call of add().
  const int32_t* begin(int32_t number) const { return items_.data() + begins_[at(number)]; }
  const int32_t* end(int32_t number) const { return items_.data() + begins_[at(number) + 1]; }

 private:
  size_t length(int32_t number) const { return begins_[at(number) + 1] - begins_[at(number)]; }

  static size_t hash_of(const int32_t* items, size_t count) {
    uint64_t hash = count;
    for (size_t i = 0; i < count; ++i) {
      hash = (hash ^ static_cast<uint32_t>(items[i])) * 0x9E3779B97F4A7C15u;
      hash ^= hash >> 32;
    }
    return static_cast<size_t>(hash);
  }

  void grow() {
    slots_.assign(std::max<size_t>(64, 2 * slots_.size()), -1);
    for (int32_t number = 0; number < size(); ++number) {
      size_t slot = hash_of(begin(number), length(number)) & (slots_.size() - 1);
      while (slots_[slot] >= 0) slot = (slot + 1) & (slots_.size() - 1);
      slots_[slot] = number;
    }
  }

  std::vector<int32_t> items_;
  std::vector<size_t> begins_ = {0};
  std::vector<int32_t> slots_;  // number of the sequence in each slot of the hash table, or -1
};

}  // namespace

// A state of the machine is a set of states of the Nfa, all of which the text read so far may lead
// to. Sets contain only live states that read a byte, call a rule or end a rule.
class Determinizer {
 public:
  Determinizer(const Nfa& nfa, int32_t max_states, Work* work)
      : nfa_(nfa), max_states_(std::min(max_states, Machine::kMaxStates)), work_(*work) {}

  Machine run() {
    if (!nfa_.states[at(nfa_.rules[0].start)].live) {
      throw std::domain_error("automaton: expression allows no text");
    }
    find_classes();
    find_free_targets();
    marks_.assign(nfa_.states.size(), 0);
    known_.assign(nfa_.states.size(), Machine::kDead);
    entries_of_rule_.resize(nfa_.rules.size());
    exits_of_rule_.resize(nfa_.rules.size());
    state_of({nfa_.rules[0].start});  // state 0
    for (int32_t state = 0; state < sets_.size(); ++state) add_transitions(state);
    for (std::vector<Machine::Return>& returns : returns_) {
      std::sort(returns.begin(), returns.end(),
                [](const auto& a, const auto& b) { return a.exit < b.exit; });
      out_.returns_.insert(out_.returns_.end(), returns.begin(), returns.end());
      out_.returns_begin_.push_back(static_cast<int32_t>(out_.returns_.size()));
    }
    out_.num_exits_ = exits_.size();
    if (out_.counts_.empty()) out_.limits_.clear();
    return std::move(out_);
  }

 private:
  struct Edge {
    int32_t low;  // classes of the bytes
    int32_t high;
    int32_t target;
  };
  struct Call {
    uint8_t open;
    int32_t rule;
    int32_t target;

    bool operator<(const Call& other) const {
      return std::tie(open, rule, target) < std::tie(other.open, other.rule, other.target);
    }
  };

  // Assigns the same class to bytes that no edge distinguishes.
  void find_classes() {
    std::array<bool, 257> begins{};
    const auto separate = [&](uint8_t low, uint8_t high) {
      begins[low] = true;
      begins[high + 1u] = true;
    };
    for (const Nfa::State& state : nfa_.states) {
      if (!state.live) continue;
      if (state.call != Nfa::kNone) {
        const Nfa::Brackets& rule = nfa_.rules[at(state.call)];
        separate(rule.open, rule.open);
        separate(rule.close, rule.close);
      }
      for (int32_t e = state.edge; e != Nfa::kNone; e = nfa_.byte_edges[at(e)].next) {
        const Nfa::ByteEdge& edge = nfa_.byte_edges[at(e)];
        if (nfa_.states[at(edge.to)].live) separate(edge.low, edge.high);
      }
    }
    int32_t index = 0;
    for (size_t byte = 0; byte < 256; ++byte) {
      if (byte > 0 && begins[byte]) ++index;
      out_.classes_[byte] = static_cast<uint8_t>(index);
    }
    out_.num_classes_ = index + 1;
  }

  // Copies the edges without a byte that lead to live states to `free_targets_`, where the edges of
  // a state are neighbours. close() follows each edge many times.
  void find_free_targets() {
    free_begins_.reserve(nfa_.states.size() + 1);
    free_targets_.reserve(nfa_.free_edges.size());
    for (const Nfa::State& state : nfa_.states) {
      free_begins_.push_back(static_cast<int32_t>(free_targets_.size()));
      for (int32_t e = state.free; e != Nfa::kNone; e = nfa_.free_edges[at(e)].next) {
        const int32_t to = nfa_.free_edges[at(e)].to;
        if (nfa_.states[at(to)].live) free_targets_.push_back(to);
      }
    }
    free_begins_.push_back(static_cast<int32_t>(free_targets_.size()));
  }

  // Stores in `set_`, sorted, the epsilon closure of `targets`: the states that can be reached from
  // them over edges without a byte. If the last byte increments the counter, `value` is the new
  // value of the counter, or 0 if the new value is below all limits. The other results are
  // `stays_`, `enters_` and `counted_`.
  void close(const std::vector<int32_t>& targets, int32_t value) {
    ++mark_;
    set_.clear();
    deferred_.clear();
    enters_ = false;
    counted_ = Machine::kNoLimit;
    for (const int32_t index : targets) {
      if (nfa_.states[at(index)].live) visit(index);
    }
    follow_free_edges();
    stays_ = !nfa_.counts.empty() && limit_of_set() != Machine::kNoLimit;
    for (size_t i = 0; i < deferred_.size(); ++i) {
      const int32_t index = deferred_[i];
      const int32_t number = nfa_.states[at(index)].count;
      if (number == Nfa::kNone) {
        enters_ = true;
        visit_free_targets(index);
      } else {
        const Nfa::Count& count = nfa_.counts[at(number)];
        counted_ = std::min(counted_, count.limit);
        visit(count.limit == value ? count.reached : count.below);
      }
      follow_free_edges();
    }
    std::sort(set_.begin(), set_.end());
  }

  void visit(int32_t index) {
    if (marks_[at(index)] == mark_) return;
    marks_[at(index)] = mark_;
    const Nfa::State& state = nfa_.states[at(index)];
    const bool is_deferred = state.enters || state.count != Nfa::kNone;
    (is_deferred ? deferred_ : pending_).push_back(index);
    work_.count(1);
  }

  void visit_free_targets(int32_t index) {
    for (int32_t e = free_begins_[at(index)]; e < free_begins_[at(index) + 1]; ++e) {
      visit(free_targets_[at(e)]);
    }
  }

  void follow_free_edges() {
    while (!pending_.empty()) {
      const int32_t index = pending_.back();
      pending_.pop_back();
      const Nfa::State& state = nfa_.states[at(index)];
      if (state.edge != Nfa::kNone || state.call != Nfa::kNone || state.ends != Nfa::kNone) {
        set_.push_back(index);
      }
      visit_free_targets(index);
    }
  }

  // Returns the smallest limit of the counted loops to which states of `set_` belong.
  int32_t limit_of_set() const {
    int32_t smallest = Machine::kNoLimit;
    for (const int32_t index : set_) {
      const int32_t limit = nfa_.states[at(index)].limit;
      if (limit > 0) smallest = std::min(smallest, limit);
    }
    return smallest;
  }

  // Returns the machine's state after an action that leads to `targets` and resets the counter.
  int16_t state_of(const std::vector<int32_t>& targets) {
    const int16_t next = transition_to(targets);
    return next > Machine::kFirstAction ? next : out_.action(next).target;
  }

  // Returns the result of Machine::next() for a byte that leads to `targets`.
  //
  // All counted loops of a state share the machine's counter. A byte must therefore leave the
  // counter as it is, increment it or reset it in all of them.
  int16_t transition_to(const std::vector<int32_t>& targets) {
    if (targets.size() == 1 && known_[at(targets[0])] != Machine::kDead) {
      return known_[at(targets[0])];
    }
    close(targets, 0);
    if (set_.empty()) return Machine::kDead;
    const bool counts = counted_ != Machine::kNoLimit;
    if (stays_ + enters_ + counts > 1) throw AmbiguousCount();
    int16_t next = add_set();
    if (enters_) {
      next = action_of(Machine::kReset, next);
    } else if (counts) {
      const int32_t limit = counted_;
      const int16_t below = next;
      close(targets, limit);
      next = action_of(Machine::kCount, number_of_count({limit, below, add_set()}));
    }
    if (targets.size() == 1) known_[at(targets[0])] = next;
    return next;
  }

  // Returns the machine's state for `set_`. Adds it if it is new.
  int16_t add_set() {
    const auto [number, is_new] = sets_.add(set_);
    if (is_new) {
      if (number >= max_states_) {
        throw std::length_error("automaton: has more than " + std::to_string(max_states_) +
                                " states");
      }
      const bool accepting = std::any_of(set_.begin(), set_.end(), [this](int32_t index) {
        return nfa_.states[at(index)].ends == 0;
      });
      out_.accepting_.push_back(accepting ? 1 : 0);
      out_.limits_.push_back(limit_of_set());
    }
    return static_cast<int16_t>(number);
  }

  int16_t number_of_count(const Machine::Count& count) {
    const auto [number, is_new] = count_numbers_.add({count.limit, count.below, count.reached});
    if (is_new) out_.counts_.push_back(count);
    if (number >= INT16_MAX) throw std::length_error("automaton: has too many counts");
    return static_cast<int16_t>(number);
  }

  void add_transitions(int32_t state) {
    edges_.clear();
    calls_.clear();
    endings_.clear();
    for (const int32_t* index = sets_.begin(state); index != sets_.end(state); ++index) {
      const Nfa::State& from = nfa_.states[at(*index)];
      if (from.ends > 0) endings_.emplace_back(nfa_.rules[at(from.ends)].close, from.ends);
      if (from.call != Nfa::kNone) {
        calls_.push_back({nfa_.rules[at(from.call)].open, from.call, from.next});
      }
      for (int32_t e = from.edge; e != Nfa::kNone; e = nfa_.byte_edges[at(e)].next) {
        const Nfa::ByteEdge& edge = nfa_.byte_edges[at(e)];
        if (!nfa_.states[at(edge.to)].live) continue;
        edges_.push_back({out_.classes_[edge.low], out_.classes_[edge.high], edge.to});
      }
    }
    if (edges_.size() == 1 && calls_.empty() && endings_.empty()) {
      add_only_edge();
      return;
    }
    row_.clear();
    add_edges();
    add_pushes();
    add_pops();
    for (const Machine::Run& run : row_) {
      if (&run == row_.data() || out_.runs_.back().next != run.next) {
        out_.runs_.push_back(run);
      } else {
        out_.runs_.back().last = run.last;
      }
    }
  }

  // Adds the transitions of a state with one edge. Most states have one edge, for example those
  // within a property name.
  void add_only_edge() {
    const Edge edge = edges_[0];
    const int32_t classes = out_.num_classes_;
    work_.count(classes / 8 + 2);
    target_.assign(1, edge.target);
    const int16_t next = transition_to(target_);
    const auto add_run = [&](int16_t target, int32_t last) {
      out_.runs_.push_back({target, static_cast<int16_t>(last)});
    };
    if (edge.low > 0) add_run(Machine::kDead, edge.low - 1);
    add_run(next, edge.high);
    if (edge.high + 1 < classes) add_run(Machine::kDead, classes - 1);
  }

  // Adds the transitions of the edges. Neighbouring classes with the same targets form a segment,
  // and transition_to() is called once per segment.
  void add_edges() {
    const int32_t classes = out_.num_classes_;
    if (edges_.empty()) {
      row_.push_back({Machine::kDead, static_cast<int16_t>(classes - 1)});
      return;
    }
    segment_of_.assign(at(classes) + 1, 0);
    for (const Edge& edge : edges_) {
      segment_of_[at(edge.low)] = 1;
      segment_of_[at(edge.high) + 1] = 1;
    }
    int32_t segments = 0;
    for (int32_t& begins : segment_of_) begins = segments += begins;
    targets_.resize(std::max(targets_.size(), at(segments) + 1));
    for (int32_t i = 0; i <= segments; ++i) targets_[at(i)].clear();
    for (const Edge& edge : edges_) {
      for (int32_t i = segment_of_[at(edge.low)]; i <= segment_of_[at(edge.high)]; ++i) {
        targets_[at(i)].push_back(edge.target);
        work_.count(1);
      }
    }
    work_.count(classes / 8 + 1);
    for (int32_t first = 0; first < classes;) {
      const int32_t segment = segment_of_[at(first)];
      const std::vector<int32_t>& targets = targets_[at(segment)];
      const int16_t next = targets.empty() ? Machine::kDead : transition_to(targets);
      while (first < classes && segment_of_[at(first)] == segment) ++first;
      row_.push_back({next, static_cast<int16_t>(first - 1)});
    }
  }

  // Groups the calls by their opening byte, and adds an entry for each group. The entry lists the
  // called rules and, for each rule, the states after its calls.
  void add_pushes() {
    std::sort(calls_.begin(), calls_.end());
    for (size_t first = 0; first < calls_.size();) {
      const uint8_t open = calls_[first].open;
      content_.clear();
      std::vector<int32_t> starts;
      for (size_t count_at = 0; first < calls_.size() && calls_[first].open == open; ++first) {
        const Call& call = calls_[first];
        if (starts.empty() || starts.back() != nfa_.rules[at(call.rule)].start) {
          starts.push_back(nfa_.rules[at(call.rule)].start);
          content_.push_back(call.rule);
          count_at = content_.size();
          content_.push_back(0);
        }
        ++content_[count_at];
        content_.push_back(call.target);
        work_.count(1);
      }
      const int32_t entry = entry_of_content();
      add_action(open, static_cast<int16_t>(entry), state_of(starts));
    }
  }

  int32_t entry_of_content() {
    const auto [entry, is_new] = entries_.add(content_);
    if (!is_new) return entry;
    if (entry >= INT16_MAX) throw std::length_error("automaton: has too many entries");
    returns_.emplace_back();
    std::vector<int32_t> rules;
    for (size_t i = 0; i < content_.size(); i += 2 + at(content_[i + 1])) {
      rules.push_back(content_[i]);
    }
    for (const int32_t rule : rules) {
      entries_of_rule_[at(rule)].push_back(entry);
      for (const int32_t exit : exits_of_rule_[at(rule)]) add_return(entry, exit);
    }
    return entry;
  }

  // Groups the rules that may end in the state by their closing byte, and adds an exit for each
  // group.
  void add_pops() {
    std::sort(endings_.begin(), endings_.end());
    endings_.erase(std::unique(endings_.begin(), endings_.end()), endings_.end());
    for (size_t first = 0; first < endings_.size();) {
      const uint8_t close = endings_[first].first;
      std::vector<int32_t> rules;
      for (; first < endings_.size() && endings_[first].first == close; ++first) {
        rules.push_back(endings_[first].second);
      }
      const auto [exit, is_new] = exits_.add(rules);
      if (is_new) {
        if (exit >= INT16_MAX) throw std::length_error("automaton: has too many exits");
        exits_of_rule_[at(rules[0])].push_back(exit);
        for (const int32_t entry : entries_of_rule_[at(rules[0])]) add_return(entry, exit);
      }
      add_action(close, Machine::kPop, static_cast<int16_t>(exit));
    }
  }

  // Adds the state after an exit to an entry, if all rules of the exit are among the entry's rules.
  void add_return(int32_t entry, int32_t exit) {
    std::vector<int32_t> targets;
    const int32_t* call = entries_.begin(entry);
    const int32_t* last_call = entries_.end(entry);
    for (const int32_t* rule = exits_.begin(exit); rule != exits_.end(exit); ++rule) {
      while (call != last_call && call[0] < *rule) call += 2 + call[1];
      work_.count(2);
      if (call == last_call || call[0] != *rule) return;
      targets.insert(targets.end(), call + 2, call + 2 + call[1]);
    }
    const int16_t state = state_of(targets);
    returns_[at(entry)].push_back({static_cast<int16_t>(exit), state});
  }

  void add_action(uint8_t byte, int16_t entry, int16_t target) {
    const int16_t byte_class = out_.classes_[byte];
    size_t i = 0;
    while (row_[i].last < byte_class) ++i;
    const Machine::Run run = row_[i];
    if (run.next != Machine::kDead) {
      throw std::domain_error("automaton: byte " + std::to_string(byte) +
                              " may be a bracket or another character");
    }
    row_[i] = {action_of(entry, target), byte_class};
    if (run.last > byte_class) row_.insert(row_.begin() + static_cast<ptrdiff_t>(i) + 1, run);
    if (byte_class > (i == 0 ? 0 : row_[i - 1].last + 1)) {
      row_.insert(row_.begin() + static_cast<ptrdiff_t>(i),
                  {Machine::kDead, static_cast<int16_t>(byte_class - 1)});
    }
  }

  // Returns the result of Machine::next() for an action. Adds the action if it is new.
  int16_t action_of(int16_t entry, int16_t target) {
    const auto [number, is_new] = action_numbers_.add({entry, target});
    if (is_new) {
      if (number >= Machine::kMaxActions)
        throw std::length_error("automaton: has too many actions");
      out_.actions_.push_back({entry, target});
    }
    return static_cast<int16_t>(Machine::kFirstAction - number);
  }

  const Nfa& nfa_;
  int32_t max_states_;
  Work& work_;
  Machine out_;
  SequenceTable sets_;  // set of Nfa states of each state of the machine
  // Content of each entry: for each rule, in ascending order, its number, the number of states
  // after its calls, and these states.
  SequenceTable entries_;
  SequenceTable exits_;  // rules of each exit
  SequenceTable action_numbers_;
  SequenceTable count_numbers_;
  std::vector<std::vector<Machine::Return>> returns_;  // by entry
  std::vector<std::vector<int32_t>> entries_of_rule_;
  std::vector<std::vector<int32_t>> exits_of_rule_;  // exits by their first rule
  std::vector<int32_t> free_begins_;   // by state of the Nfa: index of its first free target
  std::vector<int32_t> free_targets_;  // see find_free_targets()
  std::vector<int16_t> known_;         // by state of the Nfa: result of transition_to({state})

  // Memory that is used again for each state of the machine.
  std::vector<Edge> edges_;
  std::vector<Call> calls_;
  std::vector<std::pair<uint8_t, int32_t>> endings_;  // closing byte and rule
  std::vector<Machine::Run> row_;                     // transitions of the state
  std::vector<int32_t> target_;                       // target of the state's only edge
  std::vector<int32_t> segment_of_;                   // by class
  std::vector<std::vector<int32_t>> targets_;         // by segment
  std::vector<int32_t> content_;
  std::vector<int32_t> pending_;
  std::vector<int32_t> deferred_;  // states that change the counter, which close() follows last
  std::vector<int32_t> set_;       // results of close()
  bool stays_ = false;             // whether the body of a counted loop continues
  bool enters_ = false;            // whether a counted loop begins
  int32_t counted_ = 0;  // smallest limit of the loops whose bodies end, or Machine::kNoLimit
  std::vector<int32_t> marks_;  // by state of the Nfa: number of the last close() that visited it
  int32_t mark_ = 0;
};

Machine Machine::determinize(const Nfa& nfa, int32_t max_states, Work* work) {
  return Determinizer(nfa, max_states, work).run();
}

Machine Machine::compile(const std::vector<Rule>& rules, int32_t max_states, int32_t max_unrolled) {
  Work work;
  size_t num_states = SIZE_MAX;  // of the Nfa
  const auto compile = [&](int32_t unrolled) {
    const Nfa nfa(rules, kMaxNfaStates, unrolled, &work);
    num_states = nfa.states.size();
    return determinize(nfa, max_states, &work);
  };
  try {
    return compile(max_unrolled);
  } catch (const AmbiguousCount&) {
    return compile(INT32_MAX);
  } catch (const std::length_error&) {
    if (max_unrolled != kMaxUnrolled) throw;
    const Nfa nfa(rules, kMaxNfaStates, kMinUnrolled, &work);
    if (nfa.states.size() >= num_states) throw;  // no more repetitions are counted than before
    return determinize(nfa, max_states, &work);
  }
}

}  // namespace graft::guide
