// The specification of a random graph, with the nodes in topological order, and a sequential model
// that computes the graph's results.
#pragma once

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "stress_cell.h"

namespace stress {

using Random = std::mt19937;

inline unsigned below(Random& random, unsigned n) { return static_cast<unsigned>(random() % n); }

enum class Kind {
  plain,
  barrier,
  warp,
  host,
  copy,
  fill,
  empty,
  child,       // child graph with one plain kernel node
  mailbox,     // mailbox whose wait is a batch memory operation
  spinkernel,  // mailbox whose wait is a spinning kernel
  moved,       // child graph that is moved into the parent
  choice,      // IF-ELSE node; the value of a cell selects the body
  loop,        // WHILE node with one to three iterations
  record_event,
  wait_event,
  count_
};

// A node of the graph. Node i writes cell i of the test's memory (see stress_cell.h). Empty and
// event nodes write nothing.
struct NodeSpec {
  Kind kind = Kind::plain;
  unsigned salt = 0;
  std::vector<int> after;  // nodes that this node depends on; it reads the cells of the first three
  bool enabled = true;
  int fails_in_run = 0;  // number (from 1) of the run in which the host step fails; 0: none

  // Returns the i-th node whose cell this node reads, or -1.
  int reads(size_t i) const { return i < after.size() && i < 3 ? after[i] : -1; }
  bool can_be_disabled() const { return kind != Kind::host && kind < Kind::empty; }
  bool is_host() const { return kind == Kind::host || is_mailbox(); }
  bool is_mailbox() const { return kind == Kind::mailbox || kind == Kind::spinkernel; }
  bool writes_nothing() const {
    return kind == Kind::empty || kind == Kind::record_event || kind == Kind::wait_event;
  }
  // Returns the cell whose value determines the condition of a `choice` node: that of the first
  // node in `after`, or, if there is none, the node's own cell `out`.
  int decider(int out) const { return after.empty() ? out : after[0]; }
  unsigned iterations() const { return 1 + salt % 3; }
};

struct GraphSpec {
  std::vector<NodeSpec> nodes;

  bool has_host() const {
    for (auto& node : nodes) {
      if (node.is_host()) return true;
    }
    return false;
  }
};

// Returns a random graph. With `chain` each node depends on the previous one, so that the model
// knows which nodes a failure skips.
inline GraphSpec random_graph(Random& random, bool chain) {
  GraphSpec spec;
  const unsigned count = 2 + below(random, 22);
  for (unsigned i = 0; i < count; ++i) {
    NodeSpec node;
    node.kind = static_cast<Kind>(below(random, static_cast<unsigned>(Kind::count_)));
    node.salt = static_cast<unsigned>(random());
    if (chain && i > 0) {
      node.after.push_back(static_cast<int>(i) - 1);
    } else if (i > 0) {
      // A node depends on none or on up to four of the last eight nodes, which gives forks and
      // joins.
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

// Computes what replays write to the cells (stress_cell.h), and their failures, by running one node
// after another.
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
    if (node.is_host()) {
      const int number = ++runs_[static_cast<size_t>(out)];
      if (failed_) return;
      if (number == node.fails_in_run) {
        failed_ = true;
        failed_node_ = "host " + std::to_string(out);
        return;
      }
    }
    if (!node.enabled || node.writes_nothing()) return;
    if (node.kind == Kind::fill) {
      std::memset(cell, static_cast<int>(node.salt & 255), kWords * sizeof *cell);
      return;
    }
    if (node.kind == Kind::copy) {
      std::memcpy(cell, words_.data() + node.reads(0) * kWords, kWords * sizeof *cell);
      return;
    }
    unsigned salt = node.salt;
    unsigned iterations = 1;
    if (node.kind == Kind::choice) {
      salt += words_[static_cast<size_t>(node.decider(out) * kWords)] % 2 == 0;
    } else if (node.kind == Kind::loop) {
      iterations = node.iterations();
    }
    for (; iterations > 0; --iterations) gather(node, out, salt, cell);
  }

  void gather(const NodeSpec& node, int out, unsigned salt, unsigned* cell) {
    unsigned now[kWords];
    for (int w = 0; w < kWords; ++w) {
      now[w] =
          gather_word(words_.data(), out, salt, node.reads(0), node.reads(1), node.reads(2), w);
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
