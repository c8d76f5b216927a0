// Initialization, settings, the device and its contexts.
#include <pthread.h>
#include <sched.h>

#include <cstdlib>
#include <cstring>
#include <set>
#include <thread>

#include "calls.h"
#include "capture.h"
#include "watch.h"

namespace softcuda {

namespace {
std::atomic<bool> g_initialised{false}, g_forked{false};
std::mutex& g_context_mutex = *new std::mutex;
unsigned g_retains = 0;
unsigned g_primary_flags = 0;
// The context stack of the thread (cuCtxPushCurrent). Its last element is the current context.
thread_local std::vector<CUcontext> t_stack;
// Handle of the primary context; never dereferenced. Memory, streams and modules belong to the
// device, so all contexts share them.
const CUcontext kPrimary = reinterpret_cast<CUcontext>(0x50000000000010);
std::set<CUcontext>& g_created = *new std::set<CUcontext>;

// Returns a numeric environment variable; `fallback` if it is not set or not a number.
unsigned long number_setting(const char* name, unsigned long fallback) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return fallback;
  char* end = nullptr;
  const unsigned long value = std::strtoul(text, &end, 10);
  if (*end == '\0') return value;
  log_line(std::string("softcuda: ") + name + "=" + text + " is not a number; using " +
           std::to_string(fallback));
  return fallback;
}

// Whether an environment variable has a value.
bool text_setting(const char* name, const char* value) {
  const char* text = std::getenv(name);
  return text != nullptr && std::strcmp(text, value) == 0;
}

unsigned usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return static_cast<unsigned>(CPU_COUNT(&set));
  return std::thread::hardware_concurrency();
}
}  // namespace

bool is_context(CUcontext context) {
  std::lock_guard<std::mutex> lock(g_context_mutex);
  return context == kPrimary || g_created.count(context) != 0;
}

void set_context_flags(unsigned flags) {
  std::lock_guard<std::mutex> lock(g_context_mutex);
  g_primary_flags = flags;
}

bool forked() { return g_forked.load(std::memory_order_relaxed); }
bool initialised() { return g_initialised.load(std::memory_order_acquire); }
CUcontext primary_context() { return kPrimary; }
CUcontext current_context() { return t_stack.empty() ? nullptr : t_stack.back(); }

const Settings& settings() {
  static const Settings& s = *[] {
    auto* out = new Settings{};
    const unsigned cores = usable_cores();
    out->workers =
        static_cast<unsigned>(number_setting("SOFTCUDA_WORKERS", cores < 16 ? cores : 16));
    if (out->workers == 0) out->workers = 1;
    if (out->workers > 256) out->workers = 256;
    out->log = number_setting("SOFTCUDA_LOG", 0) != 0;
    out->lock_model = static_cast<unsigned>(number_setting("SOFTCUDA_LOCK_MODEL", 0));
    out->watchdog_seconds = static_cast<unsigned>(number_setting("SOFTCUDA_WATCHDOG", 0));
    out->poison = number_setting("SOFTCUDA_POISON", 0) != 0;
    out->memory = number_setting("SOFTCUDA_MEMORY", 0);
    out->memops = number_setting("SOFTCUDA_MEMOPS", 1) != 0;
    out->queues = static_cast<unsigned>(number_setting("SOFTCUDA_QUEUES", 0));
    out->launch_blocking =
        number_setting("SOFTCUDA_LAUNCH_BLOCKING", number_setting("CUDA_LAUNCH_BLOCKING", 0)) != 0;
    out->free_waits = !text_setting("SOFTCUDA_FREE", "immediate");
    if (text_setting("SOFTCUDA_BODY", "serial")) out->body_order = BodyOrder::serial;
    if (text_setting("SOFTCUDA_BODY", "reverse")) out->body_order = BodyOrder::reverse;
    out->kernel_seconds = static_cast<unsigned>(number_setting("SOFTCUDA_ATTRIBUTE_17", 0));
    const char* loading = std::getenv("CUDA_MODULE_LOADING");
    out->lazy_loading = loading == nullptr || std::strcmp(loading, "EAGER") != 0;
    out->inline_destructors = text_setting("SOFTCUDA_DESTRUCTORS", "inline");
    return out;
  }();
  return s;
}

// Returns the value of a device attribute. An attribute that is not in the table is 0, which means
// that the device lacks the feature. For attributes of stream memory operations, the environment
// variable SOFTCUDA_ATTRIBUTE_<n>=0 has the same effect.
int device_attribute(int attribute) {
  static const std::map<int, int>& known = *[] {
    auto* table = new std::map<int, int>{
        {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
        {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 1024},
        {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, 1024},
        {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, 64},
        {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, 0x7fffffff},
        {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, 65535},
        {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, 65535},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 49152},
        {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
        {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, 65536},
        {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1000000},
        {CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT, 512},
        {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, static_cast<int>(settings().workers)},
        {CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT, settings().kernel_seconds != 0},
        {CU_DEVICE_ATTRIBUTE_INTEGRATED, 1},
        {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
        {CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1},
        {CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 1000000},
        {CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 64},
        {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 1 << 20},
        {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 2048},
        {CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 1},
        {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0},
        {CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 233472},
        {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR, 65536},
        {CU_DEVICE_ATTRIBUTE_HOST_NATIVE_ATOMIC_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, 1},
        {CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, 1},
        {CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1, 1},
        {CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS_V1, 1},
        {CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR_V1, 1},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 232448},
        {CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES, 1},
        {CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR, 32},
        {CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK, 1024},
        {CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, 1},
        {CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR, 1},
        {CU_DEVICE_ATTRIBUTE_HOST_NUMA_MEMORY_POOLS_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_HOST_MEMORY_POOLS_SUPPORTED, 1},
    };
    for (int n : {CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1,
                  CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS_V1,
                  CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR_V1,
                  CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES,
                  CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS,
                  CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR}) {
      const std::string name = "SOFTCUDA_ATTRIBUTE_" + std::to_string(n);
      if (number_setting(name.c_str(), 1) == 0) (*table)[n] = 0;
    }
    return table;
  }();
  auto it = known.find(attribute);
  return it == known.end() ? 0 : it->second;
}

}  // namespace softcuda

using namespace softcuda;

SC_API(cuInit, 2000, kNoInit | kNoLock | kAfterFault, unsigned, flags) {
  require(flags == 0);
  check_failure_setting();
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, [] { g_forked = true; }); });
  g_initialised.store(true, std::memory_order_release);
}

SC_API(cuDriverGetVersion, 2020, kAlways, int*, version) {
  require(version != nullptr);
  *version = 13050;
}

SC_API(cuDeviceGetCount, 2000, kNoLock | kAfterFault, int*, count) {
  require(count != nullptr);
  *count = 1;
}

SC_API(cuDeviceGet, 2000, kNoLock | kAfterFault, CUdevice*, device, int, ordinal) {
  require(device != nullptr);
  require(ordinal == 0, CUDA_ERROR_INVALID_DEVICE, "the only soft device has ordinal 0");
  *device = 0;
}

SC_API(cuDeviceGetName, 2000, kNoLock | kAfterFault, char*, name, int, size, CUdevice, device) {
  require(device == 0, CUDA_ERROR_INVALID_DEVICE);
  require(name != nullptr && size > 0);
  std::strncpy(name, "graft soft device", static_cast<size_t>(size));
  name[size - 1] = '\0';
}

SC_API(cuDeviceGetUuid_v2, 11040, kNoLock | kAfterFault, unsigned char*, uuid, CUdevice, device) {
  require(device == 0, CUDA_ERROR_INVALID_DEVICE);
  require(uuid != nullptr);
  std::memcpy(uuid, "graft-softdevice", 16);
}

SC_API(cuDeviceTotalMem_v2, 3020, kNoLock | kAfterFault, size_t*, bytes, CUdevice, device) {
  require(device == 0, CUDA_ERROR_INVALID_DEVICE);
  require(bytes != nullptr);
  *bytes = total_memory();
}

SC_API(cuDeviceGetAttribute, 2000, kNoLock | kAfterFault, int*, value, int, attribute, CUdevice,
       device) {
  require(device == 0, CUDA_ERROR_INVALID_DEVICE);
  require(value != nullptr);
  if (attribute < 1 || attribute > 161) {
    refuse(CUDA_ERROR_INVALID_VALUE, "unknown device attribute " + std::to_string(attribute));
  }
  *value = device_attribute(attribute);
}

SC_API(cuDeviceComputeCapability, 2000, kNoLock | kAfterFault, int*, major, int*, minor, CUdevice,
       device) {
  require(device == 0, CUDA_ERROR_INVALID_DEVICE);
  require(major != nullptr && minor != nullptr);
  *major = 9;
  *minor = 0;
}

static void start_device() {
  install_fault_handlers();
  start_workers();
  start_watchdog();
  start_watch();
}

namespace softcuda {

// Returns the handle of a new context.
CUcontext add_context() {
  static auto next = reinterpret_cast<uintptr_t>(kPrimary);
  std::lock_guard<std::mutex> lock(g_context_mutex);
  start_device();
  const auto context = reinterpret_cast<CUcontext>(next += 16);
  g_created.insert(context);
  live_add(Resource::context, 1);
  return context;
}

// Removes a context that add_context() returned. Returns false if the handle is unknown.
bool remove_context(CUcontext context) {
  std::lock_guard<std::mutex> lock(g_context_mutex);
  if (g_created.erase(context) == 0) return false;
  live_add(Resource::context, -1);
  if (current_context() == context) t_stack.pop_back();
  return true;
}

}  // namespace softcuda

SC_API(cuCtxCreate_v4, 12050, 0, CUcontext*, out, const void*, params, unsigned, flags, CUdevice,
       device) {
  require(device == 0, CUDA_ERROR_INVALID_DEVICE);
  require(out != nullptr && (flags & ~0x1fu) == 0);
  // CUctxCreateParams contains two pointers and a count. Only a structure of zeros is accepted,
  // because the features that it requests are not implemented.
  static const char zeros[24] = {};
  require(params == nullptr || std::memcmp(params, zeros, sizeof zeros) == 0,
          CUDA_ERROR_NOT_SUPPORTED,
          "contexts with execution affinity or CIG parameters are not implemented");
  *out = add_context();
  t_stack.push_back(*out);
}

SC_API(cuCtxDestroy_v2, 4000, kAfterFault, CUcontext, context) {
  require(context != kPrimary && is_context(context), CUDA_ERROR_INVALID_CONTEXT);
  if (sticky() == CUDA_SUCCESS) wait_idle("cuCtxDestroy: all work to finish");
  require(remove_context(context), CUDA_ERROR_INVALID_CONTEXT);
}

SC_API(cuDevicePrimaryCtxRetain, 7000, 0, CUcontext*, context, CUdevice, device) {
  require(device == 0, CUDA_ERROR_INVALID_DEVICE);
  require(context != nullptr);
  std::lock_guard<std::mutex> lock(g_context_mutex);
  if (g_retains++ == 0) live_add(Resource::context, 1);
  start_device();
  *context = kPrimary;
}

SC_API(cuDevicePrimaryCtxRelease_v2, 11000, kAfterFault, CUdevice, device) {
  require(device == 0, CUDA_ERROR_INVALID_DEVICE);
  if (sticky() == CUDA_SUCCESS) wait_idle("cuDevicePrimaryCtxRelease: all work to finish");
  std::lock_guard<std::mutex> lock(g_context_mutex);
  require(g_retains > 0, CUDA_ERROR_INVALID_CONTEXT,
          "the primary context was released more often than retained");
  if (--g_retains == 0) live_add(Resource::context, -1);
}

SC_API(cuDevicePrimaryCtxGetState, 7000, kNoLock | kAfterFault, CUdevice, device, unsigned*, flags,
       int*, active) {
  require(device == 0, CUDA_ERROR_INVALID_DEVICE);
  require(flags != nullptr && active != nullptr);
  std::lock_guard<std::mutex> lock(g_context_mutex);
  *flags = g_primary_flags;
  *active = g_retains > 0;
}

// The flags, which select how a thread waits for the device, are stored and returned only.
SC_API(cuDevicePrimaryCtxSetFlags_v2, 11000, kNoLock, CUdevice, device, unsigned, flags) {
  require(device == 0, CUDA_ERROR_INVALID_DEVICE);
  require((flags & ~0x1fu) == 0);
  set_context_flags(flags);
}

SC_API(cuCtxGetFlags, 7000, kNoLock, unsigned*, flags) {
  require(flags != nullptr);
  require(current_context() != nullptr, CUDA_ERROR_INVALID_CONTEXT);
  std::lock_guard<std::mutex> lock(g_context_mutex);
  *flags = g_primary_flags;
}

// There is only one device, which is not a peer of itself.
SC_API(cuDeviceCanAccessPeer, 4000, kNoLock, int*, out, CUdevice, device, CUdevice, peer) {
  require(device == 0 && peer == 0, CUDA_ERROR_INVALID_DEVICE);
  require(out != nullptr);
  *out = 0;
}

SC_API(cuDeviceGetPCIBusId, 4010, kNoLock | kAfterFault, char*, out, int, size, CUdevice, device) {
  require(device == 0, CUDA_ERROR_INVALID_DEVICE);
  require(out != nullptr && size > 0);
  copy_text("0000:00:00.0", out, static_cast<size_t>(size));
}

SC_API(cuCtxSetCurrent, 4000, kNoLock, CUcontext, context) {
  require(context == nullptr || is_context(context), CUDA_ERROR_INVALID_CONTEXT);
  if (!t_stack.empty()) t_stack.pop_back();
  if (context != nullptr) t_stack.push_back(context);
}

SC_API(cuCtxGetCurrent, 4000, kNoLock | kAfterFault, CUcontext*, context) {
  require(context != nullptr);
  *context = current_context();
}

SC_API(cuCtxPushCurrent_v2, 4000, kNoLock, CUcontext, context) {
  require(is_context(context), CUDA_ERROR_INVALID_CONTEXT);
  t_stack.push_back(context);
}

SC_API(cuCtxPopCurrent_v2, 4000, kNoLock, CUcontext*, context) {
  require(!t_stack.empty(), CUDA_ERROR_INVALID_CONTEXT);
  if (context != nullptr) *context = t_stack.back();
  t_stack.pop_back();
}

SC_API(cuCtxGetDevice, 2000, kNoLock, CUdevice*, device) {
  require(device != nullptr);
  require(current_context() != nullptr, CUDA_ERROR_INVALID_CONTEXT);
  *device = 0;
}

SC_API_CODE(cuCtxSynchronize, 2000, kNoLock) {
  capture_reject_device_sync();
  require(current_context() != nullptr, CUDA_ERROR_INVALID_CONTEXT);
  return wait_idle("cuCtxSynchronize: all work to finish");
}

SC_API(cuCtxGetStreamPriorityRange, 5050, kNoLock, int*, least, int*, greatest) {
  if (least != nullptr) *least = kLeastPriority;
  if (greatest != nullptr) *greatest = kGreatestPriority;
}
