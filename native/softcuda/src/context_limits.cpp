// Limits and preferences of contexts and kernels, profiler control, and lookups of the device. The
// soft device stores limits and preferences and returns them. Except for the stack limit, which
// recursive PTX kernels obey, they have no other effect.
#include <algorithm>
#include <cstring>

#include "modules.h"

namespace softcuda {
CUcontext current_context();
void set_context_flags(unsigned flags);
}  // namespace softcuda

using namespace softcuda;

namespace {

enum Limit : int { kStackSize = 0, kPrintfFifo = 1, kHeap = 2, kFetchGranularity = 5 };
std::mutex& g_limits_mutex = *new std::mutex;
size_t g_limits[] = {1024, 1 << 20, 8 << 20, 0, 0, 64};
int g_cache_config = 0;  // CU_FUNC_CACHE_PREFER_NONE

bool is_supported(int limit) {
  return (limit >= kStackSize && limit <= kHeap) || limit == kFetchGranularity;
}

void check_limit(int limit) {
  constexpr int kLimits = 11;  // CU_LIMIT_MAX
  require(limit >= 0 && limit < kLimits, CUDA_ERROR_INVALID_VALUE, "unknown limit");
  require(is_supported(limit), CUDA_ERROR_UNSUPPORTED_LIMIT, "the device does not have this limit");
}

void check_cache_config(int config) {
  constexpr int kPreferEqual = 3;
  require(config >= 0 && config <= kPreferEqual, CUDA_ERROR_INVALID_VALUE,
          "unknown cache configuration");
}

void require_context() { require(current_context() != nullptr, CUDA_ERROR_INVALID_CONTEXT); }

}  // namespace

size_t softcuda::stack_limit() {
  std::lock_guard<std::mutex> lock(g_limits_mutex);
  return g_limits[kStackSize];
}

SC_API(cuCtxGetLimit, 3010, kContext, size_t*, out, int, limit) {
  require(out != nullptr);
  check_limit(limit);
  std::lock_guard<std::mutex> lock(g_limits_mutex);
  *out = g_limits[limit];
}

SC_API(cuCtxSetLimit, 3010, kContext, int, limit, size_t, value) {
  check_limit(limit);
  std::lock_guard<std::mutex> lock(g_limits_mutex);
  constexpr size_t kMaxGranularity = 128;
  g_limits[limit] = limit == kFetchGranularity ? std::min(value, kMaxGranularity) : value;
}

SC_API(cuCtxGetCacheConfig, 3020, kContext, int*, out) {
  require(out != nullptr);
  std::lock_guard<std::mutex> lock(g_limits_mutex);
  *out = g_cache_config;
}

SC_API(cuCtxSetCacheConfig, 3020, kContext, int, config) {
  check_cache_config(config);
  std::lock_guard<std::mutex> lock(g_limits_mutex);
  g_cache_config = config;
}

SC_API(cuFuncSetCacheConfig, 3000, 0, CUfunction, function, int, config) {
  functions.find(function);
  check_cache_config(config);
}

SC_API(cuKernelSetCacheConfig, 12000, 0, CUkernel, kernel, int, config, CUdevice, device) {
  functions.find(kernel);
  check_cache_config(config);
  require(device == 0, CUDA_ERROR_INVALID_DEVICE);
}

// All contexts have API version 3.2, the last one that CUDA defines.
SC_API(cuCtxGetApiVersion, 3020, kNoLock, CUcontext, context, unsigned*, version) {
  require(version != nullptr);
  if (context == nullptr) require_context();
  require(context == nullptr || is_context(context), CUDA_ERROR_INVALID_CONTEXT);
  *version = 3020;
}

SC_API(cuCtxGetId, 12000, kNoLock, CUcontext, context, uint64_t*, id) {
  require(id != nullptr);
  if (context == nullptr) require_context();
  const CUcontext found = context == nullptr ? current_context() : context;
  require(is_context(found), CUDA_ERROR_INVALID_CONTEXT);
  *id = reinterpret_cast<uint64_t>(found) & 0xffffffff;
}

SC_API(cuCtxSetFlags, 12010, kContext, unsigned, flags) {
  require((flags & ~0x1fu) == 0);
  set_context_flags(flags);
}

SC_API(cuDeviceGetByPCIBusId, 4010, kNoLock | kAfterFault, CUdevice*, device, const char*, id) {
  require(device != nullptr && id != nullptr);
  require(std::strstr(id, "00:00.0") != nullptr, CUDA_ERROR_INVALID_DEVICE,
          "the PCI bus id of the soft device is 0000:00:00.0");
  *device = 0;
}

// There is only one device. Attributes of a pair of devices are therefore refused.
SC_API(cuDeviceGetP2PAttribute, 8000, kNoLock, int*, out, int, attribute, CUdevice, device,
       CUdevice, peer) {
  require(out != nullptr && attribute >= 1 && attribute <= 5);
  require(false, CUDA_ERROR_INVALID_DEVICE, "there is no second device");
}

SC_API(cuDeviceGetExecAffinitySupport, 11040, kNoLock, int*, out, int, type, CUdevice, device) {
  require(device == 0, CUDA_ERROR_INVALID_DEVICE);
  require(out != nullptr && type == 0);
  *out = 0;
}

// These calls control a profiler that is attached to the process. No profiler can be attached.
SC_API(cuProfilerStart, 4000, kContext) {}
SC_API(cuProfilerStop, 4000, kContext) {}
