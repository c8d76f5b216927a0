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
std::shared_ptr<Function> find_function(CUfunction handle);
CUresult load_module(const void* image, CUmodule* out);
// `waiting` says what a strict unload waits for.
CUresult unload_module(CUmodule handle, const char* waiting);
// Checks the geometry and translates the parameters; refuses by name.
CUresult make_kernel(const std::shared_ptr<Function>& function, softcuda_dim3 grid,
                     softcuda_dim3 block, unsigned shared_bytes, void* const* params,
                     void* const* extra, std::shared_ptr<const KernelWork>* out);

}  // namespace softcuda
