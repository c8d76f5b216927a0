// Driver entry points for native code, taken from the one libcuda.so.1 of the process.
//
// No CUDA header is needed: the few types below are those of the public driver ABI.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace graft::hostwork {

using Result = int;  // CUresult
using Handle = void*;
using HostFunction = void (*)(void*);

constexpr Result kSuccess = 0;
constexpr Result kNotReady = 600;  // CUDA_ERROR_NOT_READY

struct UpdateInfo {  // CUgraphExecUpdateResultInfo
  int result;
  Handle error_node;
  Handle error_from_node;
};

// One function pointer per driver call that graft makes from native code. Every call is made
// with the GIL released.
struct Driver {
  Result (*ctx_set_current)(Handle context);
  Result (*launch_host_func)(Handle stream, HostFunction fn, void* data);
  Result (*launch_host_func_v2)(Handle stream, HostFunction fn, void* data,
                                unsigned int sync_mode);  // null before CUDA 13.2
  Result (*stream_get_capture_info)(Handle stream, int* status, std::uint64_t* id, Handle* graph,
                                    const Handle** dependencies, const void** edges,
                                    std::size_t* count);
  Result (*thread_exchange_capture_mode)(int* mode);
  Result (*stream_query)(Handle stream);
  Result (*stream_destroy)(Handle stream);
  Result (*event_create)(Handle* event, unsigned int flags);
  Result (*event_query)(Handle event);
  Result (*event_record)(Handle event, Handle stream);
  Result (*event_destroy)(Handle event);
  Result (*mem_free)(std::uint64_t address);
  Result (*mem_free_host)(void* address);
  Result (*module_unload)(Handle module);
  Result (*graph_destroy)(Handle graph);
  Result (*graph_exec_destroy)(Handle exec);
  Result (*graph_exec_kernel_set)(Handle exec, Handle node, const void* params);
  Result (*graph_node_set_enabled)(Handle exec, Handle node, unsigned int enabled);
  Result (*graph_node_get_enabled)(Handle exec, Handle node, unsigned int* enabled);
  Result (*graph_launch)(Handle exec, Handle stream);
  Result (*graph_upload)(Handle exec, Handle stream);
  Result (*graph_exec_update)(Handle exec, Handle graph, UpdateInfo* info);
  Result (*user_object_create)(Handle* object, void* data, HostFunction destroy, unsigned int count,
                               unsigned int flags);
  Result (*user_object_release)(Handle object, unsigned int count);
  Result (*graph_retain_user_object)(Handle graph, Handle object, unsigned int count,
                                     unsigned int flags);
  Result (*graph_release_user_object)(Handle graph, Handle object, unsigned int count);
  void (*owe_answer)(int owes);  // of the soft device only; null on others
};

// Fills the table from the already loaded libcuda.so.1, which must be the library at `path`
// (the file the device chooser loaded). Throws std::runtime_error otherwise. Called once.
void bind_driver(const std::string& path, Handle context);

// Names the primary context anew after it was released and retained again; 0 while it is released.
// Nothing of the driver's may be alive at that moment (live_resources() == 0).
void set_primary_context(Handle context);

// The table; throws std::logic_error before bind_driver().
const Driver& driver();
Handle primary_context();

// The file that answers for a SONAME in this process, or "" when none is loaded.
std::string loaded_library(const std::string& soname);

}  // namespace graft::hostwork
