#include "hostwork/driver.h"

#include <dlfcn.h>
#include <link.h>

#include <atomic>
#include <stdexcept>

namespace graft::hostwork {
namespace {

Driver table;
std::atomic<Handle> context_handle{nullptr};
bool bound = false;

using GetProcAddress = Result (*)(const char* name, void** entry, int version, std::uint64_t flags,
                                  int* status);

std::string path_of(void* library) {
  link_map* map = nullptr;
  if (dlinfo(library, RTLD_DI_LINKMAP, &map) != 0 || map == nullptr) return "";
  return map->l_name;
}

template <typename Function>
void resolve(GetProcAddress get, const char* name, int version, Function* out) {
  void* entry = nullptr;
  int status = 0;
  const Result result = get(name, &entry, version, 0, &status);
  if (result != kSuccess || entry == nullptr) {
    throw std::runtime_error(std::string("the driver does not provide ") + name + " (version " +
                             std::to_string(version) + ")");
  }
  *out = reinterpret_cast<Function>(entry);
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
  if (bound) throw std::logic_error("the native driver table is bound already");
  // RTLD_NOLOAD: native code must use the very library that cuda.bindings uses, never a second
  // one that happens to be found first. The reference is kept for the life of the process.
  void* library = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_NOW);
  if (library == nullptr) throw std::runtime_error("libcuda.so.1 is not loaded");
  const std::string found = path_of(library);
  if (found != path) {
    throw std::runtime_error("libcuda.so.1 is " + found + ", but the device was opened on " + path);
  }
  auto get = reinterpret_cast<GetProcAddress>(dlsym(library, "cuGetProcAddress_v2"));
  if (get == nullptr) throw std::runtime_error(found + " has no cuGetProcAddress_v2");

  Driver d{};
  resolve(get, "cuCtxSetCurrent", 4000, &d.ctx_set_current);
  resolve(get, "cuLaunchHostFunc", 10000, &d.launch_host_func);
  resolve(get, "cuStreamGetCaptureInfo", 12030, &d.stream_get_capture_info);
  resolve(get, "cuThreadExchangeStreamCaptureMode", 10010, &d.thread_exchange_capture_mode);
  try {
    resolve(get, "cuLaunchHostFunc", 13020, &d.launch_host_func_v2);
  } catch (const std::runtime_error&) {
    d.launch_host_func_v2 = nullptr;
  }
  resolve(get, "cuStreamQuery", 2000, &d.stream_query);
  resolve(get, "cuStreamDestroy", 4000, &d.stream_destroy);
  resolve(get, "cuEventCreate", 2000, &d.event_create);
  resolve(get, "cuEventQuery", 2000, &d.event_query);
  resolve(get, "cuEventRecord", 2000, &d.event_record);
  resolve(get, "cuEventDestroy", 4000, &d.event_destroy);
  resolve(get, "cuMemFree", 3020, &d.mem_free);
  resolve(get, "cuMemFreeHost", 2000, &d.mem_free_host);
  resolve(get, "cuModuleUnload", 2000, &d.module_unload);
  resolve(get, "cuGraphDestroy", 10000, &d.graph_destroy);
  resolve(get, "cuGraphExecDestroy", 10000, &d.graph_exec_destroy);
  resolve(get, "cuGraphExecKernelNodeSetParams", 12000, &d.graph_exec_kernel_set);
  resolve(get, "cuGraphNodeSetEnabled", 11060, &d.graph_node_set_enabled);
  resolve(get, "cuGraphNodeGetEnabled", 11060, &d.graph_node_get_enabled);
  resolve(get, "cuGraphLaunch", 10000, &d.graph_launch);
  resolve(get, "cuGraphUpload", 11010, &d.graph_upload);
  resolve(get, "cuGraphExecUpdate", 12000, &d.graph_exec_update);
  resolve(get, "cuUserObjectCreate", 11030, &d.user_object_create);
  resolve(get, "cuUserObjectRelease", 11030, &d.user_object_release);
  resolve(get, "cuGraphRetainUserObject", 11030, &d.graph_retain_user_object);
  resolve(get, "cuGraphReleaseUserObject", 11030, &d.graph_release_user_object);
  d.owe_answer = reinterpret_cast<void (*)(int)>(dlsym(library, "softcuda_owe_answer"));
  table = d;
  context_handle.store(context);
  bound = true;
}

void set_primary_context(Handle context) { context_handle.store(context); }

const Driver& driver() {
  if (!bound) throw std::logic_error("no device is open: call graft.cudagraph.open_device first");
  return table;
}

Handle primary_context() { return context_handle.load(); }

}  // namespace graft::hostwork
