// Runs machines over the bytes of tokens.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "guide/automaton/distances.h"
#include "guide/automaton/machine.h"
#include "guide/automaton/stack.h"
#include "guide/automaton/token_trie.h"

namespace graft::guide {

// A machine with the costs of its entries.
struct Walker {
  const Machine& machine;
  const Distances& distances;

  enum Result { kMoved, kIllegal, kBelow };

  // Reads a byte with an action, or an illegal one: `next` is the result of Machine::next().
  // kBelow: the byte pops an entry although the stack is empty; the position has not changed.
  Result act(int16_t next, Position* position, StackNodes* stack) const {
    if (next == Machine::kDead) return kIllegal;
    const Machine::Action& action = machine.action(next);
    if (action.entry == Machine::kCount) {
      const Machine::Count& count = machine.counts()[at(action.target)];
      ++position->count;
      position->state = position->count < count.limit ? count.below : count.reached;
      return kMoved;
    }
    if (action.entry != Machine::kPop) {
      position->state = action.target;
      position->count = 0;
      if (action.entry == Machine::kReset) return kMoved;
      position->top = stack->push(position->top, action.entry, distances.of_entry(action.entry));
      return kMoved;
    }
    if (position->top == kEmptyStack) return kBelow;
    const StackNodes::Node& node = stack->node(position->top);
    *position = {machine.return_state(node.entry, action.target), node.parent, 0};
    return position->state == Machine::kDead ? kIllegal : kMoved;
  }

  // Reads a text. Returns whether the text is legal. Its opening bytes push nodes onto `stack`.
  bool read(std::string_view text, Position* position, StackNodes* stack) const {
    for (const char c : text) {
      const int16_t next = machine.next(position->state, static_cast<uint8_t>(c));
      if (next >= 0) {
        position->state = next;
      } else if (act(next, position, stack) != kMoved) {
        return false;
      }
    }
    return true;
  }

  // Visits those nodes in a range of a trie whose bytes are legal. The topmost nodes of the range
  // have the depth `depth`. The machine is at `start` before it reads the byte of such a node.
  //
  // on_node(index, position): the byte of a node is legal, and leads to `position`. Returns whether
  // the descendants of the node are visited.
  // on_illegal(index): the byte of a node is illegal, so its descendants are not visited.
  // on_below(index, exit): the byte of a node pops an entry although the stack is empty. The
  // descendants of the node are not visited.
  template <typename OnNode, typename OnIllegal, typename OnBelow>
  void visit(const TokenTrie& trie, TokenTrie::Range range, int depth, Position start,
             StackNodes* stack, OnNode on_node, OnIllegal on_illegal, OnBelow on_below) const {
    struct Before {
      Position position;
      int32_t size;  // of the stack nodes
    };
    std::array<Before, TokenTrie::kMaxTokenLength + 1> path;  // before the byte at each depth
    path[at(depth)] = {start, stack->size()};
    for (int32_t i = range.begin; i < range.end;) {
      const TokenTrie::Node& node = trie.node(i);
      const Before& before = path[node.depth];
      const int16_t next = machine.next(before.position.state, node.byte);
      Before& after = path[node.depth + 1u];
      after = {{next, before.position.top, before.position.count}, before.size};
      if (next < 0) {
        after.position.state = before.position.state;
        stack->truncate(before.size);
        const Result result = act(next, &after.position, stack);
        if (result != kMoved) {
          if (result == kIllegal) {
            on_illegal(i);
          } else {
            on_below(i, machine.action(next).target);
          }
          i = node.end;
          continue;
        }
        after.size = stack->size();
      }
      i = on_node(i, after.position) ? i + 1 : node.end;
    }
    stack->truncate(path[at(depth)].size);
  }
};

}  // namespace graft::guide
