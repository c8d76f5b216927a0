// Driver entry points for native code, from the libcuda.so.1 that the process uses.
//
// The file needs no CUDA header, because it declares the types of the public driver ABI itself.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <stdexcept>
#include <string>

namespace graft::hostwork {

using Result = int;  // CUresult
using Handle = void*;
using HostFunction = void (*)(void*);

constexpr Result kSuccess = 0;
constexpr Result kNotReady = 600;  // CUDA_ERROR_NOT_READY
// Results after which the context is lost: no work runs any more, and the driver calls no host
// function any more.
constexpr Result kContextFaults[] = {214, 220, 226, 700, 702, 709, 710, 714,
                                     715, 716, 717, 718, 719, 721, 999};

inline bool is_context_fault(Result result) {
  return std::find(std::begin(kContextFaults), std::end(kContextFaults), result) !=
         std::end(kContextFaults);
}

struct UpdateInfo {  // CUgraphExecUpdateResultInfo
  int result;
  Handle error_node;
  Handle error_from_node;
};

// Driver functions that native code calls, always with the GIL released. Each entry is a member of
// struct Driver, the name and version of the driver function, and its parameters.
#define GRAFT_DRIVER_CALLS(CALL)                                                                   \
  CALL(ctx_get_current, cuCtxGetCurrent, 4000, (Handle * context))                                 \
  CALL(ctx_set_current, cuCtxSetCurrent, 4000, (Handle context))                                   \
  CALL(launch_host_func, cuLaunchHostFunc, 10000, (Handle stream, HostFunction fn, void* data))    \
  CALL(stream_get_capture_info, cuStreamGetCaptureInfo, 12030,                                     \
       (Handle stream, int* status, std::uint64_t* id, Handle* graph, const Handle** dependencies, \
        const void** edges, std::size_t* count))                                                   \
  CALL(thread_exchange_capture_mode, cuThreadExchangeStreamCaptureMode, 10010, (int* mode))        \
  CALL(stream_query, cuStreamQuery, 2000, (Handle stream))                                         \
  CALL(stream_destroy, cuStreamDestroy, 4000, (Handle stream))                                     \
  CALL(event_create, cuEventCreate, 2000, (Handle * event, unsigned int flags))                    \
  CALL(event_query, cuEventQuery, 2000, (Handle event))                                            \
  CALL(event_record, cuEventRecord, 2000, (Handle event, Handle stream))                           \
  CALL(event_destroy, cuEventDestroy, 4000, (Handle event))                                        \
  CALL(mem_free, cuMemFree, 3020, (Handle address))                                                \
  CALL(mem_free_host, cuMemFreeHost, 2000, (void* address))                                        \
  CALL(module_unload, cuModuleUnload, 2000, (Handle module))                                       \
  CALL(graph_destroy, cuGraphDestroy, 10000, (Handle graph))                                       \
  CALL(graph_exec_destroy, cuGraphExecDestroy, 10000, (Handle exec))                               \
  CALL(graph_exec_kernel_set, cuGraphExecKernelNodeSetParams, 12000,                               \
       (Handle exec, Handle node, const void* params))                                             \
  CALL(graph_node_set_enabled, cuGraphNodeSetEnabled, 11060,                                       \
       (Handle exec, Handle node, unsigned int enabled))                                           \
  CALL(graph_launch, cuGraphLaunch, 10000, (Handle exec, Handle stream))                           \
  CALL(graph_upload, cuGraphUpload, 11010, (Handle exec, Handle stream))                           \
  CALL(graph_exec_update, cuGraphExecUpdate, 12000,                                                \
       (Handle exec, Handle graph, UpdateInfo * info))                                             \
  CALL(                                                                                            \
      user_object_create, cuUserObjectCreate, 11030,                                               \
      (Handle * object, void* data, HostFunction destroy, unsigned int count, unsigned int flags)) \
  CALL(user_object_release, cuUserObjectRelease, 11030, (Handle object, unsigned int count))       \
  CALL(graph_retain_user_object, cuGraphRetainUserObject, 11030,                                   \
       (Handle graph, Handle object, unsigned int count, unsigned int flags))                      \
  CALL(graph_release_user_object, cuGraphReleaseUserObject, 11030,                                 \
       (Handle graph, Handle object, unsigned int count))

struct Driver {
#define GRAFT_DRIVER_MEMBER(member, name, version, parameters) Result(*member) parameters;
  GRAFT_DRIVER_CALLS(GRAFT_DRIVER_MEMBER)
#undef GRAFT_DRIVER_MEMBER
  // cuLaunchHostFunc_v2; null if the driver is older than CUDA 13.2.
  Result (*launch_host_func_v2)(Handle stream, HostFunction fn, void* data, unsigned int sync_mode);
  // Tells the soft device whether the device waits for the calling thread; null on CUDA.
  void (*owe_answer)(int owes);
};

// Fills the table of driver functions from the loaded libcuda.so.1, and sets the primary context.
// `path` is the library with which the device was opened; std::runtime_error is thrown if another
// library is loaded. Called once.
void bind_driver(const std::string& path, Handle context);
inline const Driver* bound_driver = nullptr;

// Returns the table of driver functions. Throws std::logic_error if bind_driver() was not called.
inline const Driver& driver() {
  if (bound_driver != nullptr) return *bound_driver;
  throw std::logic_error("no device is open: call graft.cudagraph.open_device first");
}

// Sets the primary context. Called with null before the context is released, and with the new
// context after the device has retained one again. No driver resource may exist during the call
// (live_resources() == 0).
void set_primary_context(Handle context);
Handle primary_context();
// Makes the primary context current on the calling thread, unless it is current already. Another
// library may have made its own context current since the thread's last call.
Result make_context_current();

// Returns the path of the library that is loaded under a SONAME in this process, or "".
std::string loaded_library(const std::string& soname);

// While a HostWorkScope exists, its thread counts as inside a host function, where driver calls
// raise an error (INVARIANTS.md D3).
inline thread_local int host_work_depth = 0;
class HostWorkScope {
 public:
  HostWorkScope() { ++host_work_depth; }
  ~HostWorkScope() { --host_work_depth; }
  HostWorkScope(const HostWorkScope&) = delete;
  HostWorkScope& operator=(const HostWorkScope&) = delete;
};
inline bool in_host_work() { return host_work_depth > 0; }

}  // namespace graft::hostwork
