// Sets of strings, numbers, booleans and null.
#pragma once

#include <cstdint>
#include <vector>

#include "guide/automaton/machine.h"

namespace graft::guide {

// Greatest count of values: greater counts, also infinite ones, are stored as kMany. No array has
// as many items.
constexpr int32_t kMany = 1 << 30;

// The JSON texts of a set of scalars: strings, numbers, booleans and null.
//
// Counts are lower bounds of the number of *different values* among the texts that continue a
// prefix. Each state can reach the end of a text, so they are at least 1.
class ScalarSet {
 public:
  // Throws std::domain_error if infinitely many texts continue a prefix, but have only finitely
  // many values. This is allowed for prefixes that end within the exponent of a number.
  explicit ScalarSet(Machine machine);

  const Machine& machine() const { return machine_; }
  // Returns the count of a prefix that leads to `state`. The prefix must not end in an exponent.
  int32_t count(int32_t state) const { return counts_[at(state)]; }
  // Whether infinitely many exponents continue a prefix that ends in an exponent.
  bool has_many_exponents(int32_t state) const { return many_exponents_[at(state)] != 0; }
  // Whether kMany values remain possible however a string or number continues, before the quotation
  // mark at the end of a string. For a number, this is true only if it has a digit other than 0.
  bool stays_many(int32_t state) const { return stays_many_[at(state)] != 0; }

 private:
  class Analysis;

  Machine machine_;
  std::vector<int32_t> counts_;
  std::vector<uint8_t> many_exponents_;
  std::vector<uint8_t> stays_many_;
};

}  // namespace graft::guide
