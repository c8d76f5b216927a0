// Grammars as lists of rules, and the expressions of the rules.
//
// Rule 0 is the root of a grammar: its expression matches the whole text. Every other rule has an
// opening byte, a closing byte and the expression of the text between these two bytes. For JSON,
// rules are objects with the bytes '{' and '}' and arrays with the bytes '[' and ']'.
//
// An expression is a program in postfix notation. It consists of operations with their operands:
//   0                           the empty text
//   1, n, low_1, high_1, ...    one character from n ranges; codes above U+10FFFF, which no text
//                               contains, are those of special tokens
//   2, n                        the last n expressions, one after the other
//   3, n                        one of the last n expressions
//   4, min, max                 the last expression, repeated; max -1 means no limit
//   5, r                        the opening byte of rule r, a text of rule r, the closing byte
//   6, n, min_1, max_1, ...     members: the last n + 1 expressions are a separator and n items
//   7                           the texts that match both of the last two expressions
//   8                           the texts that match the first of these two, but not the second
//   9, m, p                     decimal digits whose number is a multiple of m, with a point before
//                               the last p digits if p > 0
//   10, n, min_1, max_1, flag_1, ...
//                               members of which at least one item with the flag 1 occurs
// Items of members follow each other in order. Item i occurs min_i to max_i times, and the
// separator separates neighbouring items.
// The operands of the operations 7 and 8 must not contain operation 5.
#pragma once

#include <array>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace graft::guide {

inline size_t at(int32_t index) { return static_cast<size_t>(index); }

struct Rule {
  uint8_t open = 0;  // of rule 0: not used
  uint8_t close = 0;
  std::vector<int32_t> program;
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

// Appends sequences of byte ranges that match exactly the UTF-8 texts of a range of characters.
void split_utf8(uint32_t low, uint32_t high, std::vector<ByteSequence>* out);

enum class Op : int32_t {
  kEmpty = 0,
  kSet = 1,
  kConcat = 2,
  kUnion = 3,
  kRepeat = 4,
  kCall = 5,
  kMembers = 6,
  kBoth = 7,
  kMinus = 8,
  kMultiple = 9,
  kMembersWithAny = 10
};

// Syntax tree of an expression.
class ExpressionTree {
 public:
  struct Node {
    Op op;
    int32_t begin = 0;         // position of the expression in the program
    int32_t end = 0;           // position after the expression
    int32_t operands = 0;      // position of the operation's operands in the program
    int32_t first_child = 0;   // index into the children of all nodes
    int32_t num_children = 0;  // of members: the separator, then the items
    int32_t nesting = 0;
    bool has_call = false;
  };

  // Reads a program of a grammar with `num_rules` rules, which must outlive the tree. Throws
  // std::runtime_error if the program is malformed, and std::length_error if it is nested deeply.
  ExpressionTree(const std::vector<int32_t>& program, int32_t num_rules);

  int32_t root() const { return static_cast<int32_t>(nodes_.size()) - 1; }
  const Node& node(int32_t index) const { return nodes_[at(index)]; }
  int32_t child(const Node& node, int32_t i) const { return children_[at(node.first_child + i)]; }
  int32_t operand(const Node& node, int32_t i) const { return program_[at(node.operands + i)]; }
  // Returns the integers of a node's expression.
  std::vector<int32_t> expression(const Node& node) const {
    return {program_.begin() + node.begin, program_.begin() + node.end};
  }

 private:
  void read_operation();
  void check_operands(Node* node);
  void take_children(Node* node, int32_t count);
  int32_t read(int32_t low);

  const std::vector<int32_t>& program_;
  size_t position_ = 0;
  int32_t num_rules_;
  std::vector<int32_t> stack_;
  std::vector<Node> nodes_;
  std::vector<int32_t> children_;
};

// Counts the elementary steps of a compilation, and ends compilations that take too long.
class Work {
 public:
  // About 50 ms of processor time.
  static constexpr int64_t kMaxSteps = 10'000'000;

  explicit Work(int64_t max_steps = kMaxSteps) : max_steps_(max_steps) {}

  void count(int64_t steps) {
    steps_ += steps;
    if (steps_ > max_steps_) throw std::length_error("automaton: takes too long to compile");
  }

 private:
  int64_t max_steps_;
  int64_t steps_ = 0;
};

}  // namespace graft::guide
