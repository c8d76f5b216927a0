// Entry points of modules, libraries, functions and kernels. In CUDA, a library is a module that is
// not bound to a context. All contexts share one device here. A CUlibrary is therefore the same
// handle as its CUmodule, and a CUkernel is the same handle as its CUfunction.
#include <algorithm>
#include <fstream>
#include <iterator>

#include "modules.h"

using namespace softcuda;

// Returns the handle of the kernel with this name in a module or library.
static void* find_kernel(void* module, const char* name) {
  require(name != nullptr);
  for (auto& function : modules.find(module)->functions) {
    if (function->name == name) return function->handle;
  }
  refuse(CUDA_ERROR_NOT_FOUND, "the module has no kernel '" + std::string(name) + "'");
}

// Returns the function of a handle. For an unknown handle, the call ends with INVALID_VALUE, as
// documented for some queries, instead of INVALID_HANDLE.
static std::shared_ptr<Function> find_for_query(void* function) {
  const auto found = functions.get(function);
  require(found != nullptr);
  return found;
}

static int attribute_of(const Function& function, int attribute) {
  const unsigned bound = function.entry().max_threads;
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
      return bound != 0 ? static_cast<int>(std::min(bound, 1024u)) : 1024;
    // The following attributes are 0: the device has no registers, caches or clusters, and does not
    // report constant and local memory.
    case CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES:
    case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES:
    case CU_FUNC_ATTRIBUTE_NUM_REGS:
    case CU_FUNC_ATTRIBUTE_CACHE_MODE_CA:
    case CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH:
    case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
    case CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
      return 0;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
      require(function.ptx != nullptr, CUDA_ERROR_NOT_SUPPORTED,
              "the static shared memory of a kernel is known only if it was loaded from PTX");
      return static_cast<int>(function.ptx->shared_bytes);
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
      return 90;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
      return function.max_dynamic_shared.load();
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
      return function.carveout.load();
    default:
      refuse(CUDA_ERROR_NOT_SUPPORTED,
             "function attribute " + std::to_string(attribute) + " is not implemented");
  }
}

static void set_attribute(Function& function, int attribute, int value) {
  if (attribute == CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT) {
    require(value >= -1 && value <= 100, CUDA_ERROR_INVALID_VALUE,
            "the shared memory carveout is not -1 or a percentage");
    function.carveout = value;
    return;
  }
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
    refuse(CUDA_ERROR_NOT_SUPPORTED,
           "function attribute " + std::to_string(attribute) + " cannot be set");
  }
  const int limit =
      227 * 1024 - (function.ptx != nullptr ? static_cast<int>(function.ptx->shared_bytes) : 0);
  if (value < 0 || value > limit) {
    refuse(
        CUDA_ERROR_INVALID_VALUE,
        std::to_string(value) + " bytes of dynamic shared memory exceed " + std::to_string(limit));
  }
  function.max_dynamic_shared = value;
}

// ---- modules and libraries -------------------------------------------------------------------
SC_API(cuModuleLoadData, 2000, kContext | kUnsafe, CUmodule*, out, const void*, image) {
  require(out != nullptr);
  *out = load_module(image);
}

void softcuda::write_error_log(unsigned n, const int* options, void** values,
                               const std::string& text) {
  char* buffer = nullptr;
  size_t size = 0;
  for (unsigned i = 0; i < n && options != nullptr && values != nullptr; ++i) {
    constexpr int kErrorLogBuffer = 5;
    constexpr int kErrorLogBufferSize = 6;
    if (options[i] == kErrorLogBuffer) buffer = static_cast<char*>(values[i]);
    if (options[i] != kErrorLogBufferSize) continue;
    size = reinterpret_cast<uintptr_t>(values[i]) & 0xffffffffu;
    values[i] = reinterpret_cast<void*>(std::min(size, text.size()));
  }
  if (buffer != nullptr && size != 0) copy_text(text, buffer, size);
}

static CUmodule load_with_options(const void* image, unsigned n, const int* options,
                                  void** values) {
  std::string log;
  try {
    return load_module(image, &log);
  } catch (const Refused&) {
    write_error_log(n, options, values, log);
    throw;
  }
}

SC_API(cuModuleLoadDataEx, 2010, kContext | kUnsafe, CUmodule*, out, const void*, image, unsigned,
       n, int*, options, void**, values) {
  require(out != nullptr);
  *out = load_with_options(image, n, options, values);
}

SC_API(cuLibraryLoadData, 12000, kUnsafe, CUmodule*, out, const void*, image, int*, options, void**,
       values, unsigned, n, int*, library_options, void**, library_values, unsigned, m) {
  require(out != nullptr);
  *out = load_with_options(image, n, options, values);
}

static CUmodule load_file(const char* path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) refuse(CUDA_ERROR_FILE_NOT_FOUND, std::string("cannot read ") + path);
  std::vector<char> image((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  // load_module() first reads an ELF header. The zeros make up for a file that is too short for it.
  image.resize(image.size() + 64);
  return load_module(image.data());
}

SC_API(cuModuleLoad, 2000, kContext | kUnsafe, CUmodule*, out, const char*, path) {
  require(out != nullptr && path != nullptr);
  *out = load_file(path);
}

SC_API(cuLibraryLoadFromFile, 12000, kUnsafe, CUmodule*, out, const char*, path, int*, options,
       void**, values, unsigned, n, int*, library_options, void**, library_values, unsigned, m) {
  require(out != nullptr && path != nullptr);
  *out = load_file(path);
}

// Returns the address and the size of a variable of a module.
static void find_variable(CUdeviceptr* address, size_t* bytes, void* module, const char* name) {
  require(name != nullptr);
  const auto found = modules.find(module);
  const auto variable = found->variables.find(name);
  if (variable == found->variables.end()) {
    refuse(CUDA_ERROR_NOT_FOUND, "the module has no variable '" + std::string(name) +
                                     "'; only PTX modules have named variables");
  }
  if (address != nullptr) *address = variable->second.first;
  if (bytes != nullptr) *bytes = variable->second.second;
}

SC_API(cuModuleGetGlobal_v2, 3020, kContext, CUdeviceptr*, address, size_t*, bytes, CUmodule,
       module, const char*, name) {
  find_variable(address, bytes, module, name);
}

SC_API(cuLibraryGetGlobal, 12000, 0, CUdeviceptr*, address, size_t*, bytes, CUmodule, library,
       const char*, name) {
  find_variable(address, bytes, library, name);
}

SC_API(cuModuleUnload, 2000, kContext | kUnsafe, CUmodule, module) {
  unload_module(module, "cuModuleUnload: all work to finish");
}

SC_API(cuLibraryUnload, 12000, kUnsafe, CUmodule, library) {
  unload_module(library, "cuLibraryUnload: all work to finish");
}

SC_API(cuModuleGetLoadingMode, 11070, 0, int*, mode) {
  require(mode != nullptr);
  *mode = settings().lazy_loading ? 2 : 1;  // CU_MODULE_LAZY_LOADING, CU_MODULE_EAGER_LOADING
}

SC_API(cuLibraryGetModule, 12000, 0, CUmodule*, out, CUmodule, library) {
  require(out != nullptr);
  modules.find(library);
  *out = library;
}

SC_API(cuModuleGetFunction, 2000, 0, void**, out, void*, module, const char*, name) {
  require(out != nullptr);
  *out = find_kernel(module, name);
}

SC_API(cuLibraryGetKernel, 12000, 0, void**, out, void*, library, const char*, name) {
  require(out != nullptr);
  *out = find_kernel(library, name);
}

#define LIST_FUNCTIONS(count, enumerate)                                 \
  SC_API(count, 12040, 0, unsigned*, n, void*, module) {                 \
    const auto found = modules.find(module);                             \
    require(n != nullptr);                                               \
    *n = static_cast<unsigned>(found->functions.size());                 \
  }                                                                      \
  SC_API(enumerate, 12040, 0, void**, out, unsigned, n, void*, module) { \
    const auto found = modules.find(module);                             \
    require(out != nullptr);                                             \
    for (unsigned i = 0; i < n && i < found->functions.size(); ++i) {    \
      out[i] = found->functions[i]->handle;                              \
    }                                                                    \
  }
LIST_FUNCTIONS(cuLibraryGetKernelCount, cuLibraryEnumerateKernels)
LIST_FUNCTIONS(cuModuleGetFunctionCount, cuModuleEnumerateFunctions)

// ---- functions and kernels -------------------------------------------------------------------
#define OF_FUNCTION(kind, flags)                                                                \
  SC_API(cu##kind##GetName, 12030, 0, const char**, out, void*, function) {                     \
    require(out != nullptr);                                                                    \
    *out = find_for_query(function)->name.c_str();                                              \
  }                                                                                             \
  SC_API(cu##kind##GetParamCount, 13020, 0, void*, function, size_t*, count) {                  \
    require(count != nullptr);                                                                  \
    *count = find_for_query(function)->entry().nparams;                                         \
  }                                                                                             \
  SC_API(cu##kind##GetParamInfo, 12040, flags, void*, function, size_t, index, size_t*, offset, \
         size_t*, size) {                                                                       \
    const auto found = find_for_query(function);                                                \
    require(offset != nullptr && index < found->entry().nparams);                               \
    *offset = found->entry().offsets[index];                                                    \
    if (size != nullptr) *size = found->entry().sizes[index];                                   \
  }
OF_FUNCTION(Func, 0)
OF_FUNCTION(Kernel, kContext)

#define MODULE_OF(symbol, from)                           \
  SC_API(symbol, from, 0, void**, out, void*, function) { \
    const auto found = functions.find(function);          \
    require(out != nullptr);                              \
    *out = found->module->handle;                         \
  }
MODULE_OF(cuFuncGetModule, 11000)
MODULE_OF(cuKernelGetLibrary, 12050)

SC_API(cuKernelGetFunction, 12000, 0, void**, out, void*, kernel) {
  functions.find(kernel);
  require(out != nullptr);
  *out = kernel;
}

SC_API(cuFuncGetAttribute, 2020, 0, int*, out, int, attribute, CUfunction, function) {
  const auto found = functions.find(function);
  require(out != nullptr);
  *out = attribute_of(*found, attribute);
}

SC_API(cuKernelGetAttribute, 12000, 0, int*, out, int, attribute, CUkernel, kernel, CUdevice,
       device) {
  require(device == 0, CUDA_ERROR_INVALID_DEVICE);
  const auto found = functions.find(kernel);
  require(out != nullptr);
  *out = attribute_of(*found, attribute);
}

SC_API(cuFuncSetAttribute, 9000, 0, CUfunction, function, int, attribute, int, value) {
  set_attribute(*functions.find(function), attribute, value);
}

SC_API(cuKernelSetAttribute, 12000, 0, int, attribute, int, value, CUkernel, kernel, CUdevice,
       device) {
  require(device == 0, CUDA_ERROR_INVALID_DEVICE);
  set_attribute(*functions.find(kernel), attribute, value);
}

SC_API(cuFuncLoad, 12040, 0, CUfunction, function) { functions.find(function)->loaded = true; }

SC_API(cuFuncIsLoaded, 12040, 0, int*, state, CUfunction, function) {
  const auto found = functions.find(function);
  require(state != nullptr);
  *state = found->loaded ? 1 : 0;
}
