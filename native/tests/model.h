// A random graph and what it must compute: nodes in an order that their edges agree with.
#pragma once

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "stress_cell.h"

namespace stress {

using Random = std::mt19937;

inline unsigned below(Random& random, unsigned n) { return static_cast<unsigned>(random() % n); }

enum class Kind { plain, barrier, warp, host, copy, fill, empty, child };

// Node i writes cell i; a child graph is one plain kernel node.
struct NodeSpec {
  Kind kind = Kind::plain;
  unsigned salt = 0;
  std::vector<int> after;  // earlier nodes; up to three are read
  bool enabled = true;
  int fails_in_run = 0;  // of a host step: the run that fails, from 1

  int reads(size_t i) const { return i < after.size() && i < 3 ? after[i] : -1; }
  bool can_be_disabled() const { return kind != Kind::host && kind < Kind::empty; }
};

struct GraphSpec {
  std::vector<NodeSpec> nodes;

  bool has_host() const {
    for (auto& node : nodes) {
      if (node.kind == Kind::host) return true;
    }
    return false;
  }
};

// `chain`: each node follows the one before, so that what a failure stops is known.
inline GraphSpec random_graph(Random& random, bool chain, bool barriers) {
  GraphSpec spec;
  const unsigned count = 2 + below(random, 22);
  for (unsigned i = 0; i < count; ++i) {
    NodeSpec node;
    node.kind = static_cast<Kind>(below(random, 8));
    if (!barriers && (node.kind == Kind::barrier || node.kind == Kind::warp)) {
      node.kind = Kind::plain;
    }
    node.salt = static_cast<unsigned>(random());
    if (chain && i > 0) {
      node.after.push_back(static_cast<int>(i) - 1);
    } else if (i > 0) {
      // Forks and joins: sometimes a new root, else up to four of the last eight nodes.
      const unsigned wanted = below(random, 5);
      for (unsigned k = 0; k < wanted; ++k) {
        const int from = static_cast<int>(i - 1 - below(random, i < 8 ? i : 8));
        bool known = false;
        for (int other : node.after) known |= other == from;
        if (!known) node.after.push_back(from);
      }
    }
    if (node.kind == Kind::copy && node.after.empty()) node.kind = Kind::fill;
    spec.nodes.push_back(node);
  }
  return spec;
}

// The cells, computed one node after another.
class Model {
 public:
  explicit Model(size_t nodes) : words_(nodes * kWords, 0), runs_(nodes, 0) {}

  void new_definition() { runs_.assign(runs_.size(), 0); }
  void clear_failure() { failed_ = false; }
  bool failed() const { return failed_; }
  const std::string& failed_node() const { return failed_node_; }
  const std::vector<unsigned>& words() const { return words_; }

  void replay(const GraphSpec& spec) {
    for (size_t i = 0; i < spec.nodes.size(); ++i) run(spec.nodes[i], static_cast<int>(i));
  }

 private:
  void run(const NodeSpec& node, int out) {
    unsigned* cell = words_.data() + out * kWords;
    if (node.kind == Kind::host) {
      const int number = ++runs_[static_cast<size_t>(out)];
      if (failed_) return;
      if (number == node.fails_in_run) {
        failed_ = true;
        failed_node_ = "host " + std::to_string(out);
        return;
      }
    }
    if (!node.enabled || node.kind == Kind::empty) return;
    if (node.kind == Kind::fill) {
      std::memset(cell, static_cast<int>(node.salt & 255), kWords * sizeof *cell);
      return;
    }
    if (node.kind == Kind::copy) {
      std::memcpy(cell, words_.data() + node.reads(0) * kWords, kWords * sizeof *cell);
      return;
    }
    unsigned now[kWords];
    for (int w = 0; w < kWords; ++w) {
      now[w] = gather_word(words_.data(), out, node.salt, node.reads(0), node.reads(1),
                           node.reads(2), w);
    }
    for (int w = 0; w < kWords; ++w) {
      const int first = w / kBlock * kBlock;
      cell[w] = node.kind == Kind::barrier ? mix_word(now[w], now[first + (w + 1) % kBlock])
                : node.kind == Kind::warp  ? mix_word(now[w], now[w ^ 8])
                                           : now[w];
    }
  }

  std::vector<unsigned> words_;
  std::vector<int> runs_;
  bool failed_ = false;
  std::string failed_node_;
};

}  // namespace stress
