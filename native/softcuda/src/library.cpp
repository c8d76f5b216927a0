// Libraries: modules that are loaded before anybody says for which context. Here there is one
// context, so a library is a module, loaded at once, and a kernel is its function: both names of a
// kernel are one handle, which every call that takes a CUfunction takes. Memory pools are refused.
#include <cstdio>
#include <fstream>
#include <iterator>

#include "modules.h"

using namespace softcuda;

namespace {

struct Library {
  CUmodule module;
  void* handle;
};

Handles<Library>& libraries() {
  static Handles<Library>& h = *new Handles<Library>(0x5c000000000000);
  return h;
}

CUfunction function_of(CUkernel kernel) { return reinterpret_cast<CUfunction>(kernel); }

CUresult module_of(CUlibrary library, CUmodule* out) {
  std::shared_ptr<Library> found = libraries().get(library);
  if (!found) return refuse(CUDA_ERROR_INVALID_HANDLE, "not a loaded library");
  *out = found->module;
  return CUDA_SUCCESS;
}

CUresult load_library(CUlibrary* out, const void* image) {
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  CUmodule module = nullptr;
  if (CUresult r = load_module(image, &module); r != CUDA_SUCCESS) return r;
  auto library = std::make_shared<Library>(Library{module, nullptr});
  library->handle = libraries().add(library);
  *out = static_cast<CUlibrary>(library->handle);
  return CUDA_SUCCESS;
}

CUresult no_pools() {
  return refuse(CUDA_ERROR_NOT_SUPPORTED, "the soft device has no memory pools");
}

}  // namespace

// Options of the compiler and of lazy loading have nothing to act on.
SC_EXPORT CUresult cuLibraryLoadData(CUlibrary* out, const void* image, int*, void**, unsigned,
                                     int*, void**, unsigned) {
  SC_API(cuLibraryLoadData, kUnsafe);
  return load_library(out, image);
}

SC_EXPORT CUresult cuLibraryLoadFromFile(CUlibrary* out, const char* path, int*, void**, unsigned,
                                         int*, void**, unsigned) {
  SC_API(cuLibraryLoadFromFile, kUnsafe);
  if (path == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::ifstream file(path, std::ios::binary);
  if (!file) return refuse(CUDA_ERROR_FILE_NOT_FOUND, std::string("cannot read ") + path);
  std::vector<char> image((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  image.resize(image.size() + 64);  // a header can be read of however short a file
  return load_library(out, image.data());
}

SC_EXPORT CUresult cuLibraryUnload(CUlibrary library) {
  SC_API(cuLibraryUnload, kUnsafe);
  CUmodule module = nullptr;
  if (CUresult r = module_of(library, &module); r != CUDA_SUCCESS) return r;
  const CUresult r = unload_module(module, "cuLibraryUnload: all work to finish");
  if (r == CUDA_SUCCESS) libraries().take(library);
  return r;
}

SC_EXPORT CUresult cuLibraryGetModule(CUmodule* out, CUlibrary library) {
  SC_API(cuLibraryGetModule, 0);
  return out == nullptr ? CUDA_ERROR_INVALID_VALUE : module_of(library, out);
}

SC_EXPORT CUresult cuModuleGetFunction(CUfunction* out, CUmodule module, const char* name);
SC_EXPORT CUresult cuModuleGetFunctionCount(unsigned* count, CUmodule module);
SC_EXPORT CUresult cuModuleEnumerateFunctions(CUfunction* out, unsigned n, CUmodule module);
SC_EXPORT CUresult cuFuncGetName(const char** out, CUfunction function);
SC_EXPORT CUresult cuFuncGetParamCount(CUfunction function, size_t* count);
SC_EXPORT CUresult cuFuncGetParamInfo(CUfunction function, size_t index, size_t* offset,
                                      size_t* size);
SC_EXPORT CUresult cuFuncGetAttribute(int* out, int attribute, CUfunction function);
SC_EXPORT CUresult cuFuncSetAttribute(CUfunction function, int attribute, int value);

SC_EXPORT CUresult cuLibraryGetKernel(CUkernel* out, CUlibrary library, const char* name) {
  SC_API(cuLibraryGetKernel, 0);
  CUmodule module = nullptr;
  if (CUresult r = module_of(library, &module); r != CUDA_SUCCESS) return r;
  return cuModuleGetFunction(reinterpret_cast<CUfunction*>(out), module, name);
}

SC_EXPORT CUresult cuLibraryGetKernelCount(unsigned* count, CUlibrary library) {
  SC_API(cuLibraryGetKernelCount, 0);
  CUmodule module = nullptr;
  if (CUresult r = module_of(library, &module); r != CUDA_SUCCESS) return r;
  return cuModuleGetFunctionCount(count, module);
}

SC_EXPORT CUresult cuLibraryEnumerateKernels(CUkernel* out, unsigned n, CUlibrary library) {
  SC_API(cuLibraryEnumerateKernels, 0);
  CUmodule module = nullptr;
  if (CUresult r = module_of(library, &module); r != CUDA_SUCCESS) return r;
  return cuModuleEnumerateFunctions(reinterpret_cast<CUfunction*>(out), n, module);
}

// Kernels keep no state outside parameters and shared memory, so a library has no globals.
SC_EXPORT CUresult cuLibraryGetGlobal(CUdeviceptr*, size_t*, CUlibrary library, const char* name) {
  SC_API(cuLibraryGetGlobal, 0);
  if (name == nullptr) return CUDA_ERROR_INVALID_VALUE;
  CUmodule module = nullptr;
  if (CUresult r = module_of(library, &module); r != CUDA_SUCCESS) return r;
  return CUDA_ERROR_NOT_FOUND;
}

SC_EXPORT CUresult cuKernelGetLibrary(CUlibrary* out, CUkernel kernel) {
  SC_API(cuKernelGetLibrary, 0);
  std::shared_ptr<Function> function = find_function(function_of(kernel));
  if (!function) return CUDA_ERROR_INVALID_HANDLE;
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  for (auto& library : libraries().all()) {
    if (library->module != function->module->handle) continue;
    *out = static_cast<CUlibrary>(library->handle);
    return CUDA_SUCCESS;
  }
  return refuse(CUDA_ERROR_NOT_FOUND, "the kernel was loaded as a module");
}

SC_EXPORT CUresult cuKernelGetFunction(CUfunction* out, CUkernel kernel) {
  SC_API(cuKernelGetFunction, 0);
  if (!find_function(function_of(kernel))) return CUDA_ERROR_INVALID_HANDLE;
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *out = function_of(kernel);
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuKernelGetName(const char** out, CUkernel kernel) {
  SC_API(cuKernelGetName, 0);
  return cuFuncGetName(out, function_of(kernel));
}

SC_EXPORT CUresult cuKernelGetParamCount(CUkernel kernel, size_t* count) {
  SC_API(cuKernelGetParamCount, 0);
  return cuFuncGetParamCount(function_of(kernel), count);
}

SC_EXPORT CUresult cuKernelGetParamInfo(CUkernel kernel, size_t index, size_t* offset,
                                        size_t* size) {
  SC_API(cuKernelGetParamInfo, kContext);
  return cuFuncGetParamInfo(function_of(kernel), index, offset, size);
}

SC_EXPORT CUresult cuKernelGetAttribute(int* out, int attribute, CUkernel kernel, CUdevice device) {
  SC_API(cuKernelGetAttribute, 0);
  if (device != 0) return CUDA_ERROR_INVALID_DEVICE;
  return cuFuncGetAttribute(out, attribute, function_of(kernel));
}

SC_EXPORT CUresult cuKernelSetAttribute(int attribute, int value, CUkernel kernel,
                                        CUdevice device) {
  SC_API(cuKernelSetAttribute, 0);
  if (device != 0) return CUDA_ERROR_INVALID_DEVICE;
  return cuFuncSetAttribute(function_of(kernel), attribute, value);
}

// ---- memory pools: none ----------------------------------------------------------------------
#define NO_POOL(name, ...)               \
  SC_EXPORT CUresult name(__VA_ARGS__) { \
    SC_API(name, 0);                     \
    return no_pools();                   \
  }
NO_POOL(cuDeviceGetDefaultMemPool, void**, CUdevice)
NO_POOL(cuDeviceGetMemPool, void**, CUdevice)
NO_POOL(cuMemPoolCreate, void**, const void*)
NO_POOL(cuMemAllocFromPoolAsync, CUdeviceptr*, size_t, void*, CUstream)
