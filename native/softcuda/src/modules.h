// Kernel images and the functions in them.
#pragma once

#include "scheduler.h"

namespace softcuda {

struct Module;

struct Function {
  std::string name;
  void* handle = nullptr;
  std::vector<const softcuda_entry*> copies;  // one per worker
  std::vector<const softcuda_image*> images;  // one per worker
  // cuFuncLoad, or launched once; at once with CUDA_MODULE_LOADING=EAGER.
  std::atomic<bool> loaded{!settings().lazy_loading};
  std::atomic<int> max_dynamic_shared{48 * 1024};
  std::atomic<float> ns_per_thread{0};
  const softcuda_entry& entry() const { return *copies[0]; }
  std::shared_ptr<Module> module;  // keeps the image while a launch or a graph names the function
};

struct Module {
  ~Module();
  void* handle = nullptr;
  std::atomic<bool> live{true};
  std::vector<void*> libraries;  // dlopen handles, one per worker
  std::vector<std::shared_ptr<Function>> functions;
};

extern const softcuda_hooks kHooks;
inline Handles<Module>& modules = *new Handles<Module>(0x52000000000000, "not a loaded module");
inline Handles<Function>& functions =
    *new Handles<Function>(0x53000000000000, "not a kernel of a loaded module");
CUmodule load_module(const void* image);
// `waiting` says what unloading waits for.
void unload_module(void* handle, const char* waiting);
// Checks the geometry and translates the parameters; refuses by name.
std::shared_ptr<const KernelWork> make_kernel(const CUDA_KERNEL_NODE_PARAMS& params);

}  // namespace softcuda
