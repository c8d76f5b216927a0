// Matcher that enforces uniqueItems on top of another matcher.
//
// Invariants
// 1. A token is legal if the other matcher allows it, if it repeats no item, and if the text can
//    still be completed without a repeated item. The distance is not known, and budgets are
//    ignored, because the shortest completion may repeat an item.
// 2. The other matcher has accepted the same tokens. It must not be used by other code.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "guide/automaton/token_trie.h"
#include "guide/matcher.h"
#include "guide/unique/item_text.h"
#include "guide/unique/json_value.h"
#include "hostwork/gate.h"

namespace nb = nanobind;

namespace graft::guide {
namespace {

constexpr size_t kTokens = 4096;

// Mask rows of the tokens that are not safe, for each value of ItemText::Safe. Immutable, and
// shared by the grammars of a vocabulary.
class TokenKinds {
 public:
  explicit TokenKinds(std::shared_ptr<const TokenTrie> trie) : trie_(std::move(trie)) {
    for (std::vector<uint32_t>& row : unsafe_) row.assign(static_cast<size_t>(trie_->words()), 0);
    for (int32_t token = 0; token < trie_->num_tokens(); ++token) {
      const std::string_view text = trie_->text(token);
      const bool has_quote = text.find('"') != std::string_view::npos;
      const bool has_bracket = text.find_first_of("[]{}") != std::string_view::npos;
      const bool is_number = text.find_first_not_of("0123456789.+-eE") == std::string_view::npos;
      const auto add = [&](ItemText::Safe safe, bool is_unsafe) {
        if (is_unsafe) row_of(safe)[static_cast<size_t>(token >> 5)] |= 1u << (token & 31);
      };
      add(ItemText::Safe::kNone, true);
      add(ItemText::Safe::kWithoutBracket, has_bracket);
      add(ItemText::Safe::kWithoutQuote, has_quote);
      add(ItemText::Safe::kWithoutBoth, has_bracket && has_quote);
      add(ItemText::Safe::kNumber, !is_number);
      add(ItemText::Safe::kFirstText, !begins_scalar(text));
      const size_t array = text.find('[');
      if (array != std::string_view::npos && text.find(',', array) != std::string_view::npos) {
        several_items_.push_back(token);
      }
    }
  }

  const TokenTrie& trie() const { return *trie_; }
  // Row of the tokens that are not safe.
  const std::vector<uint32_t>& unsafe(ItemText::Safe safe) const {
    return unsafe_[static_cast<size_t>(safe)];
  }
  // Tokens that may contain several items of an array which begins within the token.
  const std::vector<int32_t>& several_items() const { return several_items_; }

 private:
  static constexpr size_t kKinds = static_cast<size_t>(ItemText::Safe::kFirstText) + 1;

  std::vector<uint32_t>& row_of(ItemText::Safe safe) { return unsafe_[static_cast<size_t>(safe)]; }

  // Whether a token consists of separators and either the beginning of a string or a number whose
  // first digit is not 0.
  static bool begins_scalar(std::string_view text) {
    const size_t begin = text.find_first_not_of(" \t\n\r,");
    if (begin == std::string_view::npos) return true;
    text.remove_prefix(begin);
    if (text[0] == '"') return text.find('"', 1) == std::string_view::npos;
    return text[0] >= '1' && text[0] <= '9' &&
           text.find_first_not_of("0123456789.+-eE") == std::string_view::npos;
  }

  std::shared_ptr<const TokenTrie> trie_;
  std::array<std::vector<uint32_t>, kKinds> unsafe_;
  std::vector<int32_t> several_items_;
};

class UniqueMatcher final : public NativeMatcher {
 public:
  UniqueMatcher(NativeMatcher* inner, std::shared_ptr<const Shapes> shapes,
                std::shared_ptr<const TokenKinds> kinds)
      : inner_(*inner), shapes_(std::move(shapes)), kinds_(std::move(kinds)), text_(*shapes_) {
    path_.reserve(kTokens);
  }

  Outcome accept(int32_t token, ErrorText* error) noexcept override {
    const Outcome outcome = inner_.accept(token, error);
    if (outcome != Outcome::kYes) return outcome;
    const ItemText::Mark before = text_.mark();
    try {
      const Outcome ended = inner_.is_terminated(error);
      if (ended == Outcome::kFailed) return ended;
      if (ended == Outcome::kYes || (text_.read(text_of(token)) && text_.can_complete())) {
        path_.push_back(before);
        return Outcome::kYes;
      }
      text_.restore(before);
      return inner_.rollback(1, error) == Outcome::kFailed ? Outcome::kFailed : Outcome::kNo;
    } catch (const std::exception& failure) {
      error->keep(failure.what());
      return Outcome::kFailed;
    }
  }

  Filled fill(int32_t* row, int64_t words, int32_t, ErrorText* error) noexcept override {
    const Filled filled = inner_.fill(row, words, kNoBudget, error);
    if (filled == Filled::kFailed || filled == Filled::kFree) return filled;
    if (words != kinds_->trie().words()) {
      error->keep("the mask row has another width than the vocabulary");
      return Filled::kFailed;
    }
    try {
      remove_repetitions(row, words);
      return Filled::kMask;
    } catch (const std::exception& failure) {
      error->keep(failure.what());
      return Filled::kFailed;
    }
  }

  Outcome rollback(int32_t tokens, ErrorText* error) noexcept override {
    if (tokens < 0 || static_cast<size_t>(tokens) > path_.size()) {
      error->keep("rollback: more tokens than were accepted");
      return Outcome::kFailed;
    }
    const Outcome outcome = inner_.rollback(tokens, error);
    if (outcome == Outcome::kFailed || tokens == 0) return outcome;
    text_.restore(path_[path_.size() - static_cast<size_t>(tokens)]);
    path_.resize(path_.size() - static_cast<size_t>(tokens));
    return outcome;
  }

  Outcome is_terminated(ErrorText* error) noexcept override { return inner_.is_terminated(error); }

 private:
  std::string_view text_of(int32_t token) const {
    const TokenTrie& trie = kinds_->trie();
    return token < trie.num_tokens() ? trie.text(token) : std::string_view();
  }

  bool is_allowed(int32_t token) {
    const ItemText::Mark mark = text_.mark();
    const bool allowed = text_.read(text_of(token)) && text_.can_complete();
    text_.restore(mark);
    return allowed;
  }

  void remove_repetitions(int32_t* row, int64_t words) {
    if (!text_.is_inside()) {
      for (const int32_t token : kinds_->several_items()) {
        const auto bit = static_cast<int32_t>(1u << (token & 31));
        if ((row[token >> 5] & bit) != 0 && !is_allowed(token)) row[token >> 5] &= ~bit;
      }
      return;
    }
    const uint32_t* unsafe = kinds_->unsafe(text_.safe_tokens()).data();
    for (int64_t i = 0; i < words; ++i) {
      for (uint32_t bits = static_cast<uint32_t>(row[i]) & unsafe[i]; bits != 0; bits &= bits - 1) {
        const int bit = __builtin_ctz(bits);
        if (!is_allowed(static_cast<int32_t>(32 * i) + bit)) {
          row[i] &= ~static_cast<int32_t>(1u << bit);
        }
      }
    }
  }

  NativeMatcher& inner_;
  std::shared_ptr<const Shapes> shapes_;
  std::shared_ptr<const TokenKinds> kinds_;
  ItemText text_;
  std::vector<ItemText::Mark> path_;  // before each accepted token
};

using NameTuple = std::tuple<nb::bytes, int32_t, uint64_t, uint64_t>;
using PatternTuple = std::tuple<int32_t, int32_t>;
// The fields of graft.grammar.automaton.unique_items.Shape.
using ShapeTuple =
    std::tuple<bool, int32_t, bool, bool, bool, int32_t, std::vector<int32_t>, int32_t, int32_t,
               bool, bool, int32_t, std::vector<NameTuple>, std::vector<PatternTuple>, int32_t>;

Shape shape_of(const ShapeTuple& tuple) {
  Shape shape;
  std::vector<NameTuple> names;
  std::vector<PatternTuple> patterns;
  std::tie(shape.counted, shape.scalars, shape.has_arrays, shape.unique, shape.open_arrays,
           shape.items, shape.prefix, shape.low, shape.high, shape.has_objects, shape.open_objects,
           shape.alternatives, names, patterns, shape.additional) = tuple;
  for (const auto& [name, child, allowed, required] : names) {
    shape.names.push_back({{name.c_str(), name.size()}, child, allowed, required});
  }
  for (const auto& [set, child] : patterns) shape.patterns.push_back({set, child});
  return shape;
}

}  // namespace

void bind_unique(nb::module_& guide) {
  using Release = nb::call_guard<graft::hostwork::GilRelease>;
  nb::class_<Shapes>(guide, "Shapes")
      .def(
          "__init__",
          [](Shapes* self, const std::vector<ShapeTuple>& tuples,
             const std::vector<nb::bytes>& automata, bool any_order) {
            std::vector<Shape> shapes;
            for (const ShapeTuple& tuple : tuples) shapes.push_back(shape_of(tuple));
            std::vector<std::string> data;
            for (const nb::bytes& bytes : automata) data.emplace_back(bytes.c_str(), bytes.size());
            const graft::hostwork::GilRelease release;
            std::vector<ScalarSet> scalars;
            for (const std::string& one : data) scalars.emplace_back(Machine::deserialize(one));
            new (self) Shapes(std::move(shapes), std::move(scalars), any_order);
          },
          nb::arg("shapes"), nb::arg("automata"), nb::arg("any_order"))
      .def_prop_ro("nbytes", &Shapes::nbytes);
  nb::class_<TokenKinds>(guide, "TokenKinds")
      .def(nb::init<std::shared_ptr<const TokenTrie>>(), nb::arg("trie"), Release());
  nb::class_<UniqueMatcher, NativeMatcher>(guide, "UniqueMatcher")
      .def(nb::init<NativeMatcher*, std::shared_ptr<const Shapes>,
                    std::shared_ptr<const TokenKinds>>(),
           nb::arg("inner"), nb::arg("shapes"), nb::arg("kinds"), nb::keep_alive<1, 2>(),
           Release());
  guide.def("count_scalars", [](const nb::bytes& automaton) {
    return ScalarSet(Machine::deserialize({automaton.c_str(), automaton.size()})).count(0);
  });
  guide.def("canonical_json", [](const std::string& text) {
    const std::string form = canonical(text);
    return nb::bytes(form.data(), form.size());
  });
}

}  // namespace graft::guide
