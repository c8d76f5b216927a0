// Finite automata over bytes, for grammars that are regular languages.
//
// A grammar such as a regular expression, a list of choices or a JSON schema without recursion is
// lowered to an expression over characters. The expression is compiled to a deterministic automaton
// whose transitions read the bytes of UTF-8. The token bitmask depends only on the automaton's
// state, so it is computed once per state and then copied.
//
// Invariants
// 1. An automaton has at most AutomatonLimits::states states. Automaton::compile() throws for
//    larger automata and limits its own time and memory, so untrusted expressions are safe.
// 2. Every state can reach an accepting state. A text without a transition is therefore illegal
//    however it continues.
// 3. Automaton and TokenTrie are immutable after construction. All matchers of a grammar share the
//    mask rows. A row is published once, with release order, and is neither changed nor given back
//    to the RowPool while the grammar exists.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "matcher.h"

namespace graft::guide {

// Tries of the bytes of all token ids. The nodes of a trie are stored in depth-first order.
//
// Most tokens are plain: they consist of printable ASCII characters except for the quotation mark
// and the backslash. Within a JSON string, all plain tokens are legal. They have a trie of their
// own, because the mask row of a state inside a JSON string can then be computed without visiting
// them one by one.
class TokenTrie {
 public:
  static bool is_plain(uint8_t byte) {
    return byte >= 0x20 && byte < 0x7F && byte != '"' && byte != '\\';
  }

  struct Node {
    int32_t token;   // smallest id whose text ends here, or -1
    int32_t end;     // index of the first later node that is not a descendant
    uint16_t depth;  // number of bytes before this node's byte
    uint8_t byte;
  };

  // `lengths[i]` bytes of `bytes` belong to token i; tokens without bytes are never legal.
  TokenTrie(const std::vector<uint32_t>& lengths, std::string bytes, int32_t vocab_size);

  const std::vector<Node>& plain_nodes() const { return plain_nodes_; }
  const std::vector<Node>& other_nodes() const { return other_nodes_; }
  // Mask row that allows exactly the plain tokens.
  const std::vector<int32_t>& plain_row() const { return plain_row_; }
  int64_t words() const { return (int64_t{vocab_size_} + 31) / 32; }
  // Next id with the same bytes as `token`, or -1.
  int32_t next_equal(int32_t token) const { return next_equal_[static_cast<size_t>(token)]; }
  const char* text(int32_t token) const { return bytes_.data() + offsets_[size_t(token)]; }
  size_t length(int32_t token) const {
    return offsets_[size_t(token) + 1] - offsets_[size_t(token)];
  }
  int32_t num_tokens() const { return static_cast<int32_t>(next_equal_.size()); }

 private:
  std::string_view text_of(int32_t token) const { return {text(token), length(token)}; }
  // Returns the trie of `tokens`, which must be sorted by their bytes.
  std::vector<Node> make_nodes(const std::vector<int32_t>& tokens);

  int32_t vocab_size_;
  std::string bytes_;
  std::vector<size_t> offsets_;
  std::vector<int32_t> next_equal_;
  std::vector<Node> plain_nodes_;
  std::vector<Node> other_nodes_;
  std::vector<int32_t> plain_row_;
  size_t max_length_ = 0;
};

struct AutomatonLimits {
  int32_t states = 4096;
  int32_t nfa_states = 1 << 17;
};

// A deterministic automaton over bytes.
class Automaton {
 public:
  static constexpr int16_t kDead = -1;

  // Compiles an expression in postfix notation, see ProgramReader in automaton.cpp. Throws
  // std::runtime_error if the expression is malformed, std::length_error if it exceeds a limit, and
  // std::domain_error if it allows no text.
  static Automaton compile(const std::vector<int32_t>& program, const AutomatonLimits& limits);

  // Reads the result of serialize(). Throws std::runtime_error if the data is invalid.
  static Automaton deserialize(const std::string& data);
  std::string serialize() const;

  int32_t num_states() const { return static_cast<int32_t>(accepting_.size()); }
  int16_t next(int16_t state, uint8_t byte) const {
    return table_[static_cast<size_t>(state) * num_classes_ + classes_[byte]];
  }
  bool accepting(int16_t state) const { return accepting_[static_cast<size_t>(state)] != 0; }
  size_t nbytes() const { return table_.size() * sizeof(int16_t) + accepting_.size() + 256; }

  // Returns the state after a text, or kDead.
  int16_t walk(int16_t state, const char* text, size_t length) const {
    for (size_t i = 0; i < length && state != kDead; ++i) {
      state = next(state, static_cast<uint8_t>(text[i]));
    }
    return state;
  }

 private:
  friend class Determinizer;
  std::vector<uint8_t> classes_ = std::vector<uint8_t>(256);  // class of each byte
  size_t num_classes_ = 0;
  std::vector<int16_t> table_;  // [state][class]: next state or kDead; state 0 is the start
  std::vector<uint8_t> accepting_;
};

// Memory for the stored mask rows of all automata of a vocabulary. Thread-safe.
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

// An automaton for one vocabulary, with the token bitmasks of its states.
class AutomatonGrammar {
 public:
  AutomatonGrammar(Automaton automaton, std::shared_ptr<const TokenTrie> trie,
                   std::shared_ptr<RowPool> pool);
  ~AutomatonGrammar();
  AutomatonGrammar(const AutomatonGrammar&) = delete;
  AutomatonGrammar& operator=(const AutomatonGrammar&) = delete;

  const Automaton& automaton() const { return automaton_; }
  const TokenTrie& trie() const { return *trie_; }

  // Writes the mask row of a state. The row allows the legal tokens with text. Thread-safe.
  void fill(int16_t state, int32_t* row) const noexcept;

 private:
  void compute(int16_t state, int32_t* row) const noexcept;
  void add_legal(const std::vector<TokenTrie::Node>& nodes, int16_t state,
                 int32_t* row) const noexcept;

  Automaton automaton_;
  std::shared_ptr<const TokenTrie> trie_;
  std::shared_ptr<RowPool> pool_;
  // Mask rows by state; null until computed.
  mutable std::vector<std::atomic<const int32_t*>> rows_;
};

// State of one request in the grammar of an automaton.
class AutomatonMatcher final : public NativeMatcher {
 public:
  AutomatonMatcher(std::shared_ptr<const AutomatonGrammar> grammar, std::vector<int32_t> stop_ids);

  Outcome accept(int32_t token, ErrorText* error) noexcept override;
  Filled fill(int32_t* row, int64_t words, int32_t budget, ErrorText* error) noexcept override;
  Outcome rollback(int32_t tokens, ErrorText* error) noexcept override;
  Outcome is_terminated(ErrorText*) noexcept override {
    return terminated_ ? Outcome::kYes : Outcome::kNo;
  }

  const std::shared_ptr<const AutomatonGrammar>& grammar() const { return grammar_; }
  // State of the automaton after the accepted tokens. A stop token does not change it.
  int16_t state() const { return path_.back(); }

 private:
  bool is_stop(int32_t token) const noexcept;

  std::shared_ptr<const AutomatonGrammar> grammar_;
  std::vector<int32_t> stop_ids_;
  std::vector<int16_t> path_;  // the start state, then the state after each accepted token
  bool terminated_ = false;
};

}  // namespace graft::guide
