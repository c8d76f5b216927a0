// Search for the shortest texts of a machine, in bytes and in tokens.
#include "guide/automaton/distances.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>
#include <tuple>
#include <utility>

#include "guide/automaton/walk.h"

namespace graft::guide {
namespace {

// Length in bytes of a text that has not been found. Greater lengths count as kEndless - 1.
constexpr int64_t kEndless = int64_t{1} << 40;

// Lists of items by index, in one array.
template <typename Item>
class Lists {
 public:
  // `visit(add)` calls add(list, item) for each item. It is called twice.
  template <typename Visit>
  void fill(size_t num_lists, Visit visit) {
    begins_.assign(num_lists + 1, 0);
    visit([this](int32_t list, const Item&) { ++begins_[at(list)]; });
    std::partial_sum(begins_.begin(), begins_.end(), begins_.begin());
    items_.resize(at(begins_.back()));
    visit([this](int32_t list, const Item& item) { items_[at(--begins_[at(list)])] = item; });
  }

  struct Range {
    const Item* first;
    const Item* last;
    const Item* begin() const { return first; }
    const Item* end() const { return last; }
  };
  Range operator[](int32_t list) const {
    return {items_.data() + begins_[at(list)], items_.data() + begins_[at(list) + 1]};
  }

 private:
  std::vector<int32_t> begins_;
  std::vector<Item> items_;
};

// Maximum number of trie nodes that improve() tests, which takes about 100 ms.
constexpr int64_t kMaxVisits = 20'000'000;

// Maximum number of states that distance_of() considers because it does not know the counter.
constexpr size_t kMaxOthers = 32;

}  // namespace

// The search has three steps.
// 1. For each state, it finds a text from the state to the end of the state's rule, and stores the
//    length of this text in bytes and its first byte. This is Dijkstra's algorithm as Knuth
//    generalized it: the length of a text that begins with an opening byte is 1 + the length of the
//    text of the opened rule + the largest length after any exit that the entry lists. The length
//    of a text whose first byte increments the counter is 1 + the larger length of the two states
//    that may follow. A state is *settled* when its length is known.
// 2. In ascending order of these lengths, it computes the distance of each state: 1 + the smallest
//    distance of a position after a token that is a prefix of the state's text.
// 3. If no token is a prefix of a state's text, it tries all legal tokens of the state.
class DistanceSearch {
 public:
  DistanceSearch(const Machine& machine, const TokenTrie& trie, Distances* out)
      : machine_(machine), trie_(trie), out_(*out) {}

  void run() {
    out_.states_.assign(at(machine_.num_states()), kFar);
    out_.entries_.assign(at(machine_.num_entries()), kFar);
    list_sources();
    settle_states();
    missing_.resize(at(machine_.num_entries()));
    for (int32_t entry = 0; entry < machine_.num_entries(); ++entry) {
      missing_[at(entry)] = num_returns(entry);
    }
    for (const int32_t state : settled_) {
      const int32_t distance = distance_of(state);
      out_.states_[at(state)] = distance;
      update_entries(state);
      if (distance == kFar) far_.push_back(state);
    }
    // improve() does not know the value of the counter.
    const bool found_all = far_.empty() || (machine_.counts().empty() && improve());
    out_.all_known_ = found_all && settled_.size() == out_.states_.size();
  }

 private:
  // A transition from `state` with bytes of a class.
  struct Source {
    int32_t state;
    int32_t byte_class;
  };

  int32_t num_returns(int32_t entry) const {
    return machine_.returns_begin()[at(entry) + 1] - machine_.returns_begin()[at(entry)];
  }

  void list_sources() {
    const auto states = at(machine_.num_states());
    const auto entries = at(machine_.num_entries());
    const std::vector<Machine::Action>& actions = machine_.actions();
    // Transitions of each run's first class, and their results.
    std::vector<std::pair<int16_t, Source>> transitions;
    transitions.reserve(machine_.runs().size());
    Source source{0, 0};
    for (const Machine::Run& run : machine_.runs()) {
      if (run.next != Machine::kDead) {
        const bool resets =
            run.next < 0 && machine_.action(run.next).entry == Machine::kReset;  // a plain byte
        transitions.push_back({resets ? machine_.action(run.next).target : run.next, source});
      }
      source.byte_class = run.last + 1;
      if (source.byte_class == machine_.num_classes()) source = {source.state + 1, 0};
    }
    sources_.fill(states, [&](auto add) {
      for (const auto& [next, source] : transitions) {
        if (next >= 0) add(next, source);
      }
    });
    callers_.fill(actions.size(), [&](auto add) {
      for (const auto& [next, source] : transitions) {
        if (next < 0) add(Machine::kFirstAction - next, source);
      }
    });
    const auto for_each_push = [&](auto visit) {
      for (size_t i = 0; i < actions.size(); ++i) {
        if (actions[i].entry >= 0) visit(actions[i], static_cast<int32_t>(i));
      }
    };
    pushes_of_start_.fill(states, [&](auto add) {
      for_each_push([&](const Machine::Action& push, int32_t i) { add(push.target, i); });
    });
    pushes_of_entry_.fill(entries, [&](auto add) {
      for_each_push([&](const Machine::Action& push, int32_t i) { add(push.entry, i); });
    });
    counts_to_state_.fill(states, [&](auto add) {
      for (size_t i = 0; i < actions.size(); ++i) {
        if (actions[i].entry != Machine::kCount) continue;
        const Machine::Count& count = machine_.counts()[at(actions[i].target)];
        add(count.below, static_cast<int32_t>(i));
        add(count.reached, static_cast<int32_t>(i));
      }
    });
    entries_of_state_.fill(states, [&](auto add) {
      for (int32_t entry = 0; entry < machine_.num_entries(); ++entry) {
        const auto [begin, end] = returns_of(entry);
        for (int32_t i = begin; i < end; ++i) add(machine_.returns()[at(i)].state, entry);
      }
    });
  }

  std::pair<int32_t, int32_t> returns_of(int32_t entry) const {
    return {machine_.returns_begin()[at(entry)], machine_.returns_begin()[at(entry) + 1]};
  }

  void settle_states() {
    bytes_.assign(at(machine_.num_states()), kEndless);
    first_.assign(at(machine_.num_states()), -1);
    std::vector<bool> is_settled(at(machine_.num_states()));
    std::vector<int64_t> longest(at(machine_.num_entries()));  // largest length after an exit
    std::vector<int32_t> missing(at(machine_.num_entries()));  // number of states not settled yet
    using Item = std::pair<int64_t, int32_t>;                  // length in bytes, state
    std::priority_queue<Item, std::vector<Item>, std::greater<Item>> queue;
    const auto offer = [&](const Source& source, int64_t bytes) {
      bytes = std::min(bytes, kEndless - 1);
      if (bytes >= bytes_[at(source.state)]) return;
      bytes_[at(source.state)] = bytes;
      first_[at(source.state)] = source.byte_class;
      queue.emplace(bytes, source.state);
    };
    // Offers a length to the states that push an entry, if the first state of the opened rule and
    // all states after the entry's exits are settled.
    const auto offer_push = [&](int32_t action) {
      const Machine::Action& push = machine_.actions()[at(action)];
      if (missing[at(push.entry)] > 0 || !is_settled[at(push.target)]) return;
      const int64_t bytes = 1 + bytes_[at(push.target)] + longest[at(push.entry)];
      for (const Source& source : callers_[action]) offer(source, bytes);
    };
    for (int32_t entry = 0; entry < machine_.num_entries(); ++entry) {
      missing[at(entry)] = num_returns(entry);
    }
    for (int32_t state = 0; state < machine_.num_states(); ++state) {
      if (machine_.accepting(state)) offer({state, -1}, 0);
    }
    std::vector<int32_t> waiting(machine_.actions().size(), 2);  // counts: states not settled yet
    for (size_t i = 0; i < machine_.actions().size(); ++i) {
      if (machine_.actions()[i].entry != Machine::kPop) continue;
      for (const Source& source : callers_[static_cast<int32_t>(i)]) offer(source, 1);
    }
    while (!queue.empty()) {
      const auto [bytes, state] = queue.top();
      queue.pop();
      if (is_settled[at(state)]) continue;
      is_settled[at(state)] = true;
      settled_.push_back(state);
      for (const Source& source : sources_[state]) offer(source, bytes + 1);
      for (const int32_t action : counts_to_state_[state]) {
        if (--waiting[at(action)] > 0) continue;  // the second state has the larger length
        for (const Source& source : callers_[action]) offer(source, bytes + 1);
      }
      for (const int32_t action : pushes_of_start_[state]) offer_push(action);
      for (const int32_t entry : entries_of_state_[state]) {
        longest[at(entry)] = std::max(longest[at(entry)], bytes);
        if (--missing[at(entry)] > 0) continue;
        for (const int32_t action : pushes_of_entry_[entry]) offer_push(action);
      }
    }
    first_byte_.resize(at(machine_.num_classes()));
    for (int byte = 255; byte >= 0; --byte) {
      first_byte_[machine_.classes()[at(byte)]] = static_cast<uint8_t>(byte);
    }
  }

  // Returns the distance of a state according to step 2 of the search; kFar if no token is a prefix
  // of the text that step 1 has found for the state.
  int32_t distance_of(int32_t state) {
    int32_t best = machine_.accepting(state) ? 1 : kFar;
    std::array<int32_t, 2> nodes{-1, -1};  // of both tries, after the bytes read so far
    pushed_.clear();
    others_.clear();
    for (size_t depth = 0; first_[at(state)] >= 0; ++depth) {
      const uint8_t byte = first_byte_[at(first_[at(state)])];
      bool is_token = false;
      for (const TokenTrie::Part part : {TokenTrie::kText, TokenTrie::kOther}) {
        int32_t& node = nodes[part];
        if (depth == 0) {
          node = trie_.first(part, byte);
        } else if (node >= 0) {
          node = trie_.child(node, byte);
        }
        is_token = is_token || (node >= 0 && trie_.node(node).token >= 0);
      }
      if (nodes[0] < 0 && nodes[1] < 0) break;
      if (!read_by_others(byte)) break;
      const int16_t next = machine_.next(state, byte);
      const Machine::Count* count = machine_.count(next);
      if (next >= 0) {
        state = next;
      } else if (count != nullptr) {
        state = count->below;
        others_.push_back(count->reached);
      } else {
        if (!others_.empty()) break;
        const Machine::Action& action = machine_.action(next);
        if (action.entry >= 0) {
          pushed_.push_back(action.entry);
          state = action.target;
        } else if (action.entry == Machine::kReset) {
          state = action.target;
        } else if (pushed_.empty()) {  // the end of the rule
          if (is_token) best = 1;
          break;
        } else {
          state = machine_.return_state(pushed_.back(), action.target);
          pushed_.pop_back();
          if (state == Machine::kDead) break;  // possible only for invalid data
        }
      }
      others_.erase(std::remove(others_.begin(), others_.end(), state), others_.end());
      if (others_.size() > kMaxOthers) break;
      if (!is_token) continue;
      int32_t distance = out_.states_[at(state)];
      for (const int32_t other : others_) distance = std::max(distance, out_.states_[at(other)]);
      for (const int32_t entry : pushed_) {
        distance = add_distances(distance, out_.entries_[at(entry)]);
      }
      best = std::min(best, add_distances(1, distance));
    }
    return best;
  }

  // Advances the states in `others_` by a byte. Returns false if the byte may be illegal, or if it
  // changes a stack.
  bool read_by_others(uint8_t byte) {
    const size_t size = others_.size();
    for (size_t i = 0; i < size; ++i) {
      const int16_t next = machine_.next(others_[i], byte);
      const Machine::Count* count = machine_.count(next);
      if (next < 0 && count == nullptr) return false;
      others_[i] = count == nullptr ? next : count->below;
      if (count != nullptr) others_.push_back(count->reached);
    }
    return true;
  }

  // Sets the cost of the entries whose last missing return is `state`.
  void update_entries(int32_t state) {
    for (const int32_t entry : entries_of_state_[state]) {
      if (--missing_[at(entry)] == 0) update_entry(entry);
    }
  }

  bool update_entry(int32_t entry) {
    int32_t cost = 0;
    const auto [begin, end] = returns_of(entry);
    for (int32_t i = begin; i < end; ++i) {
      cost = std::max(cost, out_.states_[at(machine_.returns()[at(i)].state)]);
    }
    return std::exchange(out_.entries_[at(entry)], cost) != cost;
  }

  // Tries all legal tokens of the states for which step 2 found no distance, until no distance
  // changes. Returns whether every state and entry has a distance then from which tokens can
  // complete the text. A distance may be missing if the search takes too long, or if the text can
  // be completed only by a token that reads the end of the state's rule and the beginning of what
  // follows, such as the token "}]" of a vocabulary without "}".
  bool improve() {
    int64_t visits = 0;
    bool changed = true;
    bool crosses = false;  // whether a token of this kind is legal in a state without a distance
    StackNodes stack(64);
    const Walker walker{machine_, out_};
    while (changed) {
      changed = crosses = false;
      for (const int32_t state : far_) {
        int32_t best = out_.states_[at(state)];
        bool crosses_here = false;
        const auto on_node = [&](int32_t index, Position position) {
          if (trie_.node(index).token >= 0) {
            best = std::min(best, add_distances(1, out_.of_position(position, stack)));
          }
          return ++visits < kMaxVisits;
        };
        const auto on_illegal = [&](int32_t) { ++visits; };
        const auto on_below = [&](int32_t index, int16_t) {
          ++visits;
          if (trie_.node(index).token >= 0) best = 1;
          crosses_here = crosses_here || trie_.node(index).end > index + 1;
        };
        for (const TokenTrie::Part part : {TokenTrie::kText, TokenTrie::kOther}) {
          walker.visit(trie_, trie_.range(part), 0, {state, kEmptyStack}, &stack, on_node,
                       on_illegal, on_below);
        }
        if (visits >= kMaxVisits) return false;
        crosses = crosses || (best == kFar && crosses_here);
        if (best == out_.states_[at(state)]) continue;
        out_.states_[at(state)] = best;
        for (const int32_t entry : entries_of_state_[state]) update_entry(entry);
        changed = true;
      }
    }
    return !crosses &&
           std::find(out_.entries_.begin(), out_.entries_.end(), kFar) == out_.entries_.end();
  }

  const Machine& machine_;
  const TokenTrie& trie_;
  Distances& out_;
  Lists<Source> sources_;            // by state: transitions to it
  Lists<Source> callers_;            // by action: transitions with it
  Lists<int32_t> pushes_of_start_;   // by state: actions that go to it
  Lists<int32_t> pushes_of_entry_;   // by entry: actions that push it
  Lists<int32_t> entries_of_state_;  // by state: entries that return to it
  Lists<int32_t> counts_to_state_;   // by state: actions that count and may go to it
  std::vector<int64_t> bytes_;
  std::vector<int32_t> first_;  // class of the first byte of each state's text; -1: it is empty
  std::vector<uint8_t> first_byte_;  // smallest byte of each class
  std::vector<int32_t> settled_;     // states, in the order of their lengths
  std::vector<int32_t> missing_;     // by entry: returns to states whose distance is not known yet
  std::vector<int32_t> far_;         // states for which step 2 has found no distance
  std::vector<int32_t> pushed_;
  // distance_of() does not know the value of the counter. It follows the states of small values;
  // these are the states that other values lead to.
  std::vector<int32_t> others_;
};

Distances::Distances(const Machine& machine, const TokenTrie& trie) {
  DistanceSearch(machine, trie, this).run();
}

}  // namespace graft::guide
