// Building of executable kernels. Device functions are inlined: each call gets its own registers
// and local variables, and "ret" becomes a jump to the end of the inlined body (INVARIANTS.md P4).
#include "builder.h"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <set>

#include "counts.h"

namespace softcuda {
namespace ptx {

namespace {

// Limits that keep a hostile module from using unbounded memory.
constexpr size_t kMaxInstructions = 2000000;
constexpr size_t kMaxRegisterBytes = 64 << 20;
constexpr size_t kMaxLocalBytes = 512 << 10;
constexpr size_t kMaxParamBytes = 32764;
constexpr unsigned kMaxDepth = 32;
constexpr unsigned kMaxInlined = 20000;

Decoder* const kDecoders[] = {decode_integer, decode_float,   decode_half,   decode_move,
                              decode_compare, decode_convert, decode_memory, decode_atomic,
                              decode_warp,    decode_mma,     decode_async,  decode_mbarrier,
                              decode_wmma,    decode_control};

uint64_t round_up(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

struct SpecialName {
  const char* name;
  Special special;
};
constexpr SpecialName kSpecialNames[] = {
    {"%tid.x", Special::tid_x},
    {"%tid.y", Special::tid_y},
    {"%tid.z", Special::tid_z},
    {"%ntid.x", Special::ntid_x},
    {"%ntid.y", Special::ntid_y},
    {"%ntid.z", Special::ntid_z},
    {"%ctaid.x", Special::ctaid_x},
    {"%ctaid.y", Special::ctaid_y},
    {"%ctaid.z", Special::ctaid_z},
    {"%nctaid.x", Special::nctaid_x},
    {"%nctaid.y", Special::nctaid_y},
    {"%nctaid.z", Special::nctaid_z},
    {"%laneid", Special::laneid},
    {"%warpid", Special::warpid},
    {"%nwarpid", Special::nwarpid},
    {"%smid", Special::smid},
    {"%nsmid", Special::nsmid},
    {"%gridid", Special::gridid},
    {"%lanemask_eq", Special::lanemask_eq},
    {"%lanemask_le", Special::lanemask_le},
    {"%lanemask_lt", Special::lanemask_lt},
    {"%lanemask_ge", Special::lanemask_ge},
    {"%lanemask_gt", Special::lanemask_gt},
    {"%dynamic_smem_size", Special::dynamic_smem_size},
    {"%total_smem_size", Special::total_smem_size},
    // Every block is a cluster of its own.
    {"%clusterid.x", Special::ctaid_x},
    {"%clusterid.y", Special::ctaid_y},
    {"%clusterid.z", Special::ctaid_z},
    {"%nclusterid.x", Special::nctaid_x},
    {"%nclusterid.y", Special::nctaid_y},
    {"%nclusterid.z", Special::nctaid_z},
    {"%cluster_ctaid.x", Special::zero},
    {"%cluster_ctaid.y", Special::zero},
    {"%cluster_ctaid.z", Special::zero},
    {"%cluster_ctarank", Special::zero},
    {"%cluster_nctaid.x", Special::one},
    {"%cluster_nctaid.y", Special::one},
    {"%cluster_nctaid.z", Special::one},
    {"%cluster_nctarank", Special::one},
};

constexpr const char* kCacheHints[] = {
    "ca",
    "cg",
    "cs",
    "lu",
    "cv",
    "wb",
    "wt",
    "L2::64B",
    "L2::128B",
    "L2::256B",
    "L1::no_allocate",
    "L1::evict_last",
    "L1::evict_first",
    "L1::evict_normal",
    "L1::evict_unchanged",
    "L2::evict_last",
    "L2::evict_first",
    "L2::evict_normal",
};

}  // namespace

// ---- opcodes ----------------------------------------------------------------------------------

Opcode::Opcode(const std::string& text, unsigned at) : line(at), text_(text) {
  size_t from = 0;
  while (from <= text.size()) {
    const size_t dot = std::min(text.find('.', from), text.size());
    std::string part = text.substr(from, dot - from);
    if (from == 0) {
      base = std::move(part);
    } else {
      parts_.push_back(std::move(part));
    }
    from = dot + 1;
  }
}

bool Opcode::take(std::string_view modifier) {
  const auto found = std::find(parts_.begin(), parts_.end(), modifier);
  if (found == parts_.end()) return false;
  parts_.erase(found);
  return true;
}

bool Opcode::has(std::string_view modifier) const {
  return std::find(parts_.begin(), parts_.end(), modifier) != parts_.end();
}

Type Opcode::take_type() {
  for (size_t i = 0; i < parts_.size(); ++i) {
    const Type type = type_of(parts_[i]);
    if (type == Type::none) continue;
    parts_.erase(parts_.begin() + static_cast<std::ptrdiff_t>(i));
    return type;
  }
  return Type::none;
}

void Opcode::take_cache_hints() {
  for (const char* hint : kCacheHints) take(hint);
}

std::string Opcode::take_any() {
  if (parts_.empty()) return "";
  std::string part = std::move(parts_.front());
  parts_.erase(parts_.begin());
  return part;
}

std::string Opcode::rest() const {
  std::string text;
  for (const std::string& part : parts_) text += "." + part;
  return text;
}

// ---- instances --------------------------------------------------------------------------------

// One inlined copy of a function.
struct Builder::Instance {
  const Function* function = nullptr;
  // Offset in the warp's buffer, by register number; kNoRegister before the first use.
  std::vector<int32_t> slots;
  std::map<std::string, int> labels;
  std::map<std::string, uint64_t> locals;  // addresses of .local and .param variables
  std::map<std::string, uint64_t> params;  // offsets of kernel parameters
  int begin = -1;                          // label of the inlined body
  int end = -1;                            // label after the inlined body
  int number = 0;                          // number of this copy, unique in the kernel
  bool recursive = false;                  // whether a recursive call jumps to `begin`
};

// A call instruction. A call with a guard predicate is replaced with a conditional jump and a call
// without the guard, so `statement` has no guard.
struct Builder::Call {
  const Statement& statement;
  const Operand& callee;
  std::vector<Operand> arguments;
  std::vector<Operand> results;
};

const Symbols& Builder::symbols() const { return *instance_->function->symbols; }

void Builder::refuse_operand(const std::string& text) const {
  syntax_error(statement_->line, statement_->opcode + ": " + text);
}

const Operand& Builder::operand(size_t i) const {
  if (i >= operands_->size()) refuse_operand("the instruction has too few operands");
  return (*operands_)[i];
}

int32_t Builder::slot(const Operand& o) {
  if (o.kind != Operand::reg) refuse_operand("a register is expected");
  if (o.index < 0) refuse_operand("'" + o.name + "' cannot be used here");
  const Register& r = instance_->function->registers[static_cast<size_t>(o.index)];
  int32_t& found = instance_->slots[static_cast<size_t>(o.index)];
  if (found != kNoRegister) return found;
  if (r.type == Type::pred) {
    if (predicate_bytes_ % 64 == 0) {
      predicate_bytes_ = lane_bytes_;
      lane_bytes_ += 64;
    }
    found = static_cast<int32_t>(predicate_bytes_);
    kernel_->saved_registers.emplace_back(found, 0);
    predicate_bytes_ += 4;
    return found;
  }
  const size_t bytes = std::max<size_t>(2, size_of(r.type)) * kLanes;
  found = static_cast<int32_t>(lane_bytes_);
  kernel_->saved_registers.emplace_back(found, static_cast<unsigned>(bytes / kLanes));
  lane_bytes_ += round_up(bytes, 64);
  if (lane_bytes_ > kMaxRegisterBytes) refuse_operand("the kernel has too many registers");
  return found;
}

unsigned Builder::register_bytes(const Operand& o) const {
  if (o.kind != Operand::reg) return 0;
  if (o.index < 0)
    return o.name == "%gridid" || o.name == "%globaltimer" || o.name == "%clock64" ? 8 : 4;
  const Type type = instance_->function->registers[static_cast<size_t>(o.index)].type;
  return type == Type::pred ? 0 : std::max(2u, size_of(type));
}

int32_t Builder::dst(const Operand& o, unsigned bytes, bool wider) {
  if (o.kind == Operand::none) return kNoRegister;
  const int32_t found = slot(o);
  writes_.push_back(found / 4);
  const unsigned have = register_bytes(o);
  if (have != bytes && !(wider && have > bytes)) {
    refuse_operand("the register '" + o.name + "' has a wrong size");
  }
  return found;
}

int32_t Builder::special(const std::string& name, unsigned* bytes) {
  for (const SpecialName& entry : kSpecialNames) {
    if (name != entry.name) continue;
    *bytes = entry.special == Special::gridid ? 8 : 4;
    const auto found = special_slots_.find(entry.special);
    if (found != special_slots_.end()) return found->second;
    const auto at = static_cast<int32_t>(lane_bytes_);
    lane_bytes_ += 8 * kLanes;
    special_slots_[entry.special] = at;
    return at;
  }
  if (name[0] == '%') {
    unsupported(statement_->line, statement_->opcode + ": the register '" + name +
                                      "' is not declared or not supported");
  }
  refuse_operand("'" + name + "' is not declared");
}

int32_t Builder::constant(uint64_t bits, unsigned bytes) {
  if (bytes < 8) bits &= (uint64_t{1} << (8 * bytes)) - 1;
  const auto key = std::make_pair(bits, bytes);
  const auto found = constants_.find(key);
  if (found != constants_.end()) return found->second;
  const auto at = static_cast<int32_t>(constants_at_) | kConstant;
  constants_[key] = at;
  constant_values_.push_back(key);
  constants_at_ += round_up(uint64_t{bytes} * kLanes, 64);
  if (constants_at_ > kMaxRegisterBytes) refuse_operand("the kernel has too many constants");
  return at;
}

int32_t Builder::src(const Operand& o, Type type, bool wider) {
  const unsigned bytes = std::max(2u, size_of(type));
  switch (o.kind) {
    case Operand::reg: {
      if (o.index < 0) {
        unsigned have = 0;
        const int32_t at = special(o.name, &have);
        if (have != bytes && !(wider && have > bytes)) {
          refuse_operand("the register '" + o.name + "' has a wrong size");
        }
        return at;
      }
      const int32_t at = slot(o);
      reads_.push_back(at / 4);
      const unsigned have = register_bytes(o);
      if (have != bytes && !(wider && have > bytes)) {
        refuse_operand("the register '" + o.name + "' has a wrong size");
      }
      return at;
    }
    case Operand::integer:
      if (type == Type::f32 || type == Type::f64)
        refuse_operand("a floating-point constant is expected");
      return constant(o.bits, bytes);
    case Operand::real: {
      uint64_t bits = o.bits;
      if (o.wide && bytes == 4) {
        double value = 0;
        std::memcpy(&value, &bits, sizeof value);
        const float narrow = static_cast<float>(value);
        bits = 0;
        std::memcpy(&bits, &narrow, sizeof narrow);
      } else if (!o.wide && bytes == 8 && type == Type::f64) {
        float value = 0;
        std::memcpy(&value, &bits, sizeof value);
        const double widened = static_cast<double>(value);
        std::memcpy(&bits, &widened, sizeof widened);
      }
      return constant(bits, bytes);
    }
    case Operand::symbol: {
      Space space = Space::none;
      return constant(symbol_address(o, &space), bytes);
    }
    default:
      refuse_operand("a register or a constant is expected");
  }
}

int32_t Builder::pred_dst(const Operand& o) {
  const int32_t found = pred_slot(o);
  if (found != kNoRegister) writes_.push_back(found / 4);
  return found;
}

int32_t Builder::pred_slot(const Operand& o) {
  if (o.kind == Operand::none) return kNoRegister;
  const int32_t found = slot(o);
  if (instance_->function->registers[static_cast<size_t>(o.index)].type != Type::pred) {
    refuse_operand("'" + o.name + "' is not a predicate");
  }
  return found;
}

int32_t Builder::pred_src(const Operand& o) {
  if (o.kind == Operand::integer) {
    return constant(((o.bits != 0) != o.negated) ? kAllLanes : 0u, 4);
  }
  const int32_t found = pred_slot(o);
  if (found == kNoRegister) refuse_operand("a predicate is expected");
  reads_.push_back(found / 4);
  return o.negated ? found | kNegated : found;
}

int32_t Builder::symbol_constant(const Operand& o, unsigned bytes) {
  Space space = Space::none;
  uint64_t at = symbol_address(o, &space);
  // The parameters of an inlined function are in local memory, those of the kernel in parameter
  // memory. The symbol's address is therefore generic: ld.param recognizes the memory by the
  // address window.
  if (space == Space::local && bytes == 8 && instance_->end >= 0 && is_formal(o.name)) {
    at += kLocalWindow;
  }
  return constant(at, bytes);
}

bool Builder::is_formal(const std::string& name) const {
  const Function& f = *instance_->function;
  const auto named = [&](const Variable& v) { return v.name == name; };
  return std::any_of(f.params.begin(), f.params.end(), named) ||
         std::any_of(f.results.begin(), f.results.end(), named);
}

int32_t Builder::carry_flag() {
  if (carry_flag_ == kNoRegister) {
    carry_flag_ = static_cast<int32_t>(lane_bytes_);
    kernel_->saved_registers.emplace_back(carry_flag_, 0);
    lane_bytes_ += 64;
  }
  return carry_flag_;
}

bool Builder::constant_value(int32_t o, uint64_t* value) const {
  for (const auto& item : constants_) {
    if (item.second != o) continue;
    *value = item.first.first;
    return true;
  }
  return false;
}

uint64_t Builder::integer(const Operand& o) {
  if (o.kind != Operand::integer) refuse_operand("an integer constant is expected");
  return o.bits;
}

size_t Builder::pool_operands(const std::vector<int32_t>& operands) {
  const size_t at = kernel_->operand_pool.size();
  kernel_->operand_pool.insert(kernel_->operand_pool.end(), operands.begin(), operands.end());
  return at;
}

// Returns the address of a symbol and sets `space` to its state space.
uint64_t Builder::symbol_address(const Operand& o, Space* space) {
  const auto offset = static_cast<uint64_t>(o.offset);
  const auto local = instance_->locals.find(o.name);
  if (local != instance_->locals.end()) {
    *space = Space::local;
    return local->second + offset;
  }
  const auto param = instance_->params.find(o.name);
  if (param != instance_->params.end()) {
    *space = Space::param;
    return param->second + offset;
  }
  const Symbols& known = symbols();
  const auto shared = shared_.find({&known, o.name});
  if (shared != shared_.end()) {
    *space = Space::shared;
    return shared->second + offset;
  }
  const auto global = known.addresses.find(o.name);
  if (global != known.addresses.end()) {
    *space = Space::global;
    return global->second + offset;
  }
  const auto function = known.functions.find(o.name);
  if (function != known.functions.end()) {
    if (!function->second->defined) refuse_operand("'" + o.name + "' is not defined");
    *space = Space::generic;
    return kFunctionWindow + 16 * uint64_t{function->second->number};
  }
  const auto& variables = known.module->variables;
  const bool external = std::any_of(variables.begin(), variables.end(), [&](const Variable& v) {
    return v.name == o.name && v.linkage == Linkage::external;
  });
  refuse_operand("'" + o.name + (external ? "' is external and not defined" : "' is not declared"));
}

int32_t Builder::address(const Operand& o, Space* space, unsigned* width, int64_t* offset) {
  if (o.kind != Operand::memory) refuse_operand("a memory operand is expected");
  const Operand& base = o.parts[0];
  *offset = o.offset;
  *width = 8;
  if (base.kind == Operand::reg) {
    *width = register_bytes(base);
    if (*width != 4 && *width != 8) refuse_operand("an address has 32 or 64 bits");
    reads_.push_back(slot(base) / 4);
    return slot(base);
  }
  if (base.kind == Operand::integer) return constant(base.bits, 8);
  Space found = Space::none;
  const uint64_t at = symbol_address(base, &found);
  if (*space == Space::generic && found == Space::shared) {
    *space = Space::shared;
  } else if (*space == Space::generic || *space == Space::constant) {
    *space = found;
  } else if (*space == Space::param && found == Space::local) {
    *space = Space::local;
  }
  if (found != *space) refuse_operand("'" + base.name + "' is in another state space");
  return constant(at, 8);
}

// ---- labels -----------------------------------------------------------------------------------

int Builder::label_of(Instance& instance, const std::string& name) {
  const auto found = instance.labels.find(name);
  if (found == instance.labels.end()) {
    refuse_operand("the label '" + name + "' is not defined");
  }
  return found->second;
}

void Builder::branch_to(size_t instruction, int label) { jumps_.emplace_back(instruction, label); }

// ---- emission ---------------------------------------------------------------------------------

void Builder::set_guard(Instr* in, const Statement& s) {
  if (s.guard < 0) return;
  Operand o;
  o.kind = Operand::reg;
  o.index = s.guard;
  o.name = instance_->function->registers[static_cast<size_t>(s.guard)].name;
  o.negated = s.guard_negated;
  in->guard = pred_src(o);
  if (in->guarded == nullptr) {
    in->guarded = in->run;
    in->run = run_guarded;
  }
}

void Builder::finish(const Opcode& op, Instr in, const Statement& s) {
  set_guard(&in, s);
  if (kernel_->code.size() >= kMaxInstructions) {
    syntax_error(s.line, "the kernel has more than 2000000 instructions");
  }
  kernel_->code.push_back(in);
  if (!options().count_file.empty()) {
    Instr& counted = kernel_->code.back();
    kernel_->counted.push_back({counted.run, category_of(op.text()), reads_, writes_});
    counted.run = count_instruction;
  }
  reads_.clear();
  writes_.clear();
  kernel_->lines.push_back(s.line);
  kernel_->texts.push_back(static_cast<uint16_t>(symbols().number));
  kernel_->locations.push_back(s.location);
  kernel_->text.push_back(op.text());
}

void Builder::place_variables(const Function& f, Instance& instance) {
  for (const Variable& v : f.variables) {
    if (v.space != Space::local && v.space != Space::param) continue;
    local_at_ = round_up(local_at_, v.align);
    instance.locals[v.name] = local_at_;
    local_at_ += v.bytes;
    if (local_at_ > kMaxLocalBytes) {
      syntax_error(v.line, "the kernel needs more than 512 KiB of local memory");
    }
  }
}

void Builder::emit(Instance& instance, const Statement& s, unsigned depth) {
  instance_ = &instance;
  statement_ = &s;
  operands_ = &s.operands;
  text_number_ = symbols().number;
  if (!s.label.empty()) {
    labels_[static_cast<size_t>(instance.labels[s.label])] = kernel_->code.size();
    return;
  }
  Opcode op(s.opcode, s.line);
  Instr in;
  reads_.clear();
  writes_.clear();
  if (op.base == "call") {
    emit_call(instance, s, depth);
    return;
  }
  if (op.base == "bra") {
    op.take("uni");
    in.run = in.guarded = jump;
    branch_to(kernel_->code.size(), label_of(instance, operand(0).name));
    if (!op.finished()) unsupported(s.line, s.opcode);
    finish(op, in, s);
    return;
  }
  if (op.base == "brx") {
    emit_indexed_branch(instance, s, op, in);
    return;
  }
  if ((op.base == "ret" && instance.end >= 0)) {
    op.take("uni");
    in.run = in.guarded = jump;
    branch_to(kernel_->code.size(), instance.end);
    finish(op, in, s);
    return;
  }
  for (Decoder* decoder : kDecoders) {
    if (!decoder(*this, op, in)) continue;
    if (!op.finished()) {
      unsupported(s.line, "'" + s.opcode + "' (the modifier '" + op.rest() + "')");
    }
    if (in.run == nullptr) unsupported(s.line, "'" + s.opcode + "'");
    finish(op, in, s);
    return;
  }
  unsupported(s.line, "'" + s.opcode + "'");
}

void Builder::emit_indexed_branch(Instance& instance, const Statement& s, Opcode& op, Instr in) {
  if (!op.take("idx")) unsupported(s.line, s.opcode);
  op.take("uni");
  const auto list = instance.function->targets.find(operand(1).name);
  if (list == instance.function->targets.end()) refuse_operand("the list of targets is missing");
  in.op[0] = src(operand(0), Type::u32);
  in.count = static_cast<uint16_t>(std::min<size_t>(list->second.size(), 65535));
  std::vector<int> table;
  for (const std::string& name : list->second) table.push_back(label_of(instance, name));
  in.imm = static_cast<int64_t>(pool_operands(std::vector<int32_t>(table.size())));
  op.base = "brx.idx";
  for (Decoder* decoder : kDecoders) {
    if (decoder(*this, op, in)) break;
  }
  for (size_t i = 0; i < table.size(); ++i) {
    pool_jumps_.push_back({kernel_->code.size(), static_cast<size_t>(in.imm) + i, table[i]});
  }
  finish(op, in, s);
}

// ---- calls ------------------------------------------------------------------------------------

void Builder::emit_jump(int label, const Statement& s) {
  Instr in;
  in.run = in.guarded = jump;
  branch_to(kernel_->code.size(), label);
  finish(Opcode(s.opcode, s.line), in, s);
}

void Builder::emit_call(Instance& instance, const Statement& s, unsigned depth) {
  size_t at = 0;
  std::vector<Operand> results;
  if (at < s.operands.size() && s.operands[at].kind == Operand::list) {
    results = s.operands[at++].parts;
  }
  const Operand& callee = operand(at++);
  std::vector<Operand> arguments;
  if (at < s.operands.size() && s.operands[at].kind == Operand::list) {
    arguments = s.operands[at++].parts;
  }
  const int after = static_cast<int>(labels_.size());
  labels_.push_back(0);
  if (s.guard >= 0) {
    Statement inverted = s;
    inverted.guard_negated = !s.guard_negated;
    emit_jump(after, inverted);
  }
  Statement unguarded = s;
  unguarded.guard = -1;
  statement_ = &unguarded;
  const Call call{unguarded, callee, std::move(arguments), std::move(results)};
  if (callee.kind == Operand::reg) {
    emit_indirect_call(instance, call, depth);
  } else {
    const auto found = symbols().functions.find(callee.name);
    if (found != symbols().functions.end() && found->second->defined) {
      emit_body(instance, call, *found->second, depth);
    } else if (!emit_special_call(instance, call)) {
      unsupported(s.line, "the function '" + callee.name + "', which is not defined,");
    }
  }
  labels_[static_cast<size_t>(after)] = kernel_->code.size();
  instance_ = &instance;
  statement_ = &s;
}

void Builder::check_inlining(unsigned depth) const {
  const unsigned line = statement_->line;
  if (depth >= kMaxDepth) unsupported(line, "calls nested more than 32 deep");
  if (inlined_ >= kMaxInlined) unsupported(line, "a kernel with more than 20000 inlined calls");
}

// Adds mov instructions for the arguments (or the results) that an inlined call passes in
// registers.
void Builder::emit_copies(Instance& instance, Instance& inner, const Call& call, bool results) {
  const std::vector<Variable>& formals = results ? inner.function->results : inner.function->params;
  const std::vector<Operand>& actuals = results ? call.results : call.arguments;
  for (size_t i = 0; i < formals.size(); ++i) {
    if (formals[i].space == Space::param) continue;
    const Type type = formals[i].type;
    const unsigned bytes = std::max(2u, size_of(type));
    if (type == Type::pred || bytes > 8) unsupported(call.statement.line, "arguments of this type");
    Operand formal;
    formal.kind = Operand::reg;
    formal.name = formals[i].name;
    // Parser::body() declares the registers of parameters before those of the body, so the first
    // register with the name belongs to the parameter.
    const auto& registers = inner.function->registers;
    const auto at = std::find_if(registers.begin(), registers.end(),
                                 [&](const Register& r) { return r.name == formal.name; });
    formal.index = static_cast<int>(at - registers.begin());
    Instr in;
    in.run = in.guarded = bytes == 2 ? move_b16 : bytes == 4 ? move_b32 : move_b64;
    instance_ = &instance;
    if (results) {
      in.op[0] = dst(actuals[i], bytes);
    } else {
      in.op[1] = src(actuals[i], type);
    }
    instance_ = &inner;
    in.op[results ? 1 : 0] = slot(formal);
    instance_ = &instance;
    if (in.op[0] != kNoRegister) finish(Opcode("mov", call.statement.line), in, call.statement);
  }
}

// Adds an inlined copy of a called function. If the call is already inside an inlined copy of this
// function, adds a recursive call instead.
void Builder::emit_body(Instance& instance, const Call& call, const Function& f, unsigned depth) {
  const auto active = std::find(active_.begin(), active_.end(), &f);
  if (active != active_.end()) {
    emit_recursive_call(instance, call, static_cast<size_t>(active - active_.begin()));
    return;
  }
  check_inlining(depth);
  ++inlined_;
  if (call.arguments.size() != f.params.size() || call.results.size() != f.results.size()) {
    refuse_operand("the arguments of '" + f.name + "' do not match its declaration");
  }
  Instance inner;
  inner.function = &f;
  inner.slots.assign(f.registers.size(), kNoRegister);
  inner.end = static_cast<int>(labels_.size());
  labels_.push_back(0);
  const auto pass = [&](const Variable& formal, const Operand& actual) {
    if (formal.space != Space::param) return;
    const auto variable = instance.locals.find(actual.name);
    if (variable == instance.locals.end()) {
      unsupported(call.statement.line, "arguments of calls that are no .param variables");
    }
    inner.locals[formal.name] = variable->second;
  };
  for (size_t i = 0; i < f.params.size(); ++i) pass(f.params[i], call.arguments[i]);
  for (size_t i = 0; i < f.results.size(); ++i) pass(f.results[i], call.results[i]);
  emit_copies(instance, inner, call, false);
  inner.number = static_cast<int>(inlined_);
  inner.begin = static_cast<int>(labels_.size());
  labels_.push_back(kernel_->code.size());
  emit_function(f, inner, depth + 1);
  labels_[static_cast<size_t>(inner.end)] = kernel_->code.size();
  instance_ = &instance;
  statement_ = &call.statement;
  if (inner.recursive) {
    Instr in;
    in.run = in.guarded = recursive_return;
    in.imm = inner.number;
    finish(Opcode("ret", call.statement.line), in, call.statement);
  }
  emit_copies(instance, inner, call, true);
}

// Adds a recursive call: a call of the function active_[outer] inside the inlined copy of this
// function, instances_[outer]. At run time, the call saves the thread's registers, and the
// parameter memory of instances_[outer] and of all copies that are inlined inside it. It then jumps
// to the beginning of instances_[outer] (recursion.cpp).
void Builder::emit_recursive_call(Instance& instance, const Call& call, size_t outer) {
  constexpr int32_t kFrameBytes = 32;  // stack bytes counted for the return address and registers
  Instance& called = *instances_[outer];
  const Function& f = *called.function;
  const unsigned line = call.statement.line;
  if (outer == 0) unsupported(line, "a call of a kernel");
  if (call.arguments.size() != f.params.size() || call.results.size() != f.results.size()) {
    refuse_operand("the arguments of '" + f.name + "' do not match its declaration");
  }
  std::vector<int32_t> pool = {0, called.number, 0};
  std::vector<int32_t> ranges;
  const auto add = [&](const std::vector<Variable>& formals, const std::vector<Operand>& actuals,
                       bool results) {
    pool.push_back(static_cast<int32_t>(formals.size()));
    for (size_t i = 0; i < formals.size(); ++i) {
      const auto actual = instance.locals.find(actuals[i].name);
      if (formals[i].space != Space::param || actual == instance.locals.end()) {
        unsupported(line, "the recursive function '" + f.name + "' with arguments in registers");
      }
      const auto formal = static_cast<int32_t>(called.locals.at(formals[i].name));
      const auto given = static_cast<int32_t>(actual->second);
      const auto bytes = static_cast<int32_t>(formals[i].bytes);
      pool.insert(pool.end(), {results ? formal : given, results ? given : formal, bytes});
      ranges.insert(ranges.end(), {formal, bytes});
    }
  };
  add(f.params, call.arguments, false);
  add(f.results, call.results, true);
  for (size_t i = outer; i < active_.size(); ++i) {
    pool[2] += kFrameBytes;
    for (const Variable& v : active_[i]->variables) {
      if (v.space == Space::local) {
        unsupported(line, "the recursive function '" + f.name + "' with local variables in memory");
      }
      if (v.space != Space::param) continue;
      pool[2] += static_cast<int32_t>(round_up(v.bytes, 8));
      ranges.insert(ranges.end(), {static_cast<int32_t>(instances_[i]->locals.at(v.name)),
                                   static_cast<int32_t>(v.bytes)});
    }
  }
  pool.push_back(static_cast<int32_t>(ranges.size() / 2));
  pool.insert(pool.end(), ranges.begin(), ranges.end());
  called.recursive = kernel_->recursive = true;
  Instr in;
  in.run = in.guarded = recursive_call;
  const size_t at = pool_operands(pool);
  in.imm = static_cast<int64_t>(at);
  pool_jumps_.push_back({kernel_->code.size(), at, called.begin});
  finish(Opcode(call.statement.opcode, line), in, call.statement);
}

// Returns whether an indirect call with these numbers of arguments and results may call `f`.
static bool fits(const Function& f, size_t arguments, size_t results) {
  return f.params.size() == arguments && f.results.size() == results;
}

// Adds an indirect call: inlines all functions that the call may reach and adds a branch to one of
// them. The call may reach the functions in its .calltargets list. Without a list, it may reach
// every function whose address is taken and whose numbers of arguments and results match. Functions
// are excluded if the call itself is inside an inlined copy of them.
void Builder::emit_indirect_call(Instance& instance, const Call& call, unsigned depth) {
  const std::vector<Operand>& operands = call.statement.operands;
  std::vector<const Function*> candidates;
  const auto list = instance.function->targets.find(operands.back().name);
  if (operands.back().kind == Operand::symbol && list != instance.function->targets.end()) {
    for (const std::string& name : list->second) {
      const auto found = symbols().functions.find(name);
      if (found == symbols().functions.end() || !found->second->defined) {
        refuse_operand("the function '" + name + "' is not defined");
      }
      candidates.push_back(found->second);
    }
  } else {
    for (const Function* f : called_) {
      const bool active = std::find(active_.begin(), active_.end(), f) != active_.end();
      if (!active && fits(*f, call.arguments.size(), call.results.size())) candidates.push_back(f);
    }
  }
  Instr in;
  in.run = in.guarded = indirect_call;
  in.op[0] = src(call.callee, Type::u64);
  in.count = static_cast<uint16_t>(std::min<size_t>(candidates.size(), 65535));
  const size_t pool = pool_operands(std::vector<int32_t>(2 * candidates.size()));
  in.imm = static_cast<int64_t>(pool);
  const size_t branch = kernel_->code.size();
  finish(Opcode(call.statement.opcode, call.statement.line), in, call.statement);
  const int after = static_cast<int>(labels_.size());
  labels_.push_back(0);
  for (size_t k = 0; k < candidates.size(); ++k) {
    kernel_->operand_pool[pool + 2 * k] = static_cast<int32_t>(candidates[k]->number);
    const int body = static_cast<int>(labels_.size());
    labels_.push_back(kernel_->code.size());
    pool_jumps_.push_back({branch, pool + 2 * k + 1, body});
    emit_body(instance, call, *candidates[k], depth);
    emit_jump(after, call.statement);
  }
  labels_[static_cast<size_t>(after)] = kernel_->code.size();
}

// Emits a call of a function that the device provides. Returns false for any other function.
bool Builder::emit_special_call(Instance& instance, const Call& call) {
  const std::string& name = call.callee.name;
  Instr in;
  size_t count = 0;
  if (name == "vprintf") {
    in.kind = kVprintf;
    count = 2;
  } else if (name == "__assertfail") {
    in.kind = kAssertFail;
    count = 5;
  } else if (name == "cudaGraphSetConditional") {
    in.kind = kSetConditional;
    count = 2;
  } else {
    return false;
  }
  if (call.arguments.size() != count) refuse_operand("'" + name + "' has other arguments");
  std::vector<int32_t> places;
  for (const Operand& argument : call.arguments) {
    const auto found = instance.locals.find(argument.name);
    if (found == instance.locals.end()) refuse_operand("an argument of '" + name + "' is invalid");
    places.push_back(static_cast<int32_t>(found->second));
  }
  int32_t place = -1;
  if (!call.results.empty()) {
    const auto found = instance.locals.find(call.results[0].name);
    if (found != instance.locals.end()) place = static_cast<int32_t>(found->second);
  }
  places.push_back(place);
  in.imm = static_cast<int64_t>(pool_operands(places));
  in.run = special_call;
  finish(Opcode(call.statement.opcode, call.statement.line), in, call.statement);
  return true;
}

void Builder::emit_function(const Function& f, Instance& instance, unsigned depth) {
  active_.push_back(&f);
  instances_.push_back(&instance);
  place_variables(f, instance);
  for (const Statement& s : f.body) {
    if (s.label.empty()) continue;
    if (!instance.labels.emplace(s.label, static_cast<int>(labels_.size())).second) {
      syntax_error(s.line, "the label '" + s.label + "' is defined twice");
    }
    labels_.push_back(0);
  }
  for (const Statement& s : f.body) emit(instance, s, depth);
  active_.pop_back();
  instances_.pop_back();
}

namespace {

// Adds the names of the symbols in an operand.
void add_names(const Operand& o, std::map<std::string, bool>* names) {
  if (o.kind == Operand::symbol) (*names)[o.name] = true;
  for (const Operand& part : o.parts) add_names(part, names);
}

std::map<std::string, bool> names_in(const Function& f) {
  std::map<std::string, bool> names;
  for (const Statement& s : f.body) {
    for (const Operand& o : s.operands) add_names(o, &names);
  }
  for (const auto& list : f.targets) {
    for (const std::string& name : list.second) names[name] = true;
  }
  return names;
}

}  // namespace

// Assigns addresses to the shared variables that the kernel uses itself or through functions that
// it may call. Dynamic shared memory comes last.
void Builder::place_shared(const Function& entry) {
  std::vector<const Function*> reached = {&entry};
  std::set<const Function*> known = {&entry};
  for (const Function* f : called_) {
    if (known.insert(f).second) reached.push_back(f);
  }
  std::vector<std::pair<const Symbols*, const Variable*>> dynamic;
  const auto place = [&](const Symbols* scope, const Variable& v) {
    if (v.space != Space::shared || shared_.count({scope, v.name}) != 0) return;
    if (v.dynamic || (v.linkage == Linkage::external && v.bytes == 0)) {
      dynamic.emplace_back(scope, &v);
      return;
    }
    shared_at_ = round_up(shared_at_, v.align);
    shared_[{scope, v.name}] = shared_at_;
    shared_at_ += v.bytes;
    if (shared_at_ - kSharedBase > (227u << 10)) {
      syntax_error(v.line, "the kernel needs more than 232448 bytes of shared memory");
    }
  };
  for (size_t i = 0; i < reached.size(); ++i) {
    const Function& f = *reached[i];
    const auto names = names_in(f);
    for (const auto& item : names) {
      const auto found = f.symbols->functions.find(item.first);
      if (found == f.symbols->functions.end()) continue;
      if (known.insert(found->second).second) reached.push_back(found->second);
    }
    for (const Variable& v : f.symbols->module->variables) {
      if (names.count(v.name) != 0) place(f.symbols, v);
    }
    for (const Variable& v : f.variables) place(f.symbols, v);
  }
  // Dynamic shared memory gets no larger alignment than its declarations request. An access that
  // relies on a larger one can then be reported as misaligned.
  unsigned align = 1;
  for (const auto& item : dynamic) align = std::max(align, item.second->align);
  shared_at_ = round_up(shared_at_, align);
  for (const auto& item : dynamic) shared_[{item.first, item.second->name}] = shared_at_;
  kernel_->shared_bytes = static_cast<unsigned>(shared_at_) - kSharedBase;
}

void Builder::place_params(const Function& entry, Instance& instance) {
  Kernel& k = *kernel_;
  uint64_t at = 0;
  for (const Variable& v : entry.params) {
    at = round_up(at, v.align);
    instance.params[v.name] = at;
    k.param_offsets.push_back(static_cast<unsigned>(at));
    k.param_sizes.push_back(static_cast<unsigned>(v.bytes));
    k.param_pointers.push_back(0);
    at += v.bytes;
    if (at > kMaxParamBytes) syntax_error(v.line, "the parameters exceed 32764 bytes");
  }
  k.param_bytes = static_cast<unsigned>(at);
}

// Stores the distance of each branch in its instruction. Distances are known only after all
// instructions have been added.
void Builder::resolve_jumps() {
  Kernel& k = *kernel_;
  const auto distance = [&](size_t from, int label) {
    return static_cast<int64_t>(labels_[static_cast<size_t>(label)]) - static_cast<int64_t>(from);
  };
  for (const auto& jump : jumps_) k.code[jump.first].imm = distance(jump.first, jump.second);
  for (const PoolJump& jump : pool_jumps_) {
    k.operand_pool[jump.pool] = static_cast<int32_t>(distance(jump.instruction, jump.label));
  }
}

void Builder::make_constants() {
  Kernel& k = *kernel_;
  k.constant_bytes = constants_at_;
  k.constant_memory = std::make_unique<char[]>(constants_at_ + 64);
  const auto raw = reinterpret_cast<uintptr_t>(k.constant_memory.get());
  char* base = k.constant_memory.get() + (round_up(raw, 64) - raw);
  k.constants = base;
  for (const auto& value : constant_values_) {
    char* to = base + (constants_[value] & ~3);
    for (unsigned lane = 0; lane < kLanes; ++lane) {
      std::memcpy(to + lane * value.second, &value.first, value.second);
    }
  }
}

std::shared_ptr<Kernel> Builder::build(const Function& entry, bool linked) {
  kernel_ = std::make_shared<Kernel>();
  Kernel& k = *kernel_;
  Instance instance;
  instance.function = &entry;
  instance.slots.assign(entry.registers.size(), kNoRegister);
  instance_ = &instance;
  k.name = entry.name;
  k.target = entry.symbols->module->target;
  k.linked = linked;
  k.max_threads = entry.max_threads;
  place_shared(entry);
  place_params(entry, instance);
  emit_function(entry, instance, 0);
  // A thread that reaches the end of the kernel exits.
  Statement end;
  end.line = entry.body.empty() ? entry.line : entry.body.back().line;
  end.opcode = "exit";
  Instr in;
  in.run = in.guarded = exit_lanes;
  statement_ = &end;
  finish(Opcode("exit", end.line), in, end);
  resolve_jumps();
  if (!k.recursive) k.saved_registers.clear();
  k.register_bytes = lane_bytes_;
  k.local_bytes = local_at_ > kLocalBase ? static_cast<unsigned>(round_up(local_at_, 64)) : 0;
  for (const auto& item : special_slots_) k.specials.emplace_back(item.first, item.second);
  make_constants();
  return kernel_;
}

std::string Kernel::where(const Instr* in) const {
  const auto index = static_cast<size_t>(in - code.data());
  if (index >= lines.size()) return "";
  std::string out = "PTX ";
  if (linked) out += "text " + std::to_string(texts[index] + 1) + " ";
  out += "line " + std::to_string(lines[index]);
  const Location& location = locations[index];
  if (location.line != 0) {
    const auto file = files.find({texts[index], location.file});
    std::string name = file == files.end() ? "file " + std::to_string(location.file) : file->second;
    const size_t slash = name.rfind('/');
    if (slash != std::string::npos) name.erase(0, slash + 1);
    out += " (" + name + ":" + std::to_string(location.line) + ")";
  }
  return out + " " + text[index];
}

}  // namespace ptx
}  // namespace softcuda
