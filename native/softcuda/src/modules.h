// Modules: loaded kernel images and the functions in them.
#pragma once

#include "ptx/interface.h"
#include "scheduler.h"

namespace softcuda {

struct Module;
// Value of CU_LIMIT_STACK_SIZE: bytes per thread for recursive calls of PTX kernels.
size_t stack_limit();

// One kernel of a module. Each worker has its own copy of the kernel image (INVARIANTS.md K1), with
// its own kernel table and entries.
struct Function {
  std::string name;
  void* handle = nullptr;
  // The kernel's entry in the image copy of each worker.
  std::vector<const softcuda_entry*> copies;
  // The kernel table in the image copy of each worker.
  std::vector<const softcuda_image*> images;
  // Whether the driver reports the kernel as loaded. A real driver loads a kernel at cuFuncLoad or
  // at its first launch. The soft device has loaded it already and only tracks this state. With
  // CUDA_MODULE_LOADING=EAGER, the state is true from the start.
  std::atomic<bool> loaded{!settings().lazy_loading};
  // Limit of dynamic shared memory in bytes. Initially 48 KiB minus the static shared memory, if
  // its size is known; cuFuncSetAttribute can raise it.
  std::atomic<int> max_dynamic_shared{48 * 1024};
  // Preferred shared memory in percent; -1: no preference. It has no effect.
  std::atomic<int> carveout{-1};
  // Moving average of the kernel's run time per thread in nanoseconds; 0 before the first
  // measurement. The device uses it to decide whether several workers share a launch
  // (INVARIANTS.md S8).
  std::atomic<float> ns_per_thread{0};
  const softcuda_entry& entry() const { return *copies[0]; }
  // If the function was loaded from PTX: the PTX library's kernel, which the module owns. Null
  // otherwise.
  const softcuda_ptx_kernel* ptx = nullptr;
  std::shared_ptr<Module> module;  // keeps the image loaded while a launch or graph refers to it
};

struct Module {
  ~Module();
  void* handle = nullptr;
  std::atomic<bool> live{true};  // false after the module was unloaded
  std::vector<void*> libraries;  // dlopen handles, one per worker
  // If the module was loaded from PTX: the PTX library's module. Null otherwise.
  std::shared_ptr<const softcuda_ptx_module> ptx;
  std::vector<std::shared_ptr<Function>> functions;
  // Addresses and sizes of the variables of a module that was loaded from PTX.
  std::map<std::string, std::pair<CUdeviceptr, size_t>> variables;
};

// The functions of the device that kernels call (executor.cpp).
extern const softcuda_hooks kHooks;
inline Handles<Module>& modules =
    *new Handles<Module>(0x52000000000000, "the module handle is unknown or was unloaded");
inline Handles<Function>& functions = *new Handles<Function>(
    0x53000000000000, "the function handle is unknown, or its module was unloaded");
// Loads a copy of a kernel image for each worker and returns the handle of the new module. The
// image may also be PTX text. If the image is refused, `log` receives the reason.
CUmodule load_module(const void* image, std::string* log = nullptr);
// Copies a text to the buffer for errors that the caller passes in the JIT options. The other
// options have no effect.
void write_error_log(unsigned n, const int* options, void** values, const std::string& text);
// Links PTX texts to one module.
CUmodule load_ptx(const std::vector<std::string>& texts, std::string* log);
// Waits for all queued work and unloads a module. `description` is the text that
// softcuda_describe() shows during this wait.
void unload_module(void* handle, const char* description);
// Checks the launch configuration, translates the parameters and returns the work of the launch.
// Error texts name the kernel.
std::shared_ptr<const KernelWork> make_kernel(const CUDA_KERNEL_NODE_PARAMS& params);

}  // namespace softcuda
