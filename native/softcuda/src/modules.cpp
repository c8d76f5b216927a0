// Kernel images: ELF shared objects, one private copy per worker (invariants K1-K4).
#include "modules.h"

#include <dlfcn.h>
#include <elf.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

namespace softcuda {
namespace {

Handles<Module>& modules() {
  static Handles<Module>& h = *new Handles<Module>(0x52000000000000);
  return h;
}
Handles<Function>& functions() {
  static Handles<Function>& h = *new Handles<Function>(0x53000000000000);
  return h;
}

// cuModuleLoadData is given no length: an ELF file ends with its section header table.
CUresult image_size(const void* image, size_t* size) {
  Elf64_Ehdr header;
  std::memcpy(&header, image, sizeof header);
  if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 || header.e_ident[EI_CLASS] != ELFCLASS64) {
    return refuse(CUDA_ERROR_INVALID_IMAGE,
                  "not an ELF image; the soft device loads what softcuda/compile.py builds");
  }
#if defined(__x86_64__)
  constexpr unsigned kMachine = EM_X86_64;
#else
  constexpr unsigned kMachine = EM_AARCH64;
#endif
  if (header.e_machine != kMachine) {
    return refuse(CUDA_ERROR_NO_BINARY_FOR_GPU, header.e_machine == 190
                                                    ? "the image holds NVIDIA GPU code"
                                                    : "the image is for another processor");
  }
  *size = header.e_shoff + static_cast<size_t>(header.e_shentsize) * header.e_shnum;
  return CUDA_SUCCESS;
}

// The loader returns an already loaded object for an equal path, and descriptor numbers recur.
// Spelling each path differently ("/./" or "//" per bit of a counter) keeps copies apart.
std::string unique_path(int descriptor) {
  static std::atomic<unsigned> counter{1};
  std::string path = "/proc/self/fd/";
  for (unsigned bits = counter++; bits != 0; bits >>= 1) path += bits & 1 ? "./" : ".//";
  return path + std::to_string(descriptor);
}

void* load_copy(const void* image, size_t size, std::string* why) {
  const int descriptor = memfd_create("softcuda-kernel", MFD_CLOEXEC);
  if (descriptor < 0) {
    *why = "memfd_create failed";
    return nullptr;
  }
  const char* from = static_cast<const char*>(image);
  for (size_t written = 0; written < size;) {
    const ssize_t n = write(descriptor, from + written, size - written);
    if (n <= 0) break;
    written += static_cast<size_t>(n);
  }
  void* library = dlopen(unique_path(descriptor).c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) *why = dlerror();
  close(descriptor);
  return library;
}

}  // namespace

CUresult load_module(const void* image, CUmodule* out) {
  if (out == nullptr || image == nullptr) return CUDA_ERROR_INVALID_VALUE;
  size_t size = 0;
  if (CUresult r = image_size(image, &size); r != CUDA_SUCCESS) return r;
  install_fault_handlers();
  auto module = std::make_shared<Module>();
  for (unsigned worker = 0; worker < settings().workers; ++worker) {
    std::string why;
    void* library = load_copy(image, size, &why);
    if (library == nullptr) return refuse(CUDA_ERROR_INVALID_IMAGE, why);
    module->libraries.push_back(library);
    auto* table = static_cast<const softcuda_image*>(dlsym(library, "softcuda_image_v"));
    if (table == nullptr) {
      return refuse(CUDA_ERROR_INVALID_IMAGE, "the image has no kernel table");
    }
    if (table->abi != SOFTCUDA_ABI) {
      return refuse(CUDA_ERROR_INVALID_IMAGE,
                    "the image was built for kernel ABI " + std::to_string(table->abi) +
                        ", this device speaks " + std::to_string(SOFTCUDA_ABI));
    }
    *table->hooks = &kHooks;
    for (unsigned i = 0; i < table->nentries; ++i) {
      if (worker == 0) {
        module->functions.push_back(std::make_shared<Function>());
        module->functions[i]->name = table->entries[i]->name;
        module->functions[i]->module = module;
      }
      module->functions[i]->copies.push_back(table->entries[i]);
      module->functions[i]->images.push_back(table);
    }
  }
  for (auto& function : module->functions) function->handle = functions().add(function);
  module->handle = modules().add(module);
  live_add(Kind::module, 1);
  *out = static_cast<CUmodule>(module->handle);
  return CUDA_SUCCESS;
}

CUresult unload_module(CUmodule handle, const char* waiting) {
  if (settings().strict) wait_idle(waiting);
  if (sticky() != CUDA_SUCCESS) return sticky();
  std::shared_ptr<Module> module = modules().take(handle);
  if (!module) return refuse(CUDA_ERROR_INVALID_HANDLE, "not a loaded module");
  module->live = false;
  for (auto& function : module->functions) functions().take(function->handle);
  module->functions.clear();  // a function keeps its module: break the circle
  live_add(Kind::module, -1);
  return CUDA_SUCCESS;
}

Module::~Module() {
  for (void* library : libraries) dlclose(library);
}

std::shared_ptr<Function> find_function(CUfunction handle) { return functions().get(handle); }

}  // namespace softcuda

using namespace softcuda;

SC_EXPORT CUresult cuModuleLoadData(CUmodule* out, const void* image) {
  SC_API(cuModuleLoadData, kContext | kUnsafe);
  return load_module(image, out);
}

SC_EXPORT CUresult cuModuleLoadDataEx(CUmodule* out, const void* image, unsigned, int*, void**) {
  SC_API(cuModuleLoadDataEx, kContext | kUnsafe);
  return load_module(image, out);
}

SC_EXPORT CUresult cuModuleUnload(CUmodule handle) {
  SC_API(cuModuleUnload, kContext | kUnsafe);
  return unload_module(handle, "cuModuleUnload: all work to finish");
}

SC_EXPORT CUresult cuModuleGetFunction(CUfunction* out, CUmodule handle, const char* name) {
  SC_API(cuModuleGetFunction, 0);
  if (out == nullptr || name == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::shared_ptr<Module> module = modules().get(handle);
  if (!module) return refuse(CUDA_ERROR_INVALID_HANDLE, "not a loaded module");
  for (auto& function : module->functions) {
    if (function->name != name) continue;
    *out = static_cast<CUfunction>(function->handle);
    return CUDA_SUCCESS;
  }
  return refuse(CUDA_ERROR_NOT_FOUND, "the module has no kernel '" + std::string(name) + "'");
}

SC_EXPORT CUresult cuModuleGetFunctionCount(unsigned* count, CUmodule handle) {
  SC_API(cuModuleGetFunctionCount, 0);
  std::shared_ptr<Module> module = modules().get(handle);
  if (!module) return CUDA_ERROR_INVALID_HANDLE;
  if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *count = static_cast<unsigned>(module->functions.size());
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuModuleEnumerateFunctions(CUfunction* out, unsigned n, CUmodule handle) {
  SC_API(cuModuleEnumerateFunctions, 0);
  std::shared_ptr<Module> module = modules().get(handle);
  if (!module) return CUDA_ERROR_INVALID_HANDLE;
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  for (unsigned i = 0; i < n && i < module->functions.size(); ++i) {
    out[i] = static_cast<CUfunction>(module->functions[i]->handle);
  }
  return CUDA_SUCCESS;
}

// Kernels keep no state outside parameters and shared memory, so a module has no globals.
SC_EXPORT CUresult cuModuleGetGlobal_v2(CUdeviceptr*, size_t*, CUmodule handle, const char* name) {
  SC_API(cuModuleGetGlobal, 0);
  if (name == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!modules().get(handle)) return CUDA_ERROR_INVALID_HANDLE;
  return CUDA_ERROR_NOT_FOUND;
}

SC_EXPORT CUresult cuModuleGetLoadingMode(int* mode) {
  SC_API(cuModuleGetLoadingMode, 0);
  if (mode == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *mode = settings().lazy_loading ? 2 : 1;  // CU_MODULE_LAZY_LOADING, CU_MODULE_EAGER_LOADING
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuFuncGetModule(CUmodule* out, CUfunction handle) {
  SC_API(cuFuncGetModule, 0);
  std::shared_ptr<Function> function = find_function(handle);
  if (!function) return CUDA_ERROR_INVALID_HANDLE;
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *out = static_cast<CUmodule>(function->module->handle);
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuFuncGetName(const char** out, CUfunction handle) {
  SC_API(cuFuncGetName, 0);
  std::shared_ptr<Function> function = find_function(handle);
  if (!function || out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *out = function->name.c_str();
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuFuncGetParamCount(CUfunction handle, size_t* count) {
  SC_API(cuFuncGetParamCount, 0);
  std::shared_ptr<Function> function = find_function(handle);
  if (!function || count == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *count = function->entry().nparams;
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuFuncGetParamInfo(CUfunction handle, size_t index, size_t* offset,
                                      size_t* size) {
  SC_API(cuFuncGetParamInfo, 0);
  std::shared_ptr<Function> function = find_function(handle);
  if (!function || offset == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (index >= function->entry().nparams) return CUDA_ERROR_INVALID_VALUE;
  *offset = function->entry().offsets[index];
  if (size != nullptr) *size = function->entry().sizes[index];
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuFuncGetAttribute(int* out, int attribute, CUfunction handle) {
  SC_API(cuFuncGetAttribute, 0);
  std::shared_ptr<Function> function = find_function(handle);
  if (!function) return CUDA_ERROR_INVALID_HANDLE;
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const unsigned bound = function->entry().max_threads;
  switch (attribute) {
    case 0:  // MAX_THREADS_PER_BLOCK
      *out = bound != 0 && bound < 1024 ? static_cast<int>(bound) : 1024;
      return CUDA_SUCCESS;
    case 2:  // CONST_SIZE_BYTES
    case 3:  // LOCAL_SIZE_BYTES
      *out = 0;
      return CUDA_SUCCESS;
    case 5:  // PTX_VERSION
    case 6:  // BINARY_VERSION
      *out = 90;
      return CUDA_SUCCESS;
    case 8:  // MAX_DYNAMIC_SHARED_SIZE_BYTES
      *out = function->max_dynamic_shared.load();
      return CUDA_SUCCESS;
    default:
      return refuse(CUDA_ERROR_NOT_SUPPORTED,
                    "function attribute " + std::to_string(attribute) + " is not implemented");
  }
}

SC_EXPORT CUresult cuFuncSetAttribute(CUfunction handle, int attribute, int value) {
  SC_API(cuFuncSetAttribute, 0);
  std::shared_ptr<Function> function = find_function(handle);
  if (!function) return CUDA_ERROR_INVALID_HANDLE;
  if (attribute == 9) return CUDA_SUCCESS;  // PREFERRED_SHARED_MEMORY_CARVEOUT: a hint
  if (attribute != 8) {
    return refuse(CUDA_ERROR_NOT_SUPPORTED,
                  "function attribute " + std::to_string(attribute) + " cannot be set");
  }
  if (value < 0 || value > 227 * 1024) {
    return refuse(CUDA_ERROR_INVALID_VALUE,
                  std::to_string(value) + " bytes of dynamic shared memory exceed 232448");
  }
  function->max_dynamic_shared = value;
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuFuncLoad(CUfunction handle) {
  SC_API(cuFuncLoad, 0);
  std::shared_ptr<Function> function = find_function(handle);
  if (!function) return CUDA_ERROR_INVALID_HANDLE;
  function->loaded = true;
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuFuncIsLoaded(int* state, CUfunction handle) {
  SC_API(cuFuncIsLoaded, 0);
  std::shared_ptr<Function> function = find_function(handle);
  if (!function) return CUDA_ERROR_INVALID_HANDLE;
  if (state == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *state = function->loaded ? 1 : 0;
  return CUDA_SUCCESS;
}
