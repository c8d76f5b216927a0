// Stacks of entries, and the position of a machine in a text: its state, stack and counter.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "guide/automaton/expression.h"

namespace graft::guide {

// Distance that means: not known, or too far to be of use. Sums of two distances do not overflow.
constexpr int32_t kFar = INT32_MAX / 4;

inline int32_t add_distances(int32_t a, int32_t b) { return std::min(kFar, a + b); }

// A set of stacks that share their lower parts. A stack is identified by the node on its top, or by
// kEmptyStack. Pushing adds a node, and popping leaves it where it is, so that a position can be
// restored later. Nodes are removed with truncate() when no position needs them any more.
constexpr int32_t kEmptyStack = -1;

class StackNodes {
 public:
  struct Node {
    int32_t entry;
    int32_t parent;  // node below, or kEmptyStack
    int32_t depth;   // number of entries up to this one
    int32_t cost;    // sum of the costs of these entries; Distances defines costs
  };

  explicit StackNodes(size_t capacity) { nodes_.reserve(capacity); }

  const Node& node(int32_t top) const { return nodes_[at(top)]; }
  int32_t depth(int32_t top) const { return top == kEmptyStack ? 0 : node(top).depth; }
  int32_t cost(int32_t top) const { return top == kEmptyStack ? 0 : node(top).cost; }

  int32_t size() const { return static_cast<int32_t>(nodes_.size()); }
  void truncate(int32_t size) { nodes_.resize(at(size)); }
  int32_t push(int32_t top, int32_t entry, int32_t cost_of_entry) {
    nodes_.push_back({entry, top, depth(top) + 1, add_distances(cost(top), cost_of_entry)});
    return size() - 1;
  }

 private:
  std::vector<Node> nodes_;
};

struct Position {
  int32_t state;
  int32_t top;
  int32_t count = 0;  // value of the counter; without meaning in states that do not count
};

}  // namespace graft::guide
