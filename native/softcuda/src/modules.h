// Modules: loaded kernel images and the functions in them.
#pragma once

#include "scheduler.h"

namespace softcuda {

struct Module;

struct Function {
  std::string name;
  void* handle = nullptr;
  std::vector<const softcuda_entry*> copies;  // one per worker
  std::vector<const softcuda_image*> images;  // one per worker
  // Set by cuFuncLoad and the first launch; true from the start with CUDA_MODULE_LOADING=EAGER.
  std::atomic<bool> loaded{!settings().lazy_loading};
  std::atomic<int> max_dynamic_shared{48 * 1024};
  std::atomic<float> ns_per_thread{0};  // moving average of the run time; 0 until first measured
  const softcuda_entry& entry() const { return *copies[0]; }
  std::shared_ptr<Module> module;  // keeps the image loaded while a launch or graph refers to it
};

struct Module {
  ~Module();
  void* handle = nullptr;
  std::atomic<bool> live{true};
  std::vector<void*> libraries;  // dlopen handles, one per worker
  std::vector<std::shared_ptr<Function>> functions;
};

extern const softcuda_hooks kHooks;
inline Handles<Module>& modules =
    *new Handles<Module>(0x52000000000000, "the module handle is unknown or was unloaded");
inline Handles<Function>& functions = *new Handles<Function>(
    0x53000000000000, "the function handle is unknown, or its module was unloaded");
CUmodule load_module(const void* image);
// `description` is the text for softcuda_describe() while the call waits for queued work.
void unload_module(void* handle, const char* description);
// Checks the launch configuration and translates the parameters. Error texts name the kernel.
std::shared_ptr<const KernelWork> make_kernel(const CUDA_KERNEL_NODE_PARAMS& params);

}  // namespace softcuda
