// The syntax tree of a PTX module: functions with their declarations and statements. The parser
// (parser.cpp) produces it, and the builder (builder.cpp) turns its kernels into `Kernel` objects.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace softcuda {
namespace ptx {

// Error in a PTX module. It is thrown while a module is loaded and never leaves the loader.
struct Error {
  unsigned line;
  std::string text;
  // Whether the module is valid but uses something that the soft device does not support.
  bool unsupported;
};
[[noreturn]] void syntax_error(unsigned line, const std::string& text);
[[noreturn]] void unsupported(unsigned line, const std::string& text);

enum class Type : uint8_t {
  none,
  b8,
  b16,
  b32,
  b64,
  b128,
  u8,
  u16,
  u32,
  u64,
  s8,
  s16,
  s32,
  s64,
  f16,
  f16x2,
  bf16,
  bf16x2,
  tf32,
  f32,
  f32x2,
  f64,
  pred,
  e4m3,
  e5m2,
  e4m3x2,
  e5m2x2,
};
// Returns the type that a name such as "f32" denotes, or Type::none.
Type type_of(std::string_view name);
// Returns the size in bytes; 0 for predicates and Type::none.
unsigned size_of(Type type);

// An operand of an instruction.
struct Operand {
  enum Kind : uint8_t {
    none,     // "_": the value is not stored
    reg,      // a register, or a special register if `index` is negative
    integer,  // an integer constant in `bits`
    real,     // a constant such as 0f3F800000; `bits` has 64 bits if `wide`, otherwise 32
    symbol,   // the address of a variable plus `offset`, or the name of a function or label
    vector,   // {a, b, ...}
    memory,   // [base + offset]; parts[0] is the base
    list,     // (a, b, ...) of a call
  };
  Kind kind = none;
  bool negated = false;  // "!" before a predicate
  bool wide = false;
  int index = -1;  // register number in the function
  uint64_t bits = 0;
  int64_t offset = 0;
  std::string name;
  std::vector<Operand> parts;
  // The part after "|" in d|p. At most one element.
  std::vector<Operand> second;
};

// Position in the source file, from a .loc directive. `file` is 0 if it is unknown.
struct Location {
  unsigned file = 0;
  unsigned line = 0;
};

// Whether other modules can use a name. Internal names are known in their own module only.
enum class Linkage : uint8_t { internal, visible, weak, external };

struct Statement {
  unsigned line = 0;  // line of the PTX text
  Location location;
  std::string opcode;  // with modifiers; empty for a label
  std::string label;
  int guard = -1;  // register number of the predicate, or -1
  bool guard_negated = false;
  std::vector<Operand> operands;
};

enum class Space : uint8_t { none, generic, global, shared, local, param, constant };

// A variable with an address: .global, .const, .shared, .local or .param.
struct Variable {
  std::string name;
  Space space = Space::none;
  Type type = Type::none;
  unsigned line = 0;
  unsigned align = 1;
  uint64_t bytes = 0;
  Linkage linkage = Linkage::internal;
  bool dynamic = false;  // .extern .shared without a size
  std::vector<unsigned char> initial;
  // Addresses in the initial value: (offset, name of the variable, addend).
  struct Reference {
    uint64_t offset;
    std::string name;
    int64_t addend;
    bool generic;
  };
  std::vector<Reference> references;
};

struct Register {
  std::string name;
  Type type;
};

struct Symbols;

struct Function {
  std::string name;
  Linkage linkage = Linkage::internal;
  // Set when modules are linked: the names that the function can use, and its number, which is part
  // of its address (kFunctionWindow).
  const Symbols* symbols = nullptr;
  unsigned number = 0;
  bool address_taken = false;
  unsigned line = 0;
  bool entry = false;
  bool defined = false;
  // Parameters. If a parameter is a register, its space is `none`, and `type` and `name` are those
  // of the register.
  std::vector<Variable> params;
  std::vector<Variable> results;  // of a device function
  std::vector<Register> registers;
  std::vector<Variable> variables;  // .shared, .local and .param variables of the body
  // Lists of .branchtargets and .calltargets by label.
  std::map<std::string, std::vector<std::string>> targets;
  std::vector<Statement> body;
  unsigned max_threads = 0;
};

struct ModuleText {
  unsigned target = 0;  // 90 for sm_90
  std::vector<Variable> variables;
  std::vector<std::unique_ptr<Function>> functions;
  std::map<unsigned, std::string> files;
};

// Parses the text of a module. Throws Error.
ModuleText parse(std::string_view text);

}  // namespace ptx
}  // namespace softcuda
