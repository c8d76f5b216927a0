// Nondeterministic automaton of a grammar's rules.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "guide/automaton/expression.h"

namespace graft::guide {

// Each state belongs to one rule. It has edges that read a byte, or one edge that reads a text of
// another rule with its opening and closing bytes (a call), or neither.
//
// A long repetition of a character is a *counted loop*: the automaton contains its body once, and a
// counter holds the number of times that the body has been read. The counter is 0 when a state with
// `enters` is reached. A state with `count` is the end of the body: it increments the counter, and
// has no edge but those that the Count describes.
class Nfa {
 public:
  static constexpr int32_t kNone = -1;
  // Maximum number of edges that read a byte, per state that the automaton may have.
  static constexpr int32_t kMaxEdges = 3;

  struct State {
    bool live = false;      // whether the state can reach the end of its rule
    bool enters = false;    // whether the counter is set to 0 here, before a counted loop
    int32_t limit = 0;      // limit of the counted loop whose body contains the state; 0: none
    int32_t count = kNone;  // index into `counts`
    int32_t edge = kNone;   // first edge that reads a byte, an index into `byte_edges`
    int32_t call = kNone;   // rule of the call
    int32_t next = kNone;   // state after the call
    int32_t ends = kNone;   // rule whose text may end in this state
    int32_t free = kNone;   // first edge without a byte, an index into `free_edges`
  };
  struct ByteEdge {
    uint8_t low;
    uint8_t high;
    int32_t to;
    int32_t next;  // next edge of the same state, or kNone
  };
  struct FreeEdge {
    int32_t to;
    int32_t next;  // next edge of the same state, or kNone
  };
  struct Count {
    int32_t limit;
    int32_t below;    // state while the counter is below the limit
    int32_t reached;  // state when the counter has reached the limit
  };
  struct Brackets {
    uint8_t open;
    uint8_t close;
    int32_t start;  // first state of the rule
  };

  // A repetition of a character whose maximum exceeds its minimum by more than `max_unrolled`
  // becomes a counted loop. Throws std::runtime_error if the program of a rule is malformed. Throws
  // std::length_error if the automaton would have more than `max_states` states or kMaxEdges times
  // as many edges that read a byte, if one counter is not enough (AmbiguousCount), or after too
  // much work.
  Nfa(const std::vector<Rule>& rules, int32_t max_states, int32_t max_unrolled, Work* work);

  std::vector<State> states;
  std::vector<ByteEdge> byte_edges;
  std::vector<FreeEdge> free_edges;
  std::vector<Count> counts;
  std::vector<Brackets> rules;

 private:
  // Automaton of the texts of one node, which must not contain calls. The last `tail` repetitions
  // of a counted loop are unrolled.
  Nfa(const ExpressionTree& tree, int32_t node, int32_t max_states, int32_t max_unrolled,
      int32_t tail, Work* work);

  void add_rule(uint8_t open, uint8_t close, const ExpressionTree& tree, int32_t node);
  int32_t add_state();
  void connect(int32_t from, int32_t to);
  void add_byte_edge(int32_t from, ByteRange range, int32_t to);

  // These functions add an expression that begins at state `from`, and return the state at its end.
  int32_t emit(const ExpressionTree& tree, int32_t node, int32_t from);
  int32_t emit_set(const ExpressionTree& tree, const ExpressionTree::Node& node, int32_t from);
  int32_t emit_union(const ExpressionTree& tree, const ExpressionTree::Node& node, int32_t from);
  int32_t emit_repeat(const ExpressionTree& tree, const ExpressionTree::Node& node, int32_t from);
  int32_t emit_counted_loop(const ExpressionTree& tree, int32_t body, int32_t limit, int32_t from);
  int32_t emit_call(int32_t rule, int32_t from);
  int32_t emit_members(const ExpressionTree& tree, const ExpressionTree::Node& node, int32_t from);
  void emit_item(const ExpressionTree& tree, int32_t separator, int32_t item,
                 std::pair<int32_t, int32_t> limits, int32_t begin, int32_t ended,
                 int32_t separated);
  int32_t emit_product(const ExpressionTree& tree, const ExpressionTree::Node& node, int32_t from);
  int32_t emit_multiple(int32_t divisor, int32_t places, int32_t from);

  // Ranges of the states, edges and counts that emit_product() has added. The first state is the
  // state at the end. If there are others, the second one is the start.
  struct Product {
    std::array<int32_t, 4> begins;  // indices into states, byte_edges, free_edges and counts
    std::array<int32_t, 4> ends;
  };
  int32_t add_product(const ExpressionTree& tree, const ExpressionTree::Node& node, int32_t from);
  int32_t add_copy(const Product& product, int32_t from);
  std::array<int32_t, 4> sizes() const;

  void find_live_states();

  // Products by their expressions. Computing a product takes longer than copying it.
  std::map<std::vector<int32_t>, Product> products_;
  int32_t max_states_;
  int32_t max_unrolled_;
  int32_t tail_;
  Work* work_;
  std::vector<ByteSequence> sequences_;  // memory of emit_set()
};

}  // namespace graft::guide
