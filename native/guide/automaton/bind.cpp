// Python classes of machines.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <initializer_list>
#include <set>
#include <tuple>
#include <utility>

#include "guide/automaton/automaton_matcher.h"
#include "guide/automaton/nfa.h"
#include "hostwork/gate.h"

namespace nb = nanobind;

namespace graft::guide {
namespace {

// Returns a NumPy array with a copy of the data. `Item` may consist of several scalars.
template <typename Scalar, typename Item>
nb::object to_numpy(const std::vector<Item>& items, std::initializer_list<size_t> shape) {
  auto* copy = new std::vector<Item>(items);
  const nb::capsule owner(
      copy, [](void* data) noexcept { delete static_cast<std::vector<Item>*>(data); });
  return nb::cast(nb::ndarray<nb::numpy, Scalar>(copy->data(), shape, owner));
}

nb::dict table(const AutomatonGrammar& grammar) {
  const Machine& machine = grammar.machine();
  const auto states = at(machine.num_states());
  nb::dict out;
  out["classes"] = to_numpy<uint8_t>(machine.classes(), {256});
  out["next"] = to_numpy<int16_t>(machine.table(), {states, at(machine.num_classes())});
  out["actions"] = to_numpy<int16_t>(machine.actions(), {machine.actions().size(), 2});
  out["returns_begin"] =
      to_numpy<int32_t>(machine.returns_begin(), {at(machine.num_entries()) + 1});
  out["returns"] = to_numpy<int16_t>(machine.returns(), {machine.returns().size(), 2});
  std::vector<int32_t> counts;
  for (const Machine::Count& count : machine.counts()) {
    counts.insert(counts.end(), {count.limit, count.below, count.reached});
  }
  out["counts"] = to_numpy<int32_t>(counts, {machine.counts().size(), 3});
  out["limits"] = to_numpy<int32_t>(machine.limits(), {machine.limits().size()});
  out["accepting"] = to_numpy<uint8_t>(machine.accepting(), {states});
  out["distance"] = to_numpy<int32_t>(grammar.distances().states(), {states});
  out["cost"] = to_numpy<int32_t>(grammar.distances().entries(), {at(machine.num_entries())});
  return out;
}

using RuleTuple = std::tuple<int32_t, int32_t, std::vector<int32_t>>;

nb::bytes compile_automaton(const std::vector<RuleTuple>& tuples, int32_t max_states,
                            int32_t max_unrolled) {
  std::string data;
  {
    const graft::hostwork::GilRelease release;
    std::vector<Rule> rules;
    for (const auto& [open, close, program] : tuples) {
      if (open < 0 || open > 255 || close < 0 || close > 255) {
        throw std::runtime_error("automaton: an opening or closing byte is out of range");
      }
      rules.push_back({static_cast<uint8_t>(open), static_cast<uint8_t>(close), program});
    }
    data = Machine::compile(rules, max_states, max_unrolled).serialize();
  }
  return nb::bytes(data.data(), data.size());
}

// Machine of one expression without calls. `work` limits the total work for several patterns.
class Pattern {
 public:
  Pattern(const std::vector<int32_t>& program, int32_t max_states, Work* work) {
    const Nfa nfa({Rule{0, 0, program}}, Machine::kMaxNfaStates, /*max_unrolled=*/INT32_MAX, work);
    if (nfa.states[at(nfa.rules[0].start)].live) {
      machine_ = Machine::determinize(nfa, max_states, work);
      machine_.build_table();
    }
  }

  // Whether the expression matches no text.
  bool is_empty() const { return machine_.num_states() == 0; }

  bool matches(const nb::bytes& text) const {
    int32_t state = is_empty() ? Machine::kDead : 0;
    for (size_t i = 0; i < text.size() && state >= 0; ++i) {
      state = machine_.next(state, static_cast<uint8_t>(text.c_str()[i]));
    }
    return state >= 0 && machine_.accepting(state);
  }

  // Whether a text matches both patterns. The function searches the pairs of states that a text
  // leads to.
  bool has_common_text(const Pattern& other, Work* work) const {
    if (is_empty() || other.is_empty()) return false;
    std::set<std::pair<int32_t, int32_t>> found = {{0, 0}};
    std::vector<std::pair<int32_t, int32_t>> pending = {{0, 0}};
    while (!pending.empty()) {
      const auto [one, two] = pending.back();
      pending.pop_back();
      if (machine_.accepting(one) && other.machine_.accepting(two)) return true;
      work->count(64);
      for (size_t byte = 0; byte < 256; ++byte) {
        if (byte > 0 && machine_.classes()[byte] == machine_.classes()[byte - 1] &&
            other.machine_.classes()[byte] == other.machine_.classes()[byte - 1]) {
          continue;
        }
        const int32_t next = machine_.next(one, static_cast<uint8_t>(byte));
        const int32_t other_next = other.machine_.next(two, static_cast<uint8_t>(byte));
        if (next < 0 || other_next < 0) continue;
        if (found.emplace(next, other_next).second) pending.emplace_back(next, other_next);
      }
    }
    return false;
  }

 private:
  Machine machine_;
};

}  // namespace

void bind_automaton(nb::module_& guide) {
  using Release = nb::call_guard<graft::hostwork::GilRelease>;
  nb::class_<TokenTrie>(guide, "TokenTrie")
      .def(
          "__init__",
          [](TokenTrie* self, const std::vector<uint32_t>& lengths, const nb::bytes& bytes,
             int32_t vocab_size) {
            std::string text(bytes.c_str(), bytes.size());
            const graft::hostwork::GilRelease release;
            new (self) TokenTrie(lengths, std::move(text), vocab_size);
          },
          nb::arg("lengths"), nb::arg("bytes"), nb::arg("vocab_size"));
  nb::class_<RowMemory>(guide, "RowMemory")
      .def(nb::init<int64_t>(), nb::arg("bytes"))
      .def_prop_ro("bytes_in_use", &RowMemory::bytes_in_use);
  guide.def("compile_automaton", &compile_automaton, nb::arg("rules"), nb::arg("max_states"),
            nb::arg("max_unrolled") = Machine::kMaxUnrolled);
  nb::class_<Work>(guide, "Work").def(nb::init<int64_t>(), nb::arg("max_steps") = Work::kMaxSteps);
  nb::class_<Pattern>(guide, "Pattern")
      .def(nb::init<const std::vector<int32_t>&, int32_t, Work*>(), nb::arg("program"),
           nb::arg("max_states"), nb::arg("work"), Release())
      .def("is_empty", &Pattern::is_empty)
      .def("matches", &Pattern::matches, nb::arg("text"))
      .def("has_common_text", &Pattern::has_common_text, nb::arg("other"), nb::arg("work"),
           Release());
  nb::class_<AutomatonGrammar>(guide, "AutomatonGrammar")
      .def(
          "__init__",
          [](AutomatonGrammar* self, const nb::bytes& data, std::shared_ptr<const TokenTrie> trie,
             std::shared_ptr<RowMemory> memory) {
            const std::string text(data.c_str(), data.size());
            const graft::hostwork::GilRelease release;
            new (self)
                AutomatonGrammar(Machine::deserialize(text), std::move(trie), std::move(memory));
          },
          nb::arg("data"), nb::arg("trie"), nb::arg("memory"))
      .def_prop_ro("num_states",
                   [](const AutomatonGrammar& grammar) { return grammar.machine().num_states(); })
      .def_prop_ro("nbytes", &AutomatonGrammar::nbytes)
      .def("table", &table);
  nb::class_<AutomatonMatcher, NativeMatcher>(guide, "AutomatonMatcher")
      .def(nb::init<std::shared_ptr<const AutomatonGrammar>, std::vector<int32_t>>(),
           nb::arg("grammar"), nb::arg("stop_ids"), Release())
      .def_prop_ro("grammar",
                   [](const AutomatonMatcher& matcher) {
                     // The cast is safe, because the Python class cannot change a grammar.
                     return std::const_pointer_cast<AutomatonGrammar>(matcher.grammar());
                   })
      .def_prop_ro("state", &AutomatonMatcher::state)
      .def_prop_ro("count", &AutomatonMatcher::count)
      .def_prop_ro("names_stop", &AutomatonMatcher::names_stop)
      .def_prop_ro("stack", &AutomatonMatcher::stack);
}

}  // namespace graft::guide
