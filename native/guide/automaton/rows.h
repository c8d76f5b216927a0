// Mask rows of the states of a machine.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "guide/automaton/distances.h"
#include "guide/automaton/machine.h"
#include "guide/automaton/stack.h"
#include "guide/automaton/text_states.h"
#include "guide/automaton/token_trie.h"
#include "guide/automaton/walk.h"

namespace graft::guide {

// Limit of the memory for the stored mask rows of all machines of a vocabulary. Thread-safe.
class RowMemory {
 public:
  explicit RowMemory(int64_t bytes) : limit_(bytes) {}

  // Returns false, and counts nothing, if `bytes` more bytes would exceed the limit.
  bool take(int64_t bytes) noexcept {
    if (in_use_.fetch_add(bytes, std::memory_order_relaxed) + bytes <= limit_) return true;
    give_back(bytes);
    return false;
  }
  void give_back(int64_t bytes) noexcept { in_use_.fetch_sub(bytes, std::memory_order_relaxed); }
  int64_t bytes_in_use() const noexcept { return in_use_.load(std::memory_order_relaxed); }

 private:
  int64_t limit_;
  std::atomic<int64_t> in_use_{0};
};

// A machine for one vocabulary, with the token bitmasks of its states.
//
// The legal tokens of a position depend on its state and, for tokens that contain closing bytes, on
// its stack. The *base row* of a state allows the tokens that are legal whatever the stack holds:
// those that pop no entry that was pushed before the token. It is computed once. Where a token pops
// such an entry, the base row lists a *crossing*: the node of the trie whose byte pops it. fill()
// copies the base row and visits the descendants of the crossings with the request's stack. In
// positions in which a token may make the counter reach a limit, the base row also depends on the
// counter.
//
// Most base rows are nearly empty or differ little from the row of the text tokens, so they are
// stored as the tokens in which they differ from it. They need a few kilobytes instead of the 16
// kilobytes that a row of a large vocabulary has, and copying them takes less time.
//
// Thread-safe. All matchers of a grammar share the base rows. A base row is published once, with
// release order, and is neither changed nor freed while the grammar exists.
class AutomatonGrammar {
 public:
  // Limit of fill() that allows all legal tokens.
  static constexpr int32_t kNoLimit = INT32_MAX;

  AutomatonGrammar(Machine machine, std::shared_ptr<const TokenTrie> trie,
                   std::shared_ptr<RowMemory> memory);
  ~AutomatonGrammar();
  AutomatonGrammar(const AutomatonGrammar&) = delete;
  AutomatonGrammar& operator=(const AutomatonGrammar&) = delete;

  const Machine& machine() const { return machine_; }
  const Distances& distances() const { return distances_; }
  const TokenTrie& trie() const { return *trie_; }
  Walker walker() const { return {machine_, distances_}; }
  size_t nbytes() const;

  // Writes the mask row of a position. The row allows the tokens with text that are legal and lead
  // to a position with a distance of at most `limit`. The nodes that the call adds to `stack` are
  // removed before it returns. Returns whether the limit has excluded a legal token.
  bool fill(Position position, StackNodes* stack, int32_t limit, int32_t* row) const noexcept;

 private:
  struct Crossing {
    int32_t node;
    int16_t exit;
  };
  struct BaseRow {
    std::vector<int32_t> bits;     // the row; empty if the next two members describe it
    const int32_t* start;          // a TokenTrie::text_row() with similar tokens; null: no tokens
    std::vector<int32_t> changed;  // tokens that are in only one of this row and `start`
    // Upper bound of the distance (see Distances) after any allowed token, without the costs of the
    // entries that were on the stack before the token.
    int32_t largest_distance;
    std::vector<Crossing> crossings;

    int64_t nbytes() const;
    void copy_to(int32_t* row, int64_t words) const noexcept;
  };
  class Writer;

  bool is_far_from_limit(Position position) const noexcept;
  std::atomic<const BaseRow*>& stored_row(Position position) const;
  const BaseRow* base_row(Position position, StackNodes* stack, int32_t* row) const noexcept;
  std::unique_ptr<BaseRow> compute_base_row(Position position, StackNodes* stack,
                                            int32_t* row) const;

  Machine machine_;
  std::shared_ptr<const TokenTrie> trie_;
  std::shared_ptr<RowMemory> memory_;
  Distances distances_;
  TextStates text_states_;
  // Base rows by state; null until computed.
  mutable std::vector<std::atomic<const BaseRow*>> rows_;
  // Base rows of positions near a limit of the counter, by state and value of the counter.
  mutable std::mutex near_rows_mutex_;  // for the map, not for its elements
  mutable std::map<std::pair<int32_t, int32_t>, std::atomic<const BaseRow*>> near_rows_;
};

}  // namespace graft::guide
