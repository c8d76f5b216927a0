// Mask rows of the states of a machine.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "guide/automaton/distances.h"
#include "guide/automaton/machine.h"
#include "guide/automaton/stack.h"
#include "guide/automaton/token_trie.h"
#include "guide/automaton/walk.h"

namespace graft::guide {

// Memory for the stored mask rows of all machines of a vocabulary. Thread-safe.
class RowPool {
 public:
  RowPool(int64_t words, int64_t bytes);

  // Returns memory for one row, or null if all rows are in use. Does not allocate memory.
  int32_t* take() noexcept;
  void give_back(const int32_t* row) noexcept;

  int64_t words() const { return words_; }
  int32_t rows_in_use() noexcept;

 private:
  int64_t words_;
  int32_t max_rows_;
  // The system assigns memory to the pages of this array only when a row is written.
  std::unique_ptr<int32_t[]> storage_;
  std::mutex mutex_;           // guards the two fields below
  int32_t used_ = 0;           // number of rows of `storage_` that were ever taken
  std::vector<int32_t> free_;  // indices of the rows that were given back
};

// A machine for one vocabulary, with the token bitmasks of its states.
//
// The legal tokens of a position depend on its state and, for tokens that contain closing bytes, on
// its stack. The *base row* of a state allows the tokens that are legal whatever the stack holds:
// those that pop no entry that was pushed before the token. It is computed once. Where a token pops
// such an entry, the base row lists a *crossing*: the node of the trie whose byte pops it. fill()
// copies the base row and visits the descendants of the crossings with the request's stack.
//
// Thread-safe. All matchers of a grammar share the base rows. A base row is published once, with
// release order, and is neither changed nor given back to the RowPool while the grammar exists.
class AutomatonGrammar {
 public:
  // Limit of fill() that allows all legal tokens.
  static constexpr int32_t kNoLimit = INT32_MAX;

  // Throws std::runtime_error if the row pool belongs to another vocabulary.
  AutomatonGrammar(Machine machine, std::shared_ptr<const TokenTrie> trie,
                   std::shared_ptr<RowPool> pool);
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
    const int32_t* bits;
    // No allowed token leads to a larger distance, except for the costs of the stack before it.
    int32_t largest_distance;
    std::vector<Crossing> crossings;
  };
  class Writer;

  const BaseRow* base_row(int32_t state, StackNodes* stack) const noexcept;

  // Returned by find_text_successor() if text characters lead to several states.
  static constexpr int16_t kSeveral = -2;
  int16_t find_text_successor(int32_t state) const;
  int32_t find_common_text_successor(int32_t state) const;

  Machine machine_;
  std::shared_ptr<const TokenTrie> trie_;
  std::shared_ptr<RowPool> pool_;
  Distances distances_;
  // By state: the state after any character of a text token, kDead if all of these are illegal, or
  // kSeveral.
  std::vector<int16_t> text_successor_;
  // By state; null until computed.
  mutable std::vector<std::atomic<const BaseRow*>> rows_;
};

}  // namespace graft::guide
