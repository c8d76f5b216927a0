#include "hostwork/driver.h"

#include <dlfcn.h>
#include <link.h>

#include <atomic>

namespace graft::hostwork {
namespace {

std::atomic<Handle> context_handle{nullptr};

using GetProcAddress = Result (*)(const char* name, void** entry, int version, std::uint64_t flags,
                                  int* status);

std::string path_of(void* library) {
  link_map* map = nullptr;
  if (dlinfo(library, RTLD_DI_LINKMAP, &map) != 0 || map == nullptr) return "";
  return map->l_name;
}

// Looks up a driver function by its name and stores its address in `out`. Returns false if the
// driver does not have the requested version of the function.
template <typename Function>
bool resolve(GetProcAddress get, const char* name, int version, Function* out) {
  void* entry = nullptr;
  int status = 0;
  if (get(name, &entry, version, 0, &status) != kSuccess) entry = nullptr;
  *out = reinterpret_cast<Function>(entry);
  return entry != nullptr;
}

}  // namespace

std::string loaded_library(const std::string& soname) {
  void* library = dlopen(soname.c_str(), RTLD_NOLOAD | RTLD_LAZY);
  if (library == nullptr) return "";
  const std::string path = path_of(library);
  dlclose(library);
  return path;
}

void bind_driver(const std::string& path, Handle context) {
  static Driver table{};
  if (bound_driver != nullptr) throw std::logic_error("the native driver table is already bound");
  // RTLD_NOLOAD: native code must use the same library as cuda.bindings, not another one that the
  // loader finds first. The reference is kept until the process ends.
  void* library = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_NOW);
  if (library == nullptr) throw std::runtime_error("libcuda.so.1 is not loaded");
  const std::string found = path_of(library);
  if (found != path) {
    throw std::runtime_error("libcuda.so.1 is " + found + ", but the device was opened on " + path);
  }
  auto get = reinterpret_cast<GetProcAddress>(dlsym(library, "cuGetProcAddress_v2"));
  if (get == nullptr) throw std::runtime_error(found + " has no cuGetProcAddress_v2");
#define GRAFT_DRIVER_RESOLVE(member, name, version, parameters)                               \
  if (!resolve(get, #name, version, &table.member)) {                                         \
    throw std::runtime_error("the driver does not provide " #name " (version " #version ")"); \
  }
  GRAFT_DRIVER_CALLS(GRAFT_DRIVER_RESOLVE)
#undef GRAFT_DRIVER_RESOLVE
  resolve(get, "cuLaunchHostFunc", 13020, &table.launch_host_func_v2);
  table.owe_answer = reinterpret_cast<void (*)(int)>(dlsym(library, "softcuda_set_device_waits"));
  context_handle.store(context);
  bound_driver = &table;
}

void set_primary_context(Handle context) { context_handle.store(context); }

Handle primary_context() { return context_handle.load(); }

Result make_context_current() {
  Handle current = nullptr;
  const Result result = driver().ctx_get_current(&current);
  if (result != kSuccess || current == primary_context()) return result;
  return driver().ctx_set_current(primary_context());
}

}  // namespace graft::hostwork
