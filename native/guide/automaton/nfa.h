// Nondeterministic automaton of a grammar's rules.
#pragma once

#include <cstdint>
#include <vector>

#include "guide/automaton/expression.h"

namespace graft::guide {

// Each state belongs to one rule. It has edges that read a byte, or one edge that reads a text of
// another rule with its opening and closing bytes (a call), or neither.
class Nfa {
 public:
  static constexpr int32_t kNone = -1;

  struct State {
    bool live = false;     // whether the state can reach the end of its rule
    int32_t edge = kNone;  // first edge that reads a byte, an index into `byte_edges`
    int32_t call = kNone;  // rule of the call
    int32_t next = kNone;  // state after the call
    int32_t ends = kNone;  // rule whose text may end in this state
    int32_t free = kNone;  // first edge without a byte, an index into `free_edges`
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
  struct Brackets {
    uint8_t open;
    uint8_t close;
    int32_t start;  // first state of the rule
  };

  // Throws std::runtime_error if a program is malformed, and std::length_error if the automaton
  // would have more than `max_states` states or edges that read a byte.
  Nfa(const std::vector<Rule>& rules, int32_t max_states, Work* work);

  std::vector<State> states;
  std::vector<ByteEdge> byte_edges;
  std::vector<FreeEdge> free_edges;
  std::vector<Brackets> rules;

 private:
  // Automaton of the texts of one node, which must not contain calls.
  Nfa(const ExpressionTree& tree, int32_t node, int32_t max_states, Work* work);

  void add_rule(uint8_t open, uint8_t close, const ExpressionTree& tree, int32_t node);
  int32_t add_state();
  void connect(int32_t from, int32_t to);
  void add_byte_edge(int32_t from, ByteRange range, int32_t to);

  // These functions add an expression that begins at state `from`, and return the state at its end.
  int32_t emit(const ExpressionTree& tree, int32_t node, int32_t from);
  int32_t emit_set(const ExpressionTree& tree, const ExpressionTree::Node& node, int32_t from);
  int32_t emit_union(const ExpressionTree& tree, const ExpressionTree::Node& node, int32_t from);
  int32_t emit_repeat(const ExpressionTree& tree, const ExpressionTree::Node& node, int32_t from);
  int32_t emit_call(int32_t rule, int32_t from);
  int32_t emit_members(const ExpressionTree& tree, const ExpressionTree::Node& node, int32_t from);
  int32_t emit_product(const ExpressionTree& tree, const ExpressionTree::Node& node, int32_t from);

  void find_live_states();

  int32_t max_states_;
  Work* work_;
  std::vector<ByteSequence> sequences_;  // memory of emit_set()
};

}  // namespace graft::guide
