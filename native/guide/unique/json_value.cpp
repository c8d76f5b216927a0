// Comparison of JSON values by their canonical forms.
#include "guide/unique/json_value.h"

#include <algorithm>
#include <cstdint>

namespace graft::guide {
namespace {

bool is_digit(char byte) { return byte >= '0' && byte <= '9'; }

void append_utf8(uint32_t code, std::string* out) {
  const auto add = [out](uint32_t byte) { out->push_back(static_cast<char>(byte)); };
  if (code < 0x80) {
    add(code);
  } else if (code < 0x800) {
    add(0xC0 | code >> 6);
    add(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    add(0xE0 | code >> 12);
    add(0x80 | (code >> 6 & 0x3F));
    add(0x80 | (code & 0x3F));
  } else {
    add(0xF0 | code >> 18);
    add(0x80 | (code >> 12 & 0x3F));
    add(0x80 | (code >> 6 & 0x3F));
    add(0x80 | (code & 0x3F));
  }
}

// Returns the number that four hexadecimal digits mean. Missing digits count as 0.
uint32_t hexadecimal(std::string_view digits) {
  uint32_t value = 0;
  for (size_t i = 0; i < 4; ++i) {
    const char c = i < digits.size() ? digits[i] : '0';
    const int digit = is_digit(c) ? c - '0' : (c | 0x20) - 'a' + 10;
    value = value << 4 | static_cast<uint32_t>(digit & 15);
  }
  return value;
}

// Returns a decimal integer plus `small`. `digits` has no zeros at its beginning, and |small| has
// at most ten digits.
std::string add_to_integer(std::string digits, bool negative, int64_t small) {
  if (digits.size() <= 17) {
    const int64_t value = digits.empty() ? 0 : std::stoll(digits);
    return std::to_string((negative ? -value : value) + small);
  }
  // The sum has the sign of the first number. Digits are added from the last one to the first.
  int64_t carry = negative ? -small : small;
  for (size_t i = digits.size(); i-- > 0 && carry != 0;) {
    const int64_t sum = digits[i] - '0' + carry;
    carry = sum >= 0 ? sum / 10 : -((9 - sum) / 10);
    digits[i] = static_cast<char>('0' + (sum - 10 * carry));
  }
  if (carry > 0) digits.insert(0, std::to_string(carry));
  digits.erase(0, digits.find_first_not_of('0'));
  return (negative ? "-" : "") + digits;
}

// The number is 0.d1d2d3... times a power of ten, where d1 and the last digit are not 0.
std::string canonical_number(std::string_view text) {
  size_t i = 0;
  const bool negative = i < text.size() && text[i] == '-';
  if (negative) ++i;
  std::string digits;
  int64_t point = 0;  // number of digits before the decimal point
  bool after_point = false;
  for (; i < text.size() && (is_digit(text[i]) || text[i] == '.'); ++i) {
    if (text[i] == '.') {
      after_point = true;
    } else {
      digits.push_back(text[i]);
      if (!after_point) ++point;
    }
  }
  const size_t first = digits.find_first_not_of('0');
  if (first == std::string::npos) return "0";
  point -= static_cast<int64_t>(first);
  digits = digits.substr(first, digits.find_last_not_of('0') + 1 - first);
  std::string exponent;
  bool negative_exponent = false;
  if (i < text.size()) {  // e or E
    ++i;
    if (i < text.size() && (text[i] == '+' || text[i] == '-')) negative_exponent = text[i++] == '-';
    exponent = text.substr(i);
    exponent.erase(0, std::min(exponent.find_first_not_of('0'), exponent.size()));
  }
  return (negative ? "-" : "+") + digits + "e" + add_to_integer(exponent, negative_exponent, point);
}

// Appends a part of a canonical form, after the length of the part, which makes the form
// unambiguous.
void append_part(std::string_view part, std::string* out) {
  out->append(std::to_string(part.size()));
  out->push_back(':');
  out->append(part);
}

std::string canonical_scalar(std::string_view text) {
  if (text.empty()) return {};
  if (text[0] == '"') return "\"" + characters(text.substr(1, text.size() - 2));
  if (text[0] == '-' || is_digit(text[0])) return canonical_number(text);
  return std::string(text);
}

// Returns the index after the string whose opening quotation mark is at `begin`.
size_t end_of_string(std::string_view text, size_t begin) {
  size_t i = begin + 1;
  while (i < text.size() && text[i] != '"') i += text[i] == '\\' ? 2 : 1;
  return std::min(i + 1, text.size());
}

// Returns the index after the string, number or literal that begins at `begin`.
size_t end_of_scalar(std::string_view text, size_t begin) {
  if (text[begin] == '"') return end_of_string(text, begin);
  constexpr std::string_view kEnds = " \t\n\r,]}:";
  return std::min(text.find_first_of(kEnds, begin), text.size());
}

// An array or object of which some parts have been read.
struct Container {
  bool is_object;
  std::vector<std::string> items;
  std::vector<std::pair<std::string, std::string>> members;  // the last value may be missing
  bool has_name = false;
};

}  // namespace

std::string characters(std::string_view text) {
  if (text.find('\\') == std::string_view::npos) return std::string(text);
  std::string out;
  for (size_t i = 0; i < text.size();) {
    if (text[i] != '\\' || i + 1 >= text.size()) {
      out.push_back(text[i++]);
      continue;
    }
    const char letter = text[i + 1];
    i += 2;
    if (letter != 'u') {
      constexpr std::string_view kLetters = "bfnrt", kMeanings = "\b\f\n\r\t";
      const size_t index = kLetters.find(letter);
      out.push_back(index == std::string_view::npos ? letter : kMeanings[index]);
      continue;
    }
    uint32_t code = hexadecimal(text.substr(i));
    i = std::min(i + 4, text.size());
    if (code >= 0xD800 && code < 0xDC00 && text.substr(i, 2) == "\\u") {
      const uint32_t low = hexadecimal(text.substr(i + 2));
      if (low >= 0xDC00 && low < 0xE000) {
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
        i = std::min(i + 6, text.size());
      }
    }
    append_utf8(code, &out);
  }
  return out;
}

std::string canonical_array(const std::vector<std::string>& items) {
  std::string out = "[";
  for (const std::string& item : items) append_part(item, &out);
  return out;
}

std::string canonical_object(std::vector<std::pair<std::string, std::string>> members) {
  std::stable_sort(members.begin(), members.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  std::string out = "{";
  for (size_t i = 0; i < members.size(); ++i) {
    if (i + 1 < members.size() && members[i + 1].first == members[i].first) continue;
    append_part(members[i].first, &out);
    append_part(members[i].second, &out);
  }
  return out;
}

// Texts may be nested deeply, so the function does not call itself.
std::string canonical(std::string_view text) {
  if (!text.empty() && text[0] != '[' && text[0] != '{') return canonical_scalar(text);
  std::vector<Container> open;
  for (size_t i = 0; i < text.size();) {
    const char byte = text[i];
    std::string value;
    if (byte == '[' || byte == '{') {
      open.push_back({byte == '{', {}, {}});
      ++i;
      continue;
    }
    if (byte == ']' || byte == '}') {
      Container& done = open.back();
      value =
          done.is_object ? canonical_object(std::move(done.members)) : canonical_array(done.items);
      open.pop_back();
      ++i;
    } else if (byte == ',' || byte == ':' || is_json_space(byte)) {
      ++i;
      continue;
    } else {
      const size_t end = end_of_scalar(text, i);
      const std::string_view scalar = text.substr(i, end - i);
      i = end;
      if (!open.empty() && open.back().is_object && !open.back().has_name) {
        open.back().members.emplace_back(characters(scalar.substr(1, scalar.size() - 2)), "");
        open.back().has_name = true;
        continue;
      }
      value = canonical_scalar(scalar);
    }
    if (open.empty()) return value;
    Container& parent = open.back();
    if (parent.is_object) {
      parent.members.back().second = std::move(value);
      parent.has_name = false;
    } else {
      parent.items.push_back(std::move(value));
    }
  }
  return {};
}

size_t end_of_value(std::string_view text, size_t begin) {
  int64_t depth = 0;
  for (size_t i = begin; i < text.size();) {
    const char byte = text[i];
    if (byte == '[' || byte == '{') {
      ++depth;
      ++i;
    } else if (byte == ']' || byte == '}') {
      --depth;
      ++i;
    } else if (byte == ',' || byte == ':' || is_json_space(byte)) {
      ++i;
      continue;
    } else {
      i = end_of_scalar(text, i);
    }
    if (depth == 0) return i;
  }
  return text.size();
}

}  // namespace graft::guide
