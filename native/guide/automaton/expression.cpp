// Reads programs of expressions, and splits ranges of characters into ranges of bytes.
#include "guide/automaton/expression.h"

#include <algorithm>

namespace graft::guide {
namespace {

constexpr int32_t kMaxNesting = 500;

// Writes the UTF-8 bytes of a character and returns their number. Codes above U+10FFFF, which stand
// for special tokens, have four bytes, too.
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

[[noreturn]] void fail() { throw std::runtime_error("automaton: malformed expression"); }

}  // namespace

// The range is split into parts, so that one sequence of byte ranges matches each part. All
// characters of a part have the same number of bytes. They share the first bytes; the next byte
// has a range of values; and each byte after it takes all values from 0x80 to 0xBF.
void split_utf8(uint32_t first, uint32_t last, std::vector<ByteSequence>* out) {
  if (first > last) return;
  if (first <= 0xDFFF && last >= 0xD800) {  // surrogates are not characters
    if (first < 0xD800) split_utf8(first, 0xD7FF, out);
    if (last > 0xDFFF) split_utf8(0xE000, last, out);
    return;
  }
  for (const uint32_t longest : {0x7Fu, 0x7FFu, 0xFFFFu}) {  // the last character of each length
    if (first <= longest && last > longest) {
      split_utf8(first, longest, out);
      split_utf8(longest + 1, last, out);
      return;
    }
  }
  std::array<uint8_t, 4> low{};
  std::array<uint8_t, 4> high{};
  const int length = encode_utf8(first, &low);
  encode_utf8(last, &high);
  for (int tail = length - 1; tail > 0; --tail) {
    const uint32_t mask = (1u << (6 * tail)) - 1;  // the bits of the last `tail` bytes
    if ((first & ~mask) == (last & ~mask)) continue;
    if ((first & mask) != 0) {
      split_utf8(first, first | mask, out);
      split_utf8((first | mask) + 1, last, out);
      return;
    }
    if ((last & mask) != mask) {
      split_utf8(first, (last & ~mask) - 1, out);
      split_utf8(last & ~mask, last, out);
      return;
    }
  }
  ByteSequence sequence{{}, length};
  for (int i = 0; i < length; ++i) sequence.ranges[at(i)] = {low[at(i)], high[at(i)]};
  out->push_back(sequence);
}

ExpressionTree::ExpressionTree(const std::vector<int32_t>& program, int32_t num_rules)
    : program_(program), num_rules_(num_rules) {
  while (position_ < program_.size()) read_operation();
  if (stack_.size() != 1) fail();
}

// Returns the next operand, which must be at least `low`.
int32_t ExpressionTree::read(int32_t low) {
  if (position_ >= program_.size() || program_[position_] < low) fail();
  return program_[position_++];
}

void ExpressionTree::read_operation() {
  const int32_t op = read(0);
  if (op > static_cast<int32_t>(Op::kMembersWithAny)) fail();
  Node node{static_cast<Op>(op)};
  node.begin = static_cast<int32_t>(position_) - 1;
  node.operands = static_cast<int32_t>(position_);
  check_operands(&node);
  node.end = static_cast<int32_t>(position_);
  stack_.push_back(static_cast<int32_t>(nodes_.size()));
  nodes_.push_back(node);
}

// Reads the operands of an operation and takes its children from the stack.
void ExpressionTree::check_operands(Node* node) {
  const auto read_counts = [this] {
    const int32_t min = read(0);
    const int32_t max = read(-1);
    if (max >= 0 && max < min) fail();
  };
  switch (node->op) {
    case Op::kEmpty:
      return;
    case Op::kSet:
      for (int32_t count = read(0); count > 0; --count) {
        if (read(read(0)) > 0x1FFFFF) fail();
      }
      return;
    case Op::kConcat:
    case Op::kUnion:
      return take_children(node, read(1));
    case Op::kRepeat:
      read_counts();
      return take_children(node, 1);
    case Op::kCall:
      if (read(1) >= num_rules_) fail();
      node->has_call = true;
      return;
    case Op::kMembers:
    case Op::kMembersWithAny: {
      const int32_t items = read(0);
      if (at(items) >= stack_.size()) fail();
      for (int32_t i = 0; i < items; ++i) {
        read_counts();
        if (node->op == Op::kMembersWithAny && read(0) > 1) fail();
      }
      return take_children(node, items + 1);
    }
    case Op::kBoth:
    case Op::kMinus:
      take_children(node, 2);
      if (node->has_call) fail();
      return;
    case Op::kMultiple:
      read(1);
      read(0);
      return;
  }
}

void ExpressionTree::take_children(Node* node, int32_t count) {
  if (at(count) > stack_.size()) fail();
  node->first_child = static_cast<int32_t>(children_.size());
  node->num_children = count;
  children_.insert(children_.end(), stack_.end() - count, stack_.end());
  stack_.resize(stack_.size() - at(count));
  node->begin = nodes_[at(child(*node, 0))].begin;
  for (int32_t i = 0; i < count; ++i) {
    const Node& part = nodes_[at(child(*node, i))];
    node->nesting = std::max(node->nesting, part.nesting + 1);
    node->has_call = node->has_call || part.has_call;
  }
  if (node->nesting > kMaxNesting) {
    throw std::length_error("automaton: expression is nested too deeply");
  }
}

}  // namespace graft::guide
