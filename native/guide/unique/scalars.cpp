// Counts the values of sets of scalars.
#include "guide/unique/scalars.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace graft::guide {
namespace {

// Where in a scalar a state is. A state at the end of a scalar belongs to the part before it.
// kEscape is the part after a backslash, and kHex1 to kHex4 say how many digits follow.
enum Part : uint8_t {
  kStart,
  kString,
  kEscape,
  kHex4,
  kHex3,
  kHex2,
  kHex1,
  kInteger,
  kFraction,
  kExponent,
  kWord
};

bool is_in_escape(Part part) { return kEscape <= part && part <= kHex1; }

bool is_digit(int byte) { return byte >= '0' && byte <= '9'; }

}  // namespace

// Finds the strongly connected components of the states with Tarjan's algorithm, and counts each
// component after those that can be reached from it.
class ScalarSet::Analysis {
 public:
  explicit Analysis(ScalarSet* set)
      : set_(*set),
        machine_(set->machine_),
        size_(at(machine_.num_states())),
        parts_(size_, kStart),
        known_(size_, 0),
        order_(size_, 0),
        lowest_(size_, 0),
        on_stack_(size_, 0),
        component_(size_, -1) {
    set_.counts_.assign(size_, 0);
    set_.many_exponents_.assign(size_, 0);
    set_.stays_many_.assign(size_, 0);
  }

  void run() {
    if (!machine_.counts().empty() || !machine_.actions().empty()) {
      throw std::domain_error("scalars: the automaton has brackets or a counter");
    }
    find_parts();
    for (size_t state = 0; state < size_; ++state) {
      if (known_[state] && order_[state] == 0) visit(static_cast<int32_t>(state));
    }
    find_stays_many();
  }

 private:
  // Calls `use(byte, next)` for each legal byte of a state.
  template <typename Use>
  void for_each_edge(int32_t state, Use use) const {
    for (int byte = 0; byte < 256; ++byte) {
      const int16_t next = machine_.next(state, static_cast<uint8_t>(byte));
      if (next >= 0) use(byte, next);
    }
  }

  static Part part_after(Part part, int byte) {
    if (part == kStart) {
      if (byte == '"') return kString;
      return byte == '-' || is_digit(byte) ? kInteger : kWord;
    }
    if (part == kString && byte == '\\') return kEscape;
    if (part == kEscape) return byte == 'u' ? kHex4 : kString;
    if (part == kHex1) return kString;
    if (is_in_escape(part)) return static_cast<Part>(part + 1);
    if (part == kInteger && byte == '.') return kFraction;
    if ((part == kInteger || part == kFraction) && (byte == 'e' || byte == 'E')) return kExponent;
    return part;
  }

  void find_parts() {
    std::vector<int32_t> pending = {0};
    known_[0] = 1;
    while (!pending.empty()) {
      const int32_t state = pending.back();
      pending.pop_back();
      for_each_edge(state, [&](int byte, int16_t next) {
        const Part part = part_after(parts_[at(state)], byte);
        if (!known_[at(next)]) {
          known_[at(next)] = 1;
          parts_[at(next)] = part;
          pending.push_back(next);
        } else if (parts_[at(next)] != part && !ends(next)) {
          throw std::domain_error("scalars: the same state is in different parts of a value");
        }
      });
    }
  }

  // Whether nothing can follow in a state.
  bool ends(int32_t state) const {
    bool any = false;
    for_each_edge(state, [&](int, int16_t) { any = true; });
    return !any;
  }

  // Whether the values after a byte of this part differ from those after its other bytes.
  bool distinguishes(Part part, int byte) const {
    switch (part) {
      case kString:
        return byte != '\\';
      case kInteger:
      case kFraction:
      case kExponent:
        return is_digit(byte) || byte == '-' || byte == '+';
      default:
        return true;
    }
  }

  void visit(int32_t root) {
    struct Call {
      int32_t state;
      int byte;  // next edge to follow
    };
    std::vector<Call> calls;
    const auto enter = [&](int32_t state) {
      order_[at(state)] = lowest_[at(state)] = ++last_order_;
      stack_.push_back(state);
      on_stack_[at(state)] = 1;
      calls.push_back({state, 0});
    };
    enter(root);
    while (!calls.empty()) {
      const int32_t state = calls.back().state;
      if (calls.back().byte < 256) {
        const int byte = calls.back().byte++;
        const int16_t next = machine_.next(state, static_cast<uint8_t>(byte));
        if (next < 0) continue;
        if (order_[at(next)] == 0) {
          enter(next);
        } else if (on_stack_[at(next)]) {
          lowest_[at(state)] = std::min(lowest_[at(state)], order_[at(next)]);
        }
        continue;
      }
      calls.pop_back();
      if (!calls.empty()) {
        const int32_t caller = calls.back().state;
        lowest_[at(caller)] = std::min(lowest_[at(caller)], lowest_[at(state)]);
      }
      if (lowest_[at(state)] != order_[at(state)]) continue;
      std::vector<int32_t> component;
      do {
        component.push_back(stack_.back());
        component_[at(stack_.back())] = state;
        on_stack_[at(stack_.back())] = 0;
        stack_.pop_back();
      } while (component.back() != state);
      count_component(component);
    }
  }

  void count_component(const std::vector<int32_t>& component) {
    bool has_cycle = false;
    bool many = false;  // infinitely many values
    bool exponents = false;
    for (const int32_t state : component) {
      const Part part = parts_[at(state)];
      for_each_edge(state, [&](int byte, int16_t next) {
        if (component_[at(next)] == component_[at(state)]) {
          has_cycle = true;
          // A cycle of zeros adds no values: 1.0 and 1.00 are equal. A cycle that contains a state
          // in an escape sequence adds characters to a string.
          if (part == kString || is_in_escape(part)) many = true;
          if ((part == kInteger || part == kFraction) && byte >= '1' && byte <= '9') many = true;
          if (part == kExponent) exponents = true;
          return;
        }
        if (part == kExponent) {
          exponents |= set_.many_exponents_[at(next)] != 0;
        } else if (parts_[at(next)] != kExponent) {
          many |= set_.counts_[at(next)] == kMany;
        }
      });
    }
    for (const int32_t state : component) {
      const Part part = parts_[at(state)];
      set_.many_exponents_[at(state)] = exponents ? 1 : 0;
      if (part == kExponent) {
        set_.counts_[at(state)] = 1;
      } else if (many) {
        set_.counts_[at(state)] = kMany;
      } else if (has_cycle) {
        throw std::domain_error("scalars: infinitely many texts have finitely many values");
      } else {
        set_.counts_[at(state)] = finite_count(state, part);
      }
    }
  }

  // Components without a cycle have one state.
  int32_t finite_count(int32_t state, Part part) const {
    if (part == kFraction) return 1;  // 1.5 and 1.50 are equal
    int64_t count = machine_.accepting(state) ? 1 : 0;
    bool has_sign = false;
    for_each_edge(state, [&](int byte, int16_t next) {
      if (!distinguishes(part, byte)) return;
      has_sign |= part == kStart && byte == '-';
      // Two escape sequences that differ here may encode the same character, so the values after
      // them may be the same.
      const int64_t further = set_.counts_[at(next)];
      count = is_in_escape(part) ? std::max(count, further) : count + further;
    });
    if (has_sign) --count;  // -0 and 0 are equal
    return static_cast<int32_t>(std::clamp<int64_t>(count, 1, kMany));
  }

  void find_stays_many() {
    std::vector<uint8_t>& stays = set_.stays_many_;
    for (size_t state = 0; state < size_; ++state) {
      const Part part = parts_[state];
      if (!known_[state] || part == kStart || part == kWord) continue;
      stays[state] = part == kExponent ? set_.many_exponents_[state] : set_.counts_[state] == kMany;
    }
    for (bool changed = true; changed;) {
      changed = false;
      for (size_t state = size_; state-- > 0;) {
        if (!stays[state]) continue;
        const bool in_string = parts_[state] == kString;
        for_each_edge(static_cast<int32_t>(state), [&](int byte, int16_t next) {
          if (!(in_string && byte == '"') && !stays[at(next)]) stays[state] = 0;
        });
        changed |= stays[state] == 0;
      }
    }
  }

  ScalarSet& set_;
  const Machine& machine_;
  size_t size_;
  std::vector<Part> parts_;
  std::vector<uint8_t> known_;
  std::vector<int32_t> order_;  // 0: not visited
  std::vector<int32_t> lowest_;
  std::vector<uint8_t> on_stack_;
  std::vector<int32_t> component_;  // a state of the same component
  std::vector<int32_t> stack_;
  int32_t last_order_ = 0;
};

ScalarSet::ScalarSet(Machine machine) : machine_(std::move(machine)) { Analysis(this).run(); }

}  // namespace graft::guide
