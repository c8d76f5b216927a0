// Loading of PTX modules: links one or several texts, allocates the module variables, and builds
// the kernels.
#include <algorithm>
#include <cstring>
#include <new>
#include <set>

#include "builder.h"
#include "library.h"

namespace softcuda {
namespace ptx {

namespace {

constexpr size_t kMaxText = size_t{256} << 20;

std::string error_text(const Error& e, size_t text, size_t count) {
  std::string where = "PTX line " + std::to_string(e.line);
  if (count > 1) where = "PTX text " + std::to_string(text + 1) + " line " + std::to_string(e.line);
  return where + ": " + e.text + (e.unsupported ? " is not supported by the soft device" : "");
}

// Links modules: determines which names each function can use, and assigns addresses to variables.
class Linker {
 public:
  Linker(const std::vector<std::string>& texts, LoadedModule* module)
      : texts_(texts), target_(module) {}

  void run() {
    for (current_ = 0; current_ < texts_.size(); ++current_) {
      modules_.push_back(parse(texts_[current_]));
    }
    symbols_.resize(modules_.size());
    for (current_ = 0; current_ < modules_.size(); ++current_) {
      symbols_[current_].module = &modules_[current_];
      symbols_[current_].number = static_cast<unsigned>(current_);
      declare_functions();
      declare_variables();
    }
    share_names();
    allocate_variables();
    for (current_ = 0; current_ < modules_.size(); ++current_) note_addresses_of_functions();
    name_variables();
    for (size_t i = 0; i < modules_.size(); ++i) {
      for (const auto& f : modules_[i].functions) {
        if (f->entry && f->defined) add_kernel(*f);
      }
    }
  }
  size_t current() const { return current_; }

 private:
  // All modules see one definition of a name. Returns whether a definition with linkage `found`
  // replaces one with linkage `known` that was found before.
  static bool replaces(Linkage known, Linkage found) {
    return known == Linkage::weak && found == Linkage::visible;
  }

  void declare_functions() {
    Symbols& own = symbols_[current_];
    for (const auto& f : modules_[current_].functions) {
      f->symbols = &own;
      f->number = ++function_count_;
      const Function*& known = own.functions[f->name];
      if (known != nullptr && known->defined && f->defined) {
        syntax_error(f->line, "the function '" + f->name + "' is defined twice");
      }
      if (known == nullptr || f->defined) known = f.get();
    }
    for (const auto& item : own.functions) {
      const Function& f = *item.second;
      if (!f.defined || f.linkage == Linkage::internal) continue;
      const Function*& known = functions_[f.name];
      if (known != nullptr && known->linkage == Linkage::visible && f.linkage == Linkage::visible) {
        syntax_error(f.line, "the function '" + f.name + "' is defined in two modules");
      }
      if (known == nullptr || replaces(known->linkage, f.linkage)) known = &f;
    }
  }

  // Assigns offsets in the memory of the module to the .global and .const variables.
  void declare_variables() {
    std::map<std::string, const Variable*> names;
    for (const Variable& v : modules_[current_].variables) {
      if (v.space != Space::global && v.space != Space::constant) continue;
      if (v.linkage == Linkage::external) continue;
      if (!names.emplace(v.name, &v).second)
        syntax_error(v.line, "the variable '" + v.name + "' is defined twice");
      bytes_ = (bytes_ + v.align - 1) / v.align * v.align;
      if (bytes_ + v.bytes > (uint64_t{1} << 32))
        syntax_error(v.line, "the module's variables are too large");
      symbols_[current_].addresses[v.name] = bytes_;
      placed_.push_back({&v, current_, bytes_});
      if (v.linkage != Linkage::internal) {
        const auto known = variables_.emplace(v.name, placed_.back());
        const Linkage first = known.first->second.variable->linkage;
        if (!known.second && first == Linkage::visible && v.linkage == Linkage::visible)
          syntax_error(v.line, "the variable '" + v.name + "' is defined in two modules");
        if (!known.second && replaces(first, v.linkage)) known.first->second = placed_.back();
      }
      bytes_ += std::max<uint64_t>(v.bytes, 1);
    }
  }

  // Adds the visible names of all modules to the names of each module. If a weak definition was
  // replaced, its own module uses the replacement too.
  void share_names() {
    for (Symbols& own : symbols_) {
      std::set<std::string> internal_names;
      for (const Variable& v : own.module->variables) {
        if (v.linkage == Linkage::internal) internal_names.insert(v.name);
      }
      for (const auto& item : functions_) {
        const Function*& known = own.functions[item.first];
        const bool internal =
            known != nullptr && known->defined && known->linkage == Linkage::internal;
        if (!internal) known = item.second;
      }
      for (const auto& item : variables_) {
        const bool internal = internal_names.count(item.first) != 0;
        if (!internal) own.addresses[item.first] = item.second.offset;
      }
    }
  }

  void allocate_variables() {
    if (placed_.empty()) return;
    memory_ = std::make_shared<ModuleMemory>(bytes_);
    std::memset(memory_->storage, 0, bytes_);
    for (Symbols& own : symbols_) {
      for (auto& item : own.addresses) item.second += memory_->address;
    }
    for (const Placed& item : placed_) {
      current_ = item.module;
      initialize(*item.variable, memory_->storage + item.offset);
    }
  }

  // Enters the variables into the table that cuModuleGetGlobal reads. If several modules have a
  // variable of one name, the variable that all modules see takes precedence.
  void name_variables() {
    const auto add = [&](const Placed& item) {
      target_->addresses.emplace(item.variable->name, std::make_pair(memory_->address + item.offset,
                                                                     size_t{item.variable->bytes}));
    };
    for (const auto& item : variables_) add(item.second);
    for (const Placed& item : placed_) add(item);
  }

  // Writes the initial value of a variable, including the addresses of other variables in it.
  void initialize(const Variable& v, char* to) {
    const Symbols& own = symbols_[current_];
    if (!v.initial.empty()) {
      std::memcpy(to, v.initial.data(), std::min<size_t>(v.initial.size(), v.bytes));
    }
    for (const Variable::Reference& reference : v.references) {
      const auto found = own.addresses.find(reference.name);
      const auto function = own.functions.find(reference.name);
      uint64_t address = 0;
      if (found != own.addresses.end()) {
        address = found->second + static_cast<uint64_t>(reference.addend);
      } else if (function != own.functions.end() && function->second->defined) {
        address = kFunctionWindow + 16 * uint64_t{function->second->number};
        take_address(*function->second);
      } else {
        unsupported(v.line, "an initial value with the address of '" + reference.name + "'");
      }
      std::memcpy(to + reference.offset, &address, sizeof address);
    }
  }

  void take_address(const Function& f) {
    if (!f.entry && std::find(called_.begin(), called_.end(), &f) == called_.end()) {
      called_.push_back(&f);
    }
  }

  // Finds the functions whose addresses instructions take.
  void note_addresses_of_functions() {
    for (const auto& f : modules_[current_].functions) {
      for (const Statement& s : f->body) {
        if (s.opcode.compare(0, 4, "call") == 0) continue;
        for (const Operand& o : s.operands) {
          if (o.kind != Operand::symbol) continue;
          const auto found = symbols_[current_].functions.find(o.name);
          if (found == symbols_[current_].functions.end()) continue;
          if (found->second->defined) take_address(*found->second);
        }
      }
    }
  }

  void add_kernel(const Function& f) {
    current_ = f.symbols->number;
    Builder builder(called_);
    try {
      target_->owned_kernels.push_back(builder.build(f, modules_.size() > 1));
    } catch (const Error&) {
      current_ = builder.text_number();
      throw;
    }
    Kernel& k = *target_->owned_kernels.back();
    for (size_t i = 0; i < modules_.size(); ++i) {
      for (const auto& file : modules_[i].files) {
        k.files[{static_cast<unsigned>(i), file.first}] = file.second;
      }
    }
    k.memory = memory_;
    k.waits_for_grid = k.target >= 90;
    k.entry.name = k.name.c_str();
    k.entry.run = nullptr;
    k.entry.nparams = static_cast<unsigned>(k.param_sizes.size());
    k.entry.max_threads = k.max_threads;
    k.entry.sizes = k.param_sizes.data();
    k.entry.offsets = k.param_offsets.data();
    k.entry.is_pointer = k.param_pointers.data();
  }

  // A variable with its offset in the memory of the linked module.
  struct Placed {
    const Variable* variable;
    size_t module;
    uint64_t offset;
  };

  const std::vector<std::string>& texts_;
  LoadedModule* target_;
  std::vector<ModuleText> modules_;
  std::vector<Symbols> symbols_;
  // Definitions that all modules see.
  std::map<std::string, const Function*> functions_;
  std::map<std::string, Placed> variables_;
  std::vector<Placed> placed_;
  uint64_t bytes_ = 0;
  unsigned function_count_ = 0;
  std::vector<const Function*> called_;  // functions whose addresses are taken
  std::shared_ptr<ModuleMemory> memory_;
  size_t current_ = 0;
};

}  // namespace

ModuleMemory::ModuleMemory(size_t bytes) : softcuda_memory{} {
  if (device().allocate_variables(bytes, this) != CUDA_SUCCESS) throw std::bad_alloc();
}

void check_syntax(const std::string& text, LoadedModule* module) {
  try {
    if (text.size() > kMaxText) syntax_error(1, "the module is longer than 256 MiB");
    parse(text);
  } catch (const Error& e) {
    module->error = CUDA_ERROR_INVALID_PTX;
    module->error_text = error_text(e, 0, 1);
  }
}

void load(const std::vector<std::string>& texts, LoadedModule* module) {
  Linker linker(texts, module);
  try {
    for (const std::string& text : texts) {
      if (text.size() > kMaxText) syntax_error(1, "the module is longer than 256 MiB");
    }
    linker.run();
  } catch (const Error& e) {
    *module = LoadedModule();
    module->error = e.unsupported ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_PTX;
    module->error_text = error_text(e, linker.current(), texts.size());
  }
}

}  // namespace ptx
}  // namespace softcuda
