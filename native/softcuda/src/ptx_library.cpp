// PTX modules: recognition of PTX texts, loading of the PTX library, the functions that the library
// calls, and calls of the library.
#include "ptx_library.h"

#include <dlfcn.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "conditionals.h"

namespace softcuda {
namespace ptx {

namespace {

// is_ptx() searches for ".version" in this number of bytes at the beginning of a text.
constexpr size_t kMaxHeader = 1 << 16;
constexpr size_t kMaxText = size_t{256} << 20;
constexpr char kPackHeader[] = "// PTX texts linked by the soft device, with their sizes:";

// ---- functions that the library calls ---------------------------------------------------------

using Reference = std::shared_ptr<Allocation>;

CUdeviceptr address_in_device_code(const Allocation& a, bool alias) {
  return alias ? a.alias : reinterpret_cast<CUdeviceptr>(a.storage);
}

softcuda_memory make_reference(const Reference& a, bool alias) {
  return {new Reference(a), address_in_device_code(*a, alias), a->storage, a->size,
          a->host || a->unified()};
}

int find_memory(unsigned long long address, size_t bytes, softcuda_memory* out) {
  Target target;
  std::string why;
  if (!resolve_for_device(address, bytes, &target, &why)) return 0;
  if (target.owner == nullptr || !target.live()) return 0;
  *out = make_reference(target.owner, is_alias(address));
  return 1;
}

void explain(unsigned long long address, size_t bytes, softcuda_memory* out, char* text,
             size_t text_size) {
  *out = softcuda_memory{};
  const Reference nearest = find_for_fault(address);
  if (nearest != nullptr && nearest->live && address >= nearest->alias) {
    const uint64_t offset = address - nearest->alias;
    out->address = nearest->alias;
    out->size = nearest->size;
    copy_text(offset >= nearest->size ? ", " + std::to_string(offset - nearest->size) +
                                            " bytes past the end of " + nearest->describe()
                                      : ", across the end of " + nearest->describe(),
              text, text_size);
    return;
  }
  Target target;
  std::string why;
  if (resolve_for_device(address, bytes, &target, &why) && target.owner != nullptr) {
    why = target.owner->describe();
  }
  copy_text(": " + (address == 0 ? "a null pointer" : why), text, text_size);
}

int is_live(const void* reference) {
  return (*static_cast<const Reference*>(reference))->live.load(std::memory_order_acquire);
}

void release(void* reference) { delete static_cast<Reference*>(reference); }

int allocate_variables(size_t bytes, softcuda_memory* out) {
  try {
    *out = make_reference(allocate_for_module(bytes), true);
    return CUDA_SUCCESS;
  } catch (const Refused& refused) {
    return refused.code;
  } catch (const std::bad_alloc&) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
}

void free_variables(void* reference) {
  free_for_module(*static_cast<Reference*>(reference));
  release(reference);
}

int is_condition_handle(unsigned long long handle) {
  return is_condition(reinterpret_cast<const softcuda_condition*>(handle));
}

const softcuda_ptx_device& device_functions() {
  static const softcuda_ptx_device& device = *new softcuda_ptx_device{
      settings().workers,
      [](int code, const char* text) { fault(code, text); },
      stack_limit,
      find_memory,
      explain,
      is_live,
      release,
      allocate_variables,
      free_variables,
      is_condition_handle,
  };
  return device;
}

// ---- the library ------------------------------------------------------------------------------

// The library; null until the first PTX module is loaded.
std::atomic<const softcuda_ptx_library*> g_library{nullptr};

// Returns the path in SOFTCUDA_PTX_LIBRARY or, by default, the path of libgraft_ptx.so in the
// folder of the soft device's library.
std::string library_path() {
  const char* configured = std::getenv("SOFTCUDA_PTX_LIBRARY");
  if (configured != nullptr && *configured != 0) return configured;
  Dl_info self{};
  dladdr(reinterpret_cast<const void*>(&kHooks), &self);
  const std::string path = self.dli_fname != nullptr ? self.dli_fname : "";
  return path.substr(0, path.rfind('/') + 1) + "libgraft_ptx.so";
}

[[noreturn]] void refuse_library(const std::string& reason, std::string* log) {
  *log = "PTX needs the PTX library of the soft device: " + reason +
         ". graft soft --code ptx builds it; SOFTCUDA_PTX_LIBRARY is its path";
  refuse(CUDA_ERROR_JIT_COMPILER_NOT_FOUND, *log);
}

// Returns the library, and loads it if it is not loaded yet. After a failed attempt, the next call
// tries again, because the program may have set SOFTCUDA_PTX_LIBRARY in the meantime.
const softcuda_ptx_library& load_library(std::string* log) {
  static std::mutex& mutex = *new std::mutex;
  std::lock_guard<std::mutex> lock(mutex);
  if (const auto* loaded = g_library.load()) return *loaded;
  const std::string path = library_path();
  void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) refuse_library(dlerror(), log);
  const auto* found =
      static_cast<const softcuda_ptx_library*>(dlsym(handle, "softcuda_ptx_library_v"));
  if (found == nullptr) refuse_library(path + " is another library", log);
  if (found->abi != SOFTCUDA_PTX_ABI) {
    refuse_library(path + " has the interface " + std::to_string(found->abi) +
                       ", but this device has " + std::to_string(SOFTCUDA_PTX_ABI),
                   log);
  }
  found->open(&device_functions());
  g_library.store(found);
  return *found;
}

// Returns the library. A PTX module must have been loaded before.
const softcuda_ptx_library& library() { return *g_library.load(std::memory_order_acquire); }

// Refuses the call if the library could not load a module.
void check_result(const softcuda_ptx_module& result, std::string* log) {
  *log = result.text;
  if (result.error == CUDA_SUCCESS) return;
  // If the result has no text, the log already contains the reason.
  require(!log->empty(), result.error);
  refuse(result.error, *log);
}

std::shared_ptr<const softcuda_ptx_module> own(const softcuda_ptx_module* module) {
  return {module, [](const softcuda_ptx_module* m) { library().free_module(m); }};
}

}  // namespace

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

std::string pack_texts(const std::vector<std::string>& texts) {
  std::string image = kPackHeader;
  for (const std::string& text : texts) image += " " + std::to_string(text.size());
  image += "\n.version\n";  // the beginning of every PTX image
  for (const std::string& text : texts) image += text;
  image += '\0';
  return image;
}

std::vector<std::string> unpack_texts(const char* image) {
  const size_t header = sizeof kPackHeader - 1;
  if (std::strncmp(image, kPackHeader, header) != 0) return {image};
  constexpr char kSecondLine[] = "\n.version\n";
  const size_t second = sizeof kSecondLine - 1;
  const char* end = std::strchr(image, '\n');
  if (end == nullptr || std::strncmp(end, kSecondLine, second) != 0) return {image};
  const char* text = end + second;
  std::vector<std::string> texts;
  for (const char* p = image + header; p < end && *p == ' ';) {
    char* next = nullptr;
    const size_t size = std::strtoull(p, &next, 10);
    if (next == p || next > end) break;
    // A stored size may be damaged and too large. strnlen() stops at the zero that ends the image.
    const size_t length = strnlen(text, std::min(size, kMaxText));
    texts.emplace_back(text, length);
    text += length;
    p = next;
  }
  return texts.empty() ? std::vector<std::string>{image} : texts;
}

void load(const std::vector<std::string>& texts, Module* module, std::string* log) {
  const softcuda_ptx_library& ptx = load_library(log);
  std::vector<const char*> starts;
  std::vector<size_t> sizes;
  for (const std::string& t : texts) {
    starts.push_back(t.data());
    sizes.push_back(t.size());
  }
  module->ptx = own(ptx.load(starts.data(), sizes.data(), static_cast<unsigned>(texts.size())));
  check_result(*module->ptx, log);
  for (unsigned i = 0; i < module->ptx->kernel_count; ++i) {
    const softcuda_ptx_kernel* kernel = module->ptx->kernels[i];
    auto function = std::make_shared<Function>();
    function->name = kernel->entry.name;
    function->copies.assign(settings().workers, &kernel->entry);
    function->ptx = kernel;
    function->max_dynamic_shared -= static_cast<int>(kernel->shared_bytes);
    module->functions.push_back(std::move(function));
  }
  for (unsigned i = 0; i < module->ptx->variable_count; ++i) {
    const softcuda_ptx_variable& v = module->ptx->variables[i];
    module->variables.emplace(v.name, std::make_pair(v.address, v.bytes));
  }
}

void check_syntax(const std::string& text, std::string* log) {
  check_result(*own(load_library(log).check_syntax(text.data(), text.size())), log);
}

// ---- launches ---------------------------------------------------------------------------------

AccessLog::AccessLog(const softcuda_ptx_kernel* kernel) : log(library().make_log(kernel)) {}

AccessLog::~AccessLog() { library().free_log(log); }

std::shared_ptr<AccessLog> make_access_log(const KernelWork& work) {
  const softcuda_ptx_kernel* kernel = work.function->ptx;
  if (kernel == nullptr || !library().checks_accesses()) return nullptr;
  return std::make_shared<AccessLog>(kernel);
}

void begin_launch(Op& op) {
  if (!library().checks_accesses()) return;
  const softcuda_ptx_kernel* kernel = op.work.kernel->function->ptx;
  auto launch = std::make_shared<Launch>();
  launch->log = op.precedes_programmatically ? std::make_shared<AccessLog>(kernel) : op.log;
  // A kernel that can execute griddepcontrol.wait may start before the preceding kernels have
  // completed, so its accesses are checked against the logged accesses of these kernels.
  if (kernel->waits_for_grid) {
    launch->preceding = op.unordered;
    for (const Op* primary : op.primaries) {
      if (primary->launch_state == nullptr || primary->launch_state->log == nullptr) continue;
      launch->preceding.push_back(primary->launch_state->log);
    }
  }
  std::vector<softcuda_ptx_log*> logs;
  for (const auto& preceding : launch->preceding) logs.push_back(preceding->log);
  launch->state = library().begin_launch(kernel, launch->log ? launch->log->log : nullptr,
                                         logs.data(), static_cast<unsigned>(logs.size()));
  op.launch_state = std::move(launch);
}

void end_launch(Op& op) {
  if (op.launch_state == nullptr) return;
  library().end_launch(std::exchange(op.launch_state->state, nullptr));
  op.launch_state->preceding.clear();
}

bool run_blocks(const Op& op, unsigned worker, uint64_t first, uint64_t last) {
  const KernelWork& work = *op.work.kernel;
  const softcuda_ptx_work launch{work.function->ptx, work.grid, work.block, work.shared_bytes,
                                 work.original.data()};
  softcuda_ptx_launch* const state = op.launch_state ? op.launch_state->state : nullptr;
  return library().run_blocks(&launch, state, worker, first, last) != 0;
}

void recover() { library().recover(); }

}  // namespace ptx
}  // namespace softcuda
