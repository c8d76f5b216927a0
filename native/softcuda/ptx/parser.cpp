// The PTX parser: text to syntax tree. It checks the syntax only; the builder checks names, types
// and instructions.
#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>

#include "syntax.h"

namespace softcuda {
namespace ptx {

void syntax_error(unsigned line, const std::string& text) { throw Error{line, text, false}; }
void unsupported(unsigned line, const std::string& text) { throw Error{line, text, true}; }

Type type_of(std::string_view name) {
  static const std::map<std::string_view, Type> types = {
      {"b8", Type::b8},         {"b16", Type::b16},       {"b32", Type::b32},
      {"b64", Type::b64},       {"b128", Type::b128},     {"u8", Type::u8},
      {"u16", Type::u16},       {"u32", Type::u32},       {"u64", Type::u64},
      {"s8", Type::s8},         {"s16", Type::s16},       {"s32", Type::s32},
      {"s64", Type::s64},       {"f16", Type::f16},       {"f16x2", Type::f16x2},
      {"bf16", Type::bf16},     {"bf16x2", Type::bf16x2}, {"tf32", Type::tf32},
      {"f32", Type::f32},       {"f32x2", Type::f32x2},   {"f64", Type::f64},
      {"pred", Type::pred},     {"e4m3", Type::e4m3},     {"e5m2", Type::e5m2},
      {"e4m3x2", Type::e4m3x2}, {"e5m2x2", Type::e5m2x2},
  };
  const auto found = types.find(name);
  return found == types.end() ? Type::none : found->second;
}

unsigned size_of(Type type) {
  switch (type) {
    case Type::b8:
    case Type::u8:
    case Type::s8:
    case Type::e4m3:
    case Type::e5m2:
      return 1;
    case Type::b16:
    case Type::u16:
    case Type::s16:
    case Type::f16:
    case Type::bf16:
    case Type::e4m3x2:
    case Type::e5m2x2:
      return 2;
    case Type::b32:
    case Type::u32:
    case Type::s32:
    case Type::f32:
    case Type::f16x2:
    case Type::bf16x2:
    case Type::tf32:
      return 4;
    case Type::b64:
    case Type::u64:
    case Type::s64:
    case Type::f64:
    case Type::f32x2:
      return 8;
    case Type::b128:
      return 16;
    default:
      return 0;
  }
}

namespace {

// Limits that keep a hostile module from using unbounded memory.
constexpr uint64_t kMaxVariableBytes = uint64_t{1} << 30;
constexpr unsigned kMaxNesting = 64;

struct Token {
  enum Kind : uint8_t { end, word, string, punctuation };
  Kind kind = end;
  unsigned line = 1;
  std::string_view text;
  bool is(char c) const { return kind == punctuation && text[0] == c; }
  bool is(const char* w) const { return kind == word && text == w; }
};

bool word_char(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%' ||
         c == '.';
}

// Splits the text into tokens.
class Lexer {
 public:
  explicit Lexer(std::string_view text) : text_(text) {}
  Token next() {
    skip();
    Token token;
    token.line = line_;
    if (at_ >= text_.size()) return token;
    const size_t from = at_;
    const char c = text_[at_];
    if (c == '"') {
      ++at_;
      while (at_ < text_.size() && text_[at_] != '"') {
        if (text_[at_] == '\n') ++line_;
        at_ += text_[at_] == '\\' ? 2 : 1;
      }
      if (at_ >= text_.size()) syntax_error(token.line, "the string has no end");
      token.kind = Token::string;
      token.text = text_.substr(from + 1, at_ - from - 1);
      ++at_;
      return token;
    }
    if (word_char(c)) {
      while (at_ < text_.size()) {
        if (word_char(text_[at_])) {
          ++at_;
        } else if (text_[at_] == ':' && at_ + 1 < text_.size() && text_[at_ + 1] == ':') {
          at_ += 2;
        } else {
          break;
        }
      }
      token.kind = Token::word;
      token.text = text_.substr(from, at_ - from);
      return token;
    }
    ++at_;
    token.kind = Token::punctuation;
    token.text = text_.substr(from, 1);
    return token;
  }

 private:
  void skip() {
    while (at_ < text_.size()) {
      const char c = text_[at_];
      if (c == '\n') {
        ++line_;
        ++at_;
      } else if (std::isspace(static_cast<unsigned char>(c))) {
        ++at_;
      } else if (text_.compare(at_, 2, "//") == 0) {
        at_ = std::min(text_.size(), text_.find('\n', at_));
      } else if (text_.compare(at_, 2, "/*") == 0) {
        const size_t end = text_.find("*/", at_ + 2);
        if (end == std::string_view::npos) syntax_error(line_, "the comment has no end");
        for (; at_ < end + 2; ++at_) line_ += text_[at_] == '\n';
      } else {
        return;
      }
    }
  }
  std::string_view text_;
  size_t at_ = 0;
  unsigned line_ = 1;
};

// Variables and registers that a block of the function declares.
struct Scope {
  std::map<std::string, int, std::less<>> registers;
  // Registers that are declared as "%name<count>": the type and the count by the name.
  std::map<std::string, std::pair<Type, uint64_t>, std::less<>> ranges;
  std::map<std::string, std::string, std::less<>> variables;  // unique name by declared name
};

class Parser {
 public:
  explicit Parser(std::string_view text) : lexer_(text) { advance(); }
  ModuleText run();

 private:
  void advance() { token_ = lexer_.next(); }
  [[noreturn]] void error(const std::string& text) const { syntax_error(token_.line, text); }
  bool accept(char c) {
    if (!token_.is(c)) return false;
    advance();
    return true;
  }
  void expect(char c) {
    if (!accept(c)) {
      error(std::string("'") + c + "' is expected instead of '" + std::string(token_.text) + "'");
    }
  }
  std::string word(const char* what) {
    if (token_.kind != Token::word) {
      error(std::string(what) + " is expected instead of '" + std::string(token_.text) + "'");
    }
    std::string text(token_.text);
    advance();
    return text;
  }
  static bool number(std::string_view text, uint64_t* out);
  uint64_t integer(const char* what);
  void skip_to(char c);
  Variable variable(Space space, Linkage linkage);
  void initializer(Variable* v);
  void initial_value(Variable* v, uint64_t* at, unsigned depth);
  void section();
  void function(bool entry, Linkage linkage);
  void parameters(std::vector<Variable>* out);
  void body();
  void block(unsigned depth);
  void declare_registers();
  void directive();
  void instruction();
  void location();
  void branch_targets(const std::string& label);
  Operand operand();
  Operand simple_operand();
  int find_register(std::string_view name);
  std::string find_variable(const std::string& name) const;

  Lexer lexer_;
  Token token_;
  ModuleText module_;
  Function* function_ = nullptr;
  std::vector<Scope> scopes_;
  Location location_;
  unsigned unique_ = 0;
};

bool Parser::number(std::string_view text, uint64_t* out) {
  if (text.empty() || !std::isdigit(static_cast<unsigned char>(text[0]))) return false;
  unsigned base = 10;
  size_t at = 0;
  if (text[0] == '0' && text.size() > 1) {
    const char c = static_cast<char>(std::tolower(static_cast<unsigned char>(text[1])));
    base = c == 'x' ? 16 : c == 'b' ? 2 : 8;
    at = base == 8 ? 1 : 2;
  }
  uint64_t value = 0;
  for (; at < text.size(); ++at) {
    const char c = static_cast<char>(std::tolower(static_cast<unsigned char>(text[at])));
    unsigned digit = 99;
    if (c >= '0' && c <= '9') digit = static_cast<unsigned>(c - '0');
    if (c >= 'a' && c <= 'f') digit = static_cast<unsigned>(c - 'a') + 10;
    if (digit >= base) {
      if (c == 'u' && at + 1 == text.size()) break;
      return false;
    }
    value = value * base + digit;
  }
  *out = value;
  return true;
}

uint64_t Parser::integer(const char* what) {
  uint64_t value = 0;
  if (token_.kind != Token::word || !number(token_.text, &value)) {
    error(std::string(what) + " is expected instead of '" + std::string(token_.text) + "'");
  }
  advance();
  return value;
}

void Parser::skip_to(char c) {
  while (!token_.is(c)) {
    if (token_.kind == Token::end) error("the module ends inside a directive");
    advance();
  }
  advance();
}

Space space_of(std::string_view name) {
  if (name == ".global") return Space::global;
  if (name == ".shared") return Space::shared;
  if (name == ".local") return Space::local;
  if (name == ".param") return Space::param;
  if (name == ".const") return Space::constant;
  return Space::none;
}

// Parses the rest of a declaration after the state space: .align 4 .b8 name[16] = {...}.
Variable Parser::variable(Space space, Linkage linkage) {
  Variable v;
  v.space = space;
  v.linkage = linkage;
  v.line = token_.line;
  unsigned count = 1;
  uint64_t align = 0;
  while (token_.kind == Token::word && token_.text[0] == '.') {
    const std::string name(token_.text);
    advance();
    if (name == ".align") {
      align = integer("an alignment");
    } else if (name == ".v2" || name == ".v4") {
      count = static_cast<unsigned>(name[2] - '0');
    } else if (name == ".ptr") {
      while (token_.is(".global") || token_.is(".shared") || token_.is(".local") ||
             token_.is(".const")) {
        advance();
      }
    } else if (name != ".attribute") {
      v.type = type_of(name.substr(1));
      if (v.type == Type::none) error("'" + name + "' is not a type");
    } else {
      error("variable attributes are not supported");
    }
  }
  if (v.type == Type::none) error("a type is expected");
  v.name = word("a name");
  v.bytes = uint64_t{size_of(v.type)} * count;
  if (align != 0 && (align > 4096 || (align & (align - 1)) != 0)) error("the alignment is invalid");
  v.align =
      std::max(1u, align != 0 ? static_cast<unsigned>(align) : static_cast<unsigned>(v.bytes));
  while (accept('[')) {
    if (accept(']')) {
      v.dynamic = true;
      v.bytes = 0;
      continue;
    }
    const uint64_t n = integer("an array size");
    if (n > kMaxVariableBytes || v.bytes * n > kMaxVariableBytes) error("the array is too large");
    v.bytes *= n;
    expect(']');
  }
  if (accept('=')) initializer(&v);
  return v;
}

void Parser::initializer(Variable* v) {
  uint64_t at = 0;
  const bool sized = v->bytes != 0;
  initial_value(v, &at, 0);
  if (sized && at > v->bytes) error("the initial value is longer than the variable");
  if (!sized) {
    v->bytes = at;
    v->dynamic = false;
  }
  v->initial.resize(v->bytes);
}

void Parser::initial_value(Variable* v, uint64_t* at, unsigned depth) {
  if (depth > kMaxNesting) error("the initial value is nested too deeply");
  if (accept('{')) {
    if (accept('}')) return;
    do {
      initial_value(v, at, depth + 1);
    } while (accept(','));
    expect('}');
    return;
  }
  unsigned size = size_of(v->type);
  const Operand value = simple_operand();
  uint64_t bits = value.bits;
  if (value.kind == Operand::real) {
    if (value.wide && size == 4) {
      double wide = 0;
      std::memcpy(&wide, &bits, sizeof wide);
      const float narrow = static_cast<float>(wide);
      bits = 0;
      std::memcpy(&bits, &narrow, sizeof narrow);
    }
  } else if (value.kind == Operand::symbol) {
    std::string name = value.name;
    bool generic = false;
    if (name == "generic") {
      generic = true;
      expect('(');
      const Operand inner = simple_operand();
      name = inner.name;
      expect(')');
    }
    int64_t addend = value.offset;
    if (accept('+')) addend += static_cast<int64_t>(integer("an offset"));
    if (size != 8) unsupported(token_.line, "an address in a variable of less than 64 bits");
    v->references.push_back({*at, name, addend, generic});
    bits = 0;
  } else if (value.kind != Operand::integer) {
    error("a constant is expected");
  }
  if (*at + size > kMaxVariableBytes) error("the initial value is too long");
  v->initial.resize(*at + size);
  std::memcpy(v->initial.data() + *at, &bits, std::min(size, 8u));
  *at += size;
}

// Skips a section of debug data.
void Parser::section() {
  word("a section name");
  expect('{');
  for (unsigned depth = 1; depth != 0; advance()) {
    if (token_.kind == Token::end) error("the section has no end");
    if (token_.is('{')) ++depth;
    if (token_.is('}') && --depth == 0) break;
  }
  expect('}');
}

ModuleText Parser::run() {
  if (!token_.is(".version")) error("the module must begin with .version");
  Linkage linkage = Linkage::internal;
  while (token_.kind != Token::end) {
    const std::string name = word("a directive");
    if (name == ".version") {
      word("a version");
    } else if (name == ".target") {
      const std::string target = word("a target");
      if (target.rfind("sm_", 0) != 0) error("'" + target + "' is not a target");
      for (size_t i = 3; i < target.size() && std::isdigit(static_cast<unsigned char>(target[i]));
           ++i) {
        module_.target =
            std::min(9999u, module_.target * 10 + static_cast<unsigned>(target[i] - '0'));
      }
      while (accept(',')) word("a target option");
    } else if (name == ".address_size") {
      if (integer("an address size") != 64) unsupported(token_.line, "addresses of 32 bits");
    } else if (name == ".file") {
      const unsigned index = static_cast<unsigned>(integer("a file number"));
      if (token_.kind != Token::string) error("a file name is expected");
      module_.files[index] = std::string(token_.text);
      advance();
      while (accept(',')) integer("a number");
    } else if (name == ".section") {
      section();
    } else if (name == ".loc") {
      location();
    } else if (name == ".visible") {
      linkage = Linkage::visible;
      continue;
    } else if (name == ".weak" || name == ".common") {
      linkage = Linkage::weak;
      continue;
    } else if (name == ".extern") {
      linkage = Linkage::external;
      continue;
    } else if (name == ".entry" || name == ".func") {
      function(name == ".entry", linkage);
    } else if (name == ".pragma" || name == ".alias") {
      skip_to(';');
    } else if (space_of(name) != Space::none) {
      do {
        module_.variables.push_back(variable(space_of(name), linkage));
      } while (accept(','));
      expect(';');
    } else if (name == ".tex" || name == ".texref" || name == ".samplerref" || name == ".surfref") {
      unsupported(token_.line, "textures and surfaces");
    } else {
      error("the directive '" + name + "' is unknown");
    }
    linkage = Linkage::internal;
  }
  return std::move(module_);
}

void Parser::parameters(std::vector<Variable>* out) {
  expect('(');
  if (accept(')')) return;
  do {
    const std::string name = word("a parameter");
    if (name == ".reg") {
      Variable v;
      v.line = token_.line;
      v.type = type_of(word("a type").substr(1));
      v.name = word("a name");
      out->push_back(v);
    } else if (name == ".param") {
      out->push_back(variable(Space::param, Linkage::internal));
    } else {
      error("'.param' or '.reg' is expected instead of '" + name + "'");
    }
  } while (accept(','));
  expect(')');
}

void Parser::function(bool entry, Linkage linkage) {
  auto made = std::make_unique<Function>();
  function_ = made.get();
  made->entry = entry;
  made->linkage = linkage;
  made->line = token_.line;
  if (!entry && token_.is('(')) parameters(&made->results);
  made->name = word("a function name");
  if (token_.is('(')) parameters(&made->params);
  while (token_.kind == Token::word) {
    const std::string name = word("a directive");
    if (name == ".maxntid" || name == ".reqntid") {
      uint64_t threads = 1;
      do {
        threads *= std::min<uint64_t>(integer("a number"), 1 << 20);
      } while (accept(',') && threads < (uint64_t{1} << 40));
      made->max_threads = static_cast<unsigned>(std::min<uint64_t>(threads, 1u << 30));
    } else if (name == ".minnctapersm" || name == ".maxnreg" || name == ".maxnctapersm" ||
               name == ".abi_preserve" || name == ".abi_preserve_control" ||
               name == ".maxclusterrank") {
      integer("a number");
    } else if (name == ".noreturn" || name == ".weak") {
      continue;
    } else if (name == ".pragma") {
      skip_to(';');
    } else if (name == ".explicitcluster" || name == ".reqnctapercluster") {
      unsupported(token_.line, "clusters of blocks");
    } else {
      error("the directive '" + name + "' is unknown");
    }
  }
  if (token_.is('{')) {
    if (linkage == Linkage::external) error("an external function has no body");
    made->defined = true;
    body();
  } else {
    accept(';');
  }
  module_.functions.push_back(std::move(made));
  function_ = nullptr;
}

void Parser::body() {
  scopes_.clear();
  location_ = {};
  Scope outer;
  for (auto* list : {&function_->params, &function_->results}) {
    for (auto& v : *list) {
      if (v.space == Space::param) {
        outer.variables[v.name] = v.name;
      } else {
        outer.registers[v.name] = static_cast<int>(function_->registers.size());
        function_->registers.push_back({v.name, v.type});
      }
    }
  }
  scopes_.push_back(std::move(outer));
  expect('{');
  block(0);
}

// Parses the statements of a block up to its closing brace.
void Parser::block(unsigned depth) {
  if (depth > kMaxNesting) error("the blocks are nested too deeply");
  scopes_.emplace_back();
  while (!accept('}')) {
    if (token_.kind == Token::end) error("the function has no end");
    if (accept('{')) {
      block(depth + 1);
    } else if (token_.kind == Token::word && token_.text[0] == '.') {
      directive();
    } else {
      instruction();
    }
  }
  scopes_.pop_back();
}

void Parser::declare_registers() {
  Type type = Type::none;
  while (token_.kind == Token::word && token_.text[0] == '.') {
    const std::string name = word("a type");
    if (name == ".v2" || name == ".v4") unsupported(token_.line, "vector registers");
    type = type_of(name.substr(1));
    if (type == Type::none) error("'" + name + "' is not a type");
  }
  if (type == Type::none) error("a type is expected");
  do {
    const std::string name = word("a register name");
    if (accept('<')) {
      const uint64_t count = integer("a number of registers");
      expect('>');
      scopes_.back().ranges[name] = {type, count};
    } else {
      scopes_.back().registers[name] = static_cast<int>(function_->registers.size());
      function_->registers.push_back({name, type});
    }
  } while (accept(','));
  expect(';');
}

void Parser::location() {
  location_.file = static_cast<unsigned>(integer("a file number"));
  location_.line = static_cast<unsigned>(integer("a line number"));
  integer("a column");
  while (accept(',')) {  // function_name label [+ offset], inlined_at file line column
    const std::string name = word("an attribute of .loc");
    if (name == "function_name") {
      word("a label");
      if (accept('+')) integer("an offset");
    } else if (name == "inlined_at") {
      for (int i = 0; i < 3; ++i) integer("a number");
    } else {
      error("'" + name + "' is not an attribute of .loc");
    }
  }
}

void Parser::directive() {
  const std::string name = word("a directive");
  if (name == ".reg") {
    declare_registers();
  } else if (name == ".loc") {
    location();
  } else if (name == ".pragma") {
    skip_to(';');
  } else if (space_of(name) != Space::none) {
    do {
      Variable v = variable(space_of(name), Linkage::internal);
      // Different blocks of a function may declare variables with the same name, so each variable
      // gets a unique name.
      const std::string unique = v.name + "#" + std::to_string(++unique_);
      scopes_.back().variables[v.name] = unique;
      v.name = unique;
      function_->variables.push_back(std::move(v));
    } while (accept(','));
    expect(';');
  } else if (name == ".callprototype") {
    skip_to(';');
  } else {
    error("the directive '" + name + "' is unknown");
  }
}

void Parser::branch_targets(const std::string& label) {
  std::vector<std::string>& list = function_->targets[label];
  do {
    list.push_back(word("a label"));
  } while (accept(','));
  expect(';');
}

void Parser::instruction() {
  Statement s;
  s.line = token_.line;
  s.location = location_;
  if (accept('@')) {
    s.guard_negated = accept('!');
    const std::string name = word("a predicate");
    s.guard = find_register(name);
    if (s.guard < 0) error("the predicate '" + name + "' is not declared");
  }
  s.line = token_.line;
  s.opcode = word("an instruction");
  if (s.guard < 0 && accept(':')) {
    if (token_.is(".branchtargets") || token_.is(".calltargets")) {
      advance();
      branch_targets(s.opcode);
      return;
    }
    if (token_.is(".callprototype")) {
      // The prototype is not needed, because the arguments of the call have the same types.
      skip_to(';');
      return;
    }
    s.label = std::move(s.opcode);
    s.opcode.clear();
    function_->body.push_back(std::move(s));
    return;
  }
  if (!accept(';')) {
    do {
      s.operands.push_back(operand());
      if (s.operands.size() > 64) error("the instruction has too many operands");
    } while (accept(','));
    expect(';');
  }
  function_->body.push_back(std::move(s));
}

Operand Parser::operand() {
  Operand out;
  if (accept('{')) {
    out.kind = Operand::vector;
    do {
      out.parts.push_back(simple_operand());
      if (out.parts.size() > 256) error("the vector has too many elements");
    } while (accept(','));
    expect('}');
    return out;
  }
  if (accept('[')) {
    out.kind = Operand::memory;
    out.parts.push_back(simple_operand());
    while (token_.is('+') || token_.is('-')) {
      const bool minus = token_.is('-');
      advance();
      const bool negative = accept('-');
      const int64_t n = static_cast<int64_t>(integer("an offset"));
      out.offset += minus != negative ? -n : n;
    }
    if (token_.is(',')) unsupported(token_.line, "a memory operand with coordinates");
    expect(']');
    return out;
  }
  if (accept('(')) {
    out.kind = Operand::list;
    if (accept(')')) return out;
    do {
      out.parts.push_back(simple_operand());
      if (out.parts.size() > 1024) error("the call has too many arguments");
    } while (accept(','));
    expect(')');
    return out;
  }
  out = simple_operand();
  if (accept('|')) out.second.push_back(simple_operand());
  if (out.kind == Operand::symbol && accept('+')) {
    out.offset = static_cast<int64_t>(integer("an offset"));
  }
  return out;
}

Operand Parser::simple_operand() {
  Operand out;
  if (accept('!')) out.negated = true;
  const bool minus = accept('-');
  if (token_.kind != Token::word) {
    error("an operand is expected instead of '" + std::string(token_.text) + "'");
  }
  const std::string_view text = token_.text;
  const bool digit = std::isdigit(static_cast<unsigned char>(text[0])) != 0;
  if (digit && text.size() > 2 && text[0] == '0' && std::strchr("fFdD", text[1]) != nullptr) {
    out.kind = Operand::real;
    out.wide = text[1] == 'd' || text[1] == 'D';
    if (!number("0x" + std::string(text.substr(2)), &out.bits)) error("the constant is invalid");
    if (minus) out.bits ^= uint64_t{1} << (out.wide ? 63 : 31);
  } else if (digit && number(text, &out.bits)) {
    out.kind = Operand::integer;
    if (minus) out.bits = ~out.bits + 1;
  } else if (digit) {
    char* end = nullptr;
    const std::string copy(text);
    const double value = std::strtod(copy.c_str(), &end);
    if (end != copy.c_str() + copy.size()) error("the constant '" + copy + "' is invalid");
    out.kind = Operand::real;
    out.wide = true;
    const double result = minus ? -value : value;
    std::memcpy(&out.bits, &result, sizeof result);
  } else if (text == "_") {
    out.kind = Operand::none;
  } else if (text == "WARP_SZ") {
    out.kind = Operand::integer;
    out.bits = 32;
  } else {
    out.name = std::string(text);
    out.index = function_ != nullptr ? find_register(text) : -1;
    if (out.index >= 0 || text[0] == '%') {
      out.kind = Operand::reg;
    } else {
      out.kind = Operand::symbol;
      out.name = find_variable(out.name);
    }
  }
  advance();
  return out;
}

// Returns the number of a declared register, or -1. A register of a range such as %r<100> gets its
// number when it is first used, so a huge declared range needs no memory.
int Parser::find_register(std::string_view name) {
  size_t digits = name.size();
  while (digits > 0 && std::isdigit(static_cast<unsigned char>(name[digits - 1]))) --digits;
  uint64_t number_of_register = 0;
  const bool in_range = digits < name.size() && digits > 0 && name.size() - digits <= 9;
  if (in_range) {
    for (size_t i = digits; i < name.size(); ++i) {
      number_of_register = number_of_register * 10 + static_cast<unsigned>(name[i] - '0');
    }
  }
  for (size_t i = scopes_.size(); i-- > 0;) {
    Scope& scope = scopes_[i];
    const auto found = scope.registers.find(name);
    if (found != scope.registers.end()) return found->second;
    if (!in_range) continue;
    const auto range = scope.ranges.find(name.substr(0, digits));
    if (range == scope.ranges.end() || number_of_register >= range->second.second) continue;
    const int index = static_cast<int>(function_->registers.size());
    scope.registers.emplace(std::string(name), index);
    function_->registers.push_back({std::string(name), range->second.first});
    return index;
  }
  return -1;
}

std::string Parser::find_variable(const std::string& name) const {
  for (size_t i = scopes_.size(); i-- > 0;) {
    const auto found = scopes_[i].variables.find(name);
    if (found != scopes_[i].variables.end()) return found->second;
  }
  return name;
}

}  // namespace

ModuleText parse(std::string_view text) { return Parser(text).run(); }

}  // namespace ptx
}  // namespace softcuda
