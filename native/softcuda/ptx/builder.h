// Building of executable kernels from syntax trees: symbols, inlining of device functions, register
// slots, and the interface through which the instruction families decode their instructions.
#pragma once

#include <unordered_map>

#include "program.h"

namespace softcuda {
namespace ptx {

class Builder;

// The names that the functions of one module can use: the names of the module itself, and the
// visible names of the modules with which it is linked.
struct Symbols {
  const ModuleText* module = nullptr;
  unsigned number = 0;                        // number of the PTX text that contains the module
  std::map<std::string, uint64_t> addresses;  // addresses of .global and .const variables
  std::map<std::string, const Function*> functions;
};

// An opcode that is being decoded. The decoder of its instruction family removes ("takes") the
// modifiers that it supports. If a modifier remains, the instruction is refused.
class Opcode {
 public:
  Opcode(const std::string& text, unsigned line);
  std::string base;  // "ld" of "ld.global.u32"
  unsigned line;
  // Takes a modifier and returns true, or returns false if it is not present.
  bool take(std::string_view modifier);
  bool has(std::string_view modifier) const;
  // Takes the first type of the remaining modifiers; Type::none if there is none.
  Type take_type();
  // Takes modifiers that are hints for caches and memory ordering domains.
  void take_cache_hints();
  // Takes and returns the next modifier, whichever it is; returns "" if none is left.
  std::string take_any();
  bool finished() const { return parts_.empty(); }
  const std::string& text() const { return text_; }
  std::string rest() const;

 private:
  std::string text_;
  std::vector<std::string> parts_;
};

// Builds a kernel from its syntax tree. Its public functions give the decoders access to the
// operands of the instruction that is being decoded.
class Builder {
 public:
  // `called` contains the functions whose addresses the modules take.
  explicit Builder(const std::vector<const Function*>& called) : called_(called) {}
  std::shared_ptr<Kernel> build(const Function& entry, bool linked);
  // Number of the PTX text that contains the function being built. Error texts name this text.
  unsigned text_number() const { return text_number_; }

  // ---- used by decoders ----
  const Operand& operand(size_t i) const;
  size_t operand_count() const { return operands_->size(); }
  // dst(), src(), pred_dst() and pred_src() return an operand in the form of Instr::op. dst() is
  // for a register that the instruction writes. The size of the register must be `bytes`, or at
  // least `bytes` if `wider` is set. The result is kNoRegister for the operand "_". src() is for a
  // register or a constant that the instruction reads as `type`.
  int32_t dst(const Operand& o, unsigned bytes, bool wider = false);
  int32_t src(const Operand& o, Type type, bool wider = false);
  // pred_src() sets kNegated for "!p".
  int32_t pred_dst(const Operand& o);
  int32_t pred_src(const Operand& o);
  // Size in bytes of a register operand; 0 for predicates and constants.
  unsigned register_bytes(const Operand& o) const;
  bool is_register(const Operand& o) const { return o.kind == Operand::reg; }
  // Returns a constant operand with the value `bits` in all lanes.
  int32_t constant(uint64_t bits, unsigned bytes);
  // If the operand `o` is a constant, stores its value and returns true.
  bool constant_value(int32_t o, uint64_t* value) const;
  uint64_t integer(const Operand& o);
  // Returns the base of a memory operand [base + offset]: the operand of its register, or a
  // constant operand with the address of its symbol. Sets `width` to the base's size in bytes (4 or
  // 8), and `offset`. `space` is the state space that the instruction names. If the base is a
  // symbol of another space that this name allows (any space for a generic access, for example),
  // `space` is set to the symbol's space.
  int32_t address(const Operand& o, Space* space, unsigned* width, int64_t* offset);
  // Returns a constant operand with the address that mov stores for a symbol.
  int32_t symbol_constant(const Operand& o, unsigned bytes);
  // The carry flag of the .cc instructions, a predicate that the kernel does not name.
  int32_t carry_flag();
  uint32_t new_site() { return kernel_->sites++; }
  size_t pool_operands(const std::vector<int32_t>& operands);
  Kernel& kernel() { return *kernel_; }
  const Statement& statement() const { return *statement_; }
  [[noreturn]] void refuse_operand(const std::string& text) const;

 private:
  struct Instance;
  void emit_function(const Function& f, Instance& instance, unsigned depth);
  void emit(Instance& instance, const Statement& s, unsigned depth);
  void emit_indexed_branch(Instance& instance, const Statement& s, Opcode& op, Instr in);
  struct Call;
  void emit_call(Instance& instance, const Statement& s, unsigned depth);
  void emit_body(Instance& instance, const Call& call, const Function& f, unsigned depth);
  void emit_indirect_call(Instance& instance, const Call& call, unsigned depth);
  void emit_recursive_call(Instance& instance, const Call& call, size_t outer);
  void emit_copies(Instance& instance, Instance& inner, const Call& call, bool results);
  void emit_jump(int label, const Statement& s);
  void check_inlining(unsigned depth) const;
  bool emit_special_call(Instance& instance, const Call& call);
  void finish(const Opcode& op, Instr in, const Statement& s);
  void branch_to(size_t instruction, int label);
  int label_of(Instance& instance, const std::string& name);
  int32_t slot(const Operand& o);
  int32_t pred_slot(const Operand& o);
  int32_t special(const std::string& name, unsigned* bytes);
  bool is_formal(const std::string& name) const;
  uint64_t symbol_address(const Operand& o, Space* space);
  void place_variables(const Function& f, Instance& instance);
  void set_guard(Instr* in, const Statement& s);

  void place_shared(const Function& entry);
  void place_params(const Function& entry, Instance& instance);
  void resolve_jumps();
  void make_constants();
  const Symbols& symbols() const;
  const std::vector<const Function*>& called_;
  std::shared_ptr<Kernel> kernel_;
  unsigned text_number_ = 0;
  unsigned inlined_ = 0;  // number of inlined copies
  Instance* instance_ = nullptr;
  const Statement* statement_ = nullptr;
  const std::vector<Operand>* operands_ = nullptr;
  // Registers (offset / 4) that the instruction being decoded reads and writes.
  std::vector<int32_t> reads_, writes_;
  size_t predicate_bytes_ = 0;
  size_t lane_bytes_ = 0;
  std::map<std::pair<uint64_t, unsigned>, int32_t> constants_;
  std::vector<std::pair<uint64_t, unsigned>> constant_values_;
  size_t constants_at_ = 0;
  std::map<Special, int32_t> special_slots_;
  int32_t carry_flag_ = kNoRegister;
  uint64_t local_at_ = kLocalBase;
  uint64_t shared_at_ = kSharedBase;
  // Addresses of shared variables, by the module and the name.
  std::map<std::pair<const Symbols*, std::string>, uint64_t> shared_;
  std::vector<size_t> labels_;                 // index of the instruction at each label
  std::vector<std::pair<size_t, int>> jumps_;  // (index of a jump, label of its target)
  // An element of Kernel::operand_pool that will contain the distance from an instruction to a
  // label.
  struct PoolJump {
    size_t instruction;
    size_t pool;
    int label;
  };
  std::vector<PoolJump> pool_jumps_;
  std::vector<const Function*> active_;  // functions that are being inlined
  std::vector<Instance*> instances_;     // the inlined copies of the functions in `active_`
};

// Decoders of the instruction families. Each returns false if the opcode is not of its family, and
// throws Error for an instruction of its family that is not supported.
using Decoder = bool(Builder& b, Opcode& op, Instr& in);
Decoder decode_integer, decode_float, decode_half, decode_move, decode_compare, decode_convert,
    decode_memory, decode_atomic, decode_warp, decode_mma, decode_async, decode_mbarrier,
    decode_wmma, decode_control;

// Handlers of instructions that the builder adds itself. run_guarded calls Instr::guarded for the
// lanes whose guard predicate is true.
HandlerFunction run_guarded, move_b16, move_b32, move_b64, jump, exit_lanes, special_call,
    indirect_call, recursive_call, recursive_return;

// Functions that the device provides. For special_call, Instr::kind says which one is called.
enum SpecialCall : uint16_t { kVprintf, kAssertFail, kSetConditional, kTrapCall };

}  // namespace ptx
}  // namespace softcuda
