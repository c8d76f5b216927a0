// Stress test of automata: random rules, damaged programs, damaged serialized data, and threads
// that share a grammar.
//
//   stress_automaton SEED COUNT
//
// Each case compiles random rules, in two of three cases to a machine that counts repetitions where
// it can. Such a machine must allow the same tokens as the machine that does not count. Several
// threads then run matchers over random tokens: the row of a matcher must allow exactly the tokens
// that the matcher accepts. The program prints how many grammars were compiled, how many of them
// count, and how many damaged ones were refused and loaded.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "guide/automaton/automaton_matcher.h"

namespace {

using graft::guide::AutomatonGrammar;
using graft::guide::AutomatonMatcher;
using graft::guide::ErrorText;
using graft::guide::Machine;
using graft::guide::Outcome;
using graft::guide::RowMemory;
using graft::guide::Rule;
using graft::guide::TokenTrie;
using Random = std::mt19937;

constexpr int32_t kStop = 0;
constexpr int kThreads = 3;
const std::string kAlphabet = "ab,[]{}\"";

int below(Random* random, int limit) { return static_cast<int>((*random)() % unsigned(limit)); }

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::abort();
}

std::shared_ptr<const TokenTrie> make_trie() {
  Random random(1);
  std::vector<uint32_t> lengths = {0};
  std::string bytes;
  for (int byte = 0; byte < 256; ++byte) {
    bytes.push_back(static_cast<char>(byte));
    lengths.push_back(1);
  }
  for (int i = 0; i < 200; ++i) {
    const int length = 2 + below(&random, 6);
    for (int k = 0; k < length; ++k) bytes.push_back(kAlphabet[size_t(below(&random, 8))]);
    lengths.push_back(static_cast<uint32_t>(length));
  }
  return std::make_shared<TokenTrie>(lengths, bytes, static_cast<int32_t>(lengths.size()) + 9);
}

// Returns the program of a random expression of about `size` operations.
std::vector<int32_t> random_program(Random* random, int size, int num_rules) {
  std::vector<int32_t> program;
  int depth = 0;  // number of expressions on the stack
  bool has_call = false;
  for (int i = 0; i < size || depth != 1; ++i) {
    const int kind = i < size ? below(random, 9) : 2;
    if (depth < 2 || kind == 0 || kind == 1) {
      ++depth;
      if (num_rules > 1 && below(random, 3) == 0) {
        program.insert(program.end(), {5, 1 + below(random, num_rules - 1)});
        has_call = true;
      } else if (below(random, 4) == 0) {
        program.insert(program.end(), {1, 2, 'a', 'b', 0x20, 0x10FFFF});
      } else {
        const int character = kAlphabet[size_t(below(random, 3))];
        program.insert(program.end(), {1, 1, character, character});
      }
      if (program[program.size() - 2] != 5 && below(random, 3) == 0) {
        program.insert(program.end(), {4, below(random, 3), 3 + below(random, 9)});
      }
    } else if (kind == 4) {
      const int min = below(random, 3);
      program.insert(program.end(), {4, min, below(random, 2) == 0 ? -1 : min + below(random, 3)});
    } else if (kind == 6) {
      const int items = below(random, depth);
      const bool has_flags = below(random, 2) == 0;
      program.insert(program.end(), {has_flags ? 10 : 6, items});
      for (int k = 0; k < items; ++k) {
        program.insert(program.end(), {below(random, 2), below(random, 2) == 0 ? -1 : 1});
        if (has_flags) program.push_back(below(random, 2));
      }
      depth -= items;
    } else if (kind >= 7 && !has_call) {
      program.push_back(kind);
      --depth;
    } else {
      const int count = 1 + below(random, depth);
      program.insert(program.end(), {kind % 2 == 0 ? 2 : 3, count});
      depth -= count - 1;
    }
  }
  return program;
}

std::vector<Rule> random_rules(Random* random) {
  const int count = 1 + below(random, 4);
  std::vector<Rule> rules;
  for (int i = 0; i < count; ++i) {
    const bool square = below(random, 2) == 0;
    rules.push_back({static_cast<uint8_t>(square ? '[' : '{'),
                     static_cast<uint8_t>(square ? ']' : '}'),
                     random_program(random, 2 + below(random, 12), count)});
  }
  if (below(random, 4) == 0) {
    std::vector<int32_t>& program = rules[size_t(below(random, count))].program;
    program[size_t(below(random, int(program.size())))] += below(random, 9) - 4;
  }
  return rules;
}

// Runs a matcher over random tokens. `exact`: the automaton is not damaged.
void walk(const std::shared_ptr<const AutomatonGrammar>& grammar, unsigned seed, bool exact) {
  Random random(seed);
  AutomatonMatcher matcher(grammar, {kStop});
  const TokenTrie& trie = grammar->trie();
  std::vector<int32_t> row(static_cast<size_t>(trie.words()));
  ErrorText error;
  int accepted = 0;
  for (int step = 0; step < 40; ++step) {
    if (matcher.is_terminated(&error) == Outcome::kYes) break;
    const int32_t distance = matcher.distance(&error);
    const int32_t budget = below(&random, 3) > 0 ? graft::guide::kNoBudget : below(&random, 20);
    matcher.fill(row.data(), trie.words(), budget, &error);
    std::vector<int32_t> legal;
    for (int32_t token = 0; token < trie.num_tokens(); ++token) {
      const bool allowed = (row[size_t(token >> 5)] >> (token & 31) & 1) != 0;
      if (allowed) legal.push_back(token);
      if (!exact || below(&random, 8) > 0) continue;
      const bool accepts = matcher.accept(token, &error) == Outcome::kYes;
      const int32_t after = matcher.distance(&error);
      const bool fits =
          budget == graft::guide::kNoBudget || distance < 0 || (0 <= after && after <= budget - 1);
      require(allowed == (accepts && fits), "row and matcher agree");
      if (accepts) matcher.rollback(1, &error);
    }
    if (legal.empty() || below(&random, 6) == 0) {
      const int back = below(&random, accepted + 1);
      require(matcher.rollback(back, &error) == Outcome::kYes, "rollback");
      accepted -= back;
    } else {
      const int32_t token = legal[size_t(below(&random, int(legal.size())))];
      const bool accepts = matcher.accept(token, &error) == Outcome::kYes;
      require(accepts || !exact, "a legal token is accepted");
      accepted += accepts ? 1 : 0;
    }
  }
}

// Requires that two matchers allow the same tokens after the same random tokens.
void compare(Machine first, Machine second, const std::shared_ptr<const TokenTrie>& trie,
             unsigned seed) {
  Random random(seed);
  const auto memory = std::make_shared<RowMemory>(1 << 20);
  AutomatonMatcher matcher(std::make_shared<AutomatonGrammar>(std::move(first), trie, memory),
                           {kStop});
  AutomatonMatcher other(std::make_shared<AutomatonGrammar>(std::move(second), trie, memory),
                         {kStop});
  std::vector<int32_t> row(static_cast<size_t>(trie->words()));
  std::vector<int32_t> expected = row;
  ErrorText error;
  for (int step = 0; step < 60; ++step) {
    matcher.fill(row.data(), trie->words(), graft::guide::kNoBudget, &error);
    other.fill(expected.data(), trie->words(), graft::guide::kNoBudget, &error);
    require(row == expected, "the machine that counts allows the same tokens");
    std::vector<int32_t> legal;
    for (int32_t token = 0; token < trie->num_tokens(); ++token) {
      if (token != kStop && (row[size_t(token >> 5)] >> (token & 31) & 1) != 0) {
        legal.push_back(token);
      }
    }
    if (legal.empty()) break;
    const int32_t token = legal[size_t(below(&random, int(legal.size())))];
    matcher.accept(token, &error);
    other.accept(token, &error);
  }
}

void share(Machine machine, const std::shared_ptr<const TokenTrie>& trie, unsigned seed,
           bool exact) {
  const auto memory = std::make_shared<RowMemory>(trie->words() * 4 * (seed % 40));
  const auto grammar = std::make_shared<AutomatonGrammar>(std::move(machine), trie, memory);
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] { walk(grammar, seed + i / 2, exact); });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const auto trie = make_trie();
  int compiled = 0;
  int counting = 0;
  int refused = 0;
  int loaded = 0;
  for (int i = 0; i < std::atoi(argv[2]); ++i) {
    const auto seed = static_cast<unsigned>(std::atoi(argv[1]) + i);
    Random random(seed);
    std::string data;
    try {
      const std::vector<Rule> rules = random_rules(&random);
      const int max_unrolled = below(&random, 3) == 0 ? Machine::kMaxUnrolled : below(&random, 4);
      const Machine machine = Machine::compile(rules, 2000, max_unrolled);
      data = machine.serialize();
      if (!machine.counts().empty()) {
        ++counting;
        const Machine other = Machine::compile(rules, 2000, INT32_MAX);
        compare(Machine::deserialize(data), Machine::deserialize(other.serialize()), trie, seed);
      }
    } catch (
        const std::exception&) {  // malformed, too large, without a text, or ambiguous brackets
      continue;
    }
    ++compiled;
    share(Machine::deserialize(data), trie, seed, true);
    for (int k = 0; k < 20; ++k) {
      std::string damaged = data;
      const int changes = 1 + below(&random, 3);
      for (int c = 0; c < changes; ++c) {
        const int size =
            below(&random, 2) == 0 ? std::min<int>(60, int(data.size())) : int(data.size());
        damaged[size_t(below(&random, size))] =
            static_cast<char>(below(&random, 4) == 0 ? below(&random, 256) : below(&random, 6));
      }
      if (below(&random, 9) == 0) damaged.resize(size_t(below(&random, int(data.size()))));
      try {
        Machine machine = Machine::deserialize(damaged);
        share(std::move(machine), trie, seed, false);
        ++loaded;
      } catch (const std::runtime_error&) {
        ++refused;
      }
    }
  }
  std::printf("%d compiled, %d counting, %d refused, %d loaded\n", compiled, counting, refused,
              loaded);
}
