// Loading of PTX modules: recognition, linking of several texts, module variables, and the entries
// of the module's function table.
#include <algorithm>
#include <cctype>
#include <cstring>

#include "builder.h"
#include "ptx.h"

namespace softcuda {
namespace ptx {

namespace {

// Number of bytes of comments before .version that are searched.
constexpr size_t kMaxHeader = 1 << 16;
constexpr size_t kMaxText = size_t{256} << 20;

// What the rest of the device reads about a kernel, as in compiled images.
struct EntryTable {
  softcuda_entry entry{};
  std::shared_ptr<Kernel> kernel;
};

std::string error_text(const Error& e, size_t text, size_t count) {
  std::string where = "PTX line " + std::to_string(e.line);
  if (count > 1) where = "PTX text " + std::to_string(text + 1) + " line " + std::to_string(e.line);
  return where + ": " + e.text + (e.unsupported ? " is not supported by the soft device" : "");
}

class Linker {
 public:
  Linker(const std::vector<std::string>& texts, Module* module) : texts_(texts), target_(module) {}

  void run() {
    for (current_ = 0; current_ < texts_.size(); ++current_) {
      modules_.push_back(parse(texts_[current_]));
    }
    current_ = 0;
    find_functions();
    place_variables();
    for (current_ = 0; current_ < modules_.size(); ++current_) {
      for (const auto& f : modules_[current_].functions) {
        if (f->entry && f->defined) add_kernel(modules_[current_], *f);
      }
    }
  }
  size_t current() const { return current_; }

 private:
  void find_functions() {
    for (const ModuleText& m : modules_) {
      for (const auto& f : m.functions) {
        const Function*& known = functions_[f->name];
        if (known != nullptr && known->defined && f->defined) {
          syntax_error(f->line, "the function '" + f->name + "' is defined twice");
        }
        if (known == nullptr || f->defined) known = f.get();
      }
    }
  }

  // Allocates the .global and .const variables of the module.
  void place_variables() {
    std::map<std::string, uint64_t> offsets;
    std::vector<std::pair<const Variable*, uint64_t>> placed;
    uint64_t bytes = 0;
    for (const ModuleText& m : modules_) {
      for (const Variable& v : m.variables) {
        if (v.space != Space::global && v.space != Space::constant) continue;
        if (v.external) continue;
        if (offsets.count(v.name) != 0)
          syntax_error(v.line, "the variable '" + v.name + "' is defined twice");
        bytes = (bytes + v.align - 1) / v.align * v.align;
        offsets[v.name] = bytes;
        placed.emplace_back(&v, bytes);
        bytes += std::max<uint64_t>(v.bytes, 1);
        if (bytes > (uint64_t{1} << 32))
          syntax_error(v.line, "the module's variables are too large");
      }
    }
    if (placed.empty()) return;
    memory_ = std::make_shared<ModuleMemory>();
    memory_->allocation = allocate_for_module(bytes);
    const Allocation& a = *memory_->allocation;
    std::memset(a.storage, 0, bytes);
    for (const auto& item : offsets) addresses_[item.first] = a.alias + item.second;
    for (const auto& item : placed) {
      const Variable& v = *item.first;
      char* to = a.storage + item.second;
      std::memcpy(to, v.initial.data(), std::min<size_t>(v.initial.size(), v.bytes));
      for (const Variable::Reference& reference : v.references) {
        const auto found = addresses_.find(reference.name);
        if (found == addresses_.end()) {
          unsupported(v.line, "an initial value with the address of '" + reference.name + "'");
        }
        const uint64_t address = found->second + static_cast<uint64_t>(reference.addend);
        std::memcpy(to + reference.offset, &address, sizeof address);
      }
    }
  }

  void add_kernel(const ModuleText& m, const Function& f) {
    Builder builder(m);
    auto table = std::make_shared<EntryTable>();
    table->kernel = builder.build(f, addresses_, functions_);
    Kernel& k = *table->kernel;
    k.memory = memory_;
    softcuda_entry& entry = table->entry;
    entry.name = k.name.c_str();
    entry.run = nullptr;
    entry.nparams = static_cast<unsigned>(k.param_sizes.size());
    entry.max_threads = k.max_threads;
    entry.sizes = k.param_sizes.data();
    entry.offsets = k.param_offsets.data();
    entry.is_pointer = k.param_pointers.data();
    auto function = std::make_shared<softcuda::Function>();
    function->name = k.name;
    function->copies.assign(settings().workers, &entry);
    // The function shares the ownership of the table.
    function->ptx = std::shared_ptr<const Kernel>(table, table->kernel.get());
    target_->functions.push_back(std::move(function));
  }

  const std::vector<std::string>& texts_;
  Module* target_;
  std::vector<ModuleText> modules_;
  std::map<std::string, const Function*> functions_;
  std::map<std::string, uint64_t> addresses_;
  std::shared_ptr<ModuleMemory> memory_;
  size_t current_ = 0;
};

}  // namespace

ModuleMemory::~ModuleMemory() {
  if (allocation) free_for_module(allocation);
}

bool is_ptx(const void* image) {
  const char* p = static_cast<const char*>(image);
  const char* const end = p + kMaxHeader;
  while (p < end) {
    if (*p != 0 && std::isspace(static_cast<unsigned char>(*p))) {
      ++p;
    } else if (p[0] == '/' && p[1] == '/') {
      while (p < end && *p != 0 && *p != '\n') ++p;
    } else if (p[0] == '/' && p[1] == '*') {
      for (p += 2; p < end && *p != 0 && !(p[0] == '*' && p[1] == '/'); ++p) {
      }
      if (*p == 0) return false;
      p += 2;
    } else {
      return std::strncmp(p, ".version", 8) == 0;
    }
  }
  return false;
}

void load(const std::vector<std::string>& texts, Module* module, std::string* log) {
  Linker linker(texts, module);
  try {
    for (const std::string& text : texts) {
      if (text.size() > kMaxText) syntax_error(1, "the module is longer than 256 MiB");
    }
    linker.run();
  } catch (const Error& e) {
    module->functions.clear();
    *log = error_text(e, linker.current(), texts.size());
    refuse(e.unsupported ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_PTX, *log);
  }
}

}  // namespace ptx
}  // namespace softcuda
