// Comparison of JSON values by their canonical forms.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace graft::guide {

// Returns the canonical form of a JSON value without white space around it. Two values have the
// same canonical form if and only if they are equal according to JSON Schema: numbers are compared
// by their exact values, strings by their characters, and objects without regard to the order of
// their members. If an object repeats a name, the last value counts.
std::string canonical(std::string_view text);

// Returns the canonical form of an array or object from the canonical forms of its parts. The names
// of the members are characters, not canonical forms.
std::string canonical_array(const std::vector<std::string>& items);
std::string canonical_object(std::vector<std::pair<std::string, std::string>> members);

// Returns the characters of a JSON string, given without its quotation marks, as UTF-8.
std::string characters(std::string_view text);

// Returns the index of the first byte after the JSON value that begins at `begin`. If the text ends
// within the value, the result is the size of the text.
size_t end_of_value(std::string_view text, size_t begin);

inline bool is_json_space(char byte) {
  return byte == ' ' || byte == '\t' || byte == '\n' || byte == '\r';
}

}  // namespace graft::guide
