// Initialisation, the one device and its primary context.
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
unsigned g_context_flags = 0;
thread_local std::vector<CUcontext> t_stack;  // the top is current
// The primary context's handle; never dereferenced. Others are further names for the same device:
// memory, streams and modules are common to all.
const CUcontext kPrimary = reinterpret_cast<CUcontext>(0x50000000000010);
std::set<CUcontext>& g_created = *new std::set<CUcontext>;

bool is_context(CUcontext context) {
  std::lock_guard<std::mutex> lock(g_context_mutex);
  return context == kPrimary || g_created.count(context) != 0;
}

unsigned long number(const char* name, unsigned long fallback) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return fallback;
  char* end = nullptr;
  const unsigned long value = std::strtoul(text, &end, 10);
  if (*end == '\0') return value;
  log_line(std::string("softcuda: ") + name + "=" + text + " is not a number; using " +
           std::to_string(fallback));
  return fallback;
}

unsigned usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return static_cast<unsigned>(CPU_COUNT(&set));
  return std::thread::hardware_concurrency();
}
}  // namespace

bool forked() { return g_forked.load(std::memory_order_relaxed); }
bool initialised() { return g_initialised.load(std::memory_order_acquire); }
CUcontext primary_context() { return kPrimary; }
CUcontext current_context() { return t_stack.empty() ? nullptr : t_stack.back(); }

const Settings& settings() {
  static const Settings& s = *[] {
    auto* out = new Settings{};
    const unsigned cores = usable_cores();
    out->workers = static_cast<unsigned>(number("SOFTCUDA_WORKERS", cores < 16 ? cores : 16));
    if (out->workers == 0) out->workers = 1;
    if (out->workers > 256) out->workers = 256;
    out->strict = number("SOFTCUDA_STRICT", 1) != 0;
    out->log = number("SOFTCUDA_LOG", 0) != 0;
    out->lock_model = static_cast<unsigned>(number("SOFTCUDA_LOCK_MODEL", 0));
    out->watchdog_seconds = static_cast<unsigned>(number("SOFTCUDA_WATCHDOG", 0));
    out->poison = number("SOFTCUDA_POISON", 0) != 0;
    out->aliases_only = number("SOFTCUDA_ALIASES_ONLY", 0) != 0;
    out->memory = number("SOFTCUDA_MEMORY", 0);
    out->memops = number("SOFTCUDA_MEMOPS", 1) != 0;
    out->queues = static_cast<unsigned>(number("SOFTCUDA_QUEUES", 0));
    const char* loading = std::getenv("CUDA_MODULE_LOADING");
    out->lazy_loading = loading == nullptr || std::strcmp(loading, "EAGER") != 0;
    const char* mode = std::getenv("SOFTCUDA_DESTRUCTORS");
    out->inline_destructors = mode != nullptr && std::strcmp(mode, "inline") == 0;
    return out;
  }();
  return s;
}

// Attributes not listed answer 0: the feature is absent. SOFTCUDA_ATTRIBUTE_<n>=0 makes one absent.
int device_attribute(int attribute) {
  static const std::map<int, int>& known = *[] {
    auto* table = new std::map<int, int>{
        // clang-format off
        {1, 1024}, {2, 1024}, {3, 1024}, {4, 64}, {5, 0x7fffffff}, {6, 65535}, {7, 65535},
        {8, 49152}, {10, 32}, {12, 65536}, {13, 1000000}, {14, 512},
        {16, static_cast<int>(settings().workers)}, {18, 1}, {19, 1}, {31, 1}, {36, 1000000},
        {37, 64}, {38, 1 << 20}, {39, 2048}, {40, 1}, {41, 1}, {75, 9}, {76, 0}, {78, 1},
        {81, 233472}, {82, 65536}, {86, 1}, {92, 1}, {93, 1}, {94, 1}, {97, 232448}, {98, 1},
        {99, 1}, {106, 32}, {111, 1024}, {122, 1}, {123, 1}, {148, 1},
        // clang-format on
    };
    for (int n : {92, 93, 94, 98, 122, 123, 148}) {
      const std::string name = "SOFTCUDA_ATTRIBUTE_" + std::to_string(n);
      if (number(name.c_str(), 1) == 0) (*table)[n] = 0;
    }
    return table;
  }();
  auto it = known.find(attribute);
  return it == known.end() ? 0 : it->second;
}

}  // namespace softcuda

using namespace softcuda;

SC_EXPORT CUresult cuInit(unsigned flags) {
  SC_API(cuInit, kNoInit | kNoLock | kAfterFault);
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, [] { g_forked = true; }); });
  g_initialised.store(true, std::memory_order_release);
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuDriverGetVersion(int* version) {
  SC_API(cuDriverGetVersion, kAlways);
  if (version == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *version = 13020;
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuDeviceGetCount(int* count) {
  SC_API(cuDeviceGetCount, kNoLock | kAfterFault);
  if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *count = 1;
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  SC_API(cuDeviceGet, kNoLock | kAfterFault);
  if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (ordinal != 0) return refuse(CUDA_ERROR_INVALID_DEVICE, "there is one soft device, ordinal 0");
  *device = 0;
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuDeviceGetName(char* name, int size, CUdevice device) {
  SC_API(cuDeviceGetName, kNoLock | kAfterFault);
  if (device != 0) return CUDA_ERROR_INVALID_DEVICE;
  if (name == nullptr || size <= 0) return CUDA_ERROR_INVALID_VALUE;
  std::strncpy(name, "graft soft device", static_cast<size_t>(size));
  name[size - 1] = '\0';
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuDeviceGetUuid_v2(unsigned char* uuid, CUdevice device) {
  SC_API(cuDeviceGetUuid, kNoLock | kAfterFault);
  if (device != 0) return CUDA_ERROR_INVALID_DEVICE;
  if (uuid == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(uuid, "graft-softdevice", 16);
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice device) {
  SC_API(cuDeviceTotalMem, kNoLock | kAfterFault);
  if (device != 0) return CUDA_ERROR_INVALID_DEVICE;
  if (bytes == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *bytes = total_memory();
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice device) {
  SC_API(cuDeviceGetAttribute, kNoLock | kAfterFault);
  if (device != 0) return CUDA_ERROR_INVALID_DEVICE;
  if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (attribute < 1 || attribute > 161) {
    return refuse(CUDA_ERROR_INVALID_VALUE, "no device attribute " + std::to_string(attribute));
  }
  *value = device_attribute(attribute);
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuDeviceComputeCapability(int* major, int* minor, CUdevice device) {
  SC_API(cuDeviceComputeCapability, kNoLock | kAfterFault);
  if (device != 0) return CUDA_ERROR_INVALID_DEVICE;
  if (major == nullptr || minor == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *major = 9;
  *minor = 0;
  return CUDA_SUCCESS;
}

static void start_device() {
  install_fault_handlers();
  start_workers();
  start_watchdog();
  start_watch();
}

static CUresult create_context(CUcontext* out, unsigned flags, CUdevice device) {
  if (device != 0) return CUDA_ERROR_INVALID_DEVICE;
  if (out == nullptr || (flags & ~0x1fu) != 0) return CUDA_ERROR_INVALID_VALUE;
  static auto next = reinterpret_cast<uintptr_t>(kPrimary);
  std::lock_guard<std::mutex> lock(g_context_mutex);
  start_device();
  *out = reinterpret_cast<CUcontext>(next += 16);
  g_created.insert(*out);
  t_stack.push_back(*out);
  live_add(Kind::context, 1);
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuCtxCreate_v2(CUcontext* out, unsigned flags, CUdevice device) {
  SC_API(cuCtxCreate, 0);
  return create_context(out, flags, device);
}

SC_EXPORT CUresult cuCtxCreate_v4(CUcontext* out, const void* params, unsigned flags,
                                  CUdevice device) {
  SC_API(cuCtxCreate, 0);
  // Two pointers and a count: execution affinity, or memory of a client.
  static const char none[24] = {};
  if (params != nullptr && std::memcmp(params, none, sizeof none) != 0) {
    return refuse(CUDA_ERROR_NOT_SUPPORTED, "contexts with special parameters");
  }
  return create_context(out, flags, device);
}

SC_EXPORT CUresult cuCtxDestroy_v2(CUcontext context) {
  SC_API(cuCtxDestroy, kAfterFault);
  if (context == kPrimary || !is_context(context)) return CUDA_ERROR_INVALID_CONTEXT;
  if (sticky() == CUDA_SUCCESS) wait_idle("destroying the context: all work to finish");
  std::lock_guard<std::mutex> lock(g_context_mutex);
  if (g_created.erase(context) == 0) return CUDA_ERROR_INVALID_CONTEXT;
  live_add(Kind::context, -1);
  if (current_context() == context) t_stack.pop_back();
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  SC_API(cuDevicePrimaryCtxRetain, 0);
  if (device != 0) return CUDA_ERROR_INVALID_DEVICE;
  if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard<std::mutex> lock(g_context_mutex);
  if (g_retains++ == 0) live_add(Kind::context, 1);
  start_device();
  *context = kPrimary;
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  SC_API(cuDevicePrimaryCtxRelease, kAfterFault);
  if (device != 0) return CUDA_ERROR_INVALID_DEVICE;
  if (sticky() == CUDA_SUCCESS) wait_idle("releasing the context: all work to finish");
  std::lock_guard<std::mutex> lock(g_context_mutex);
  if (g_retains == 0) {
    return refuse(CUDA_ERROR_INVALID_CONTEXT, "the primary context is released more than retained");
  }
  if (--g_retains == 0) live_add(Kind::context, -1);
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
  SC_API(cuDevicePrimaryCtxReset, kAfterFault);
  if (device != 0) return CUDA_ERROR_INVALID_DEVICE;
  // After a fault this ends the context's use; before, graft never resets a shared context.
  if (sticky() != CUDA_SUCCESS) return CUDA_SUCCESS;
  return refuse(CUDA_ERROR_NOT_SUPPORTED, "the primary context is not reset while it works");
}

SC_EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  SC_API(cuDevicePrimaryCtxGetState, kNoLock | kAfterFault);
  if (device != 0) return CUDA_ERROR_INVALID_DEVICE;
  if (flags == nullptr || active == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard<std::mutex> lock(g_context_mutex);
  *flags = g_context_flags;
  *active = g_retains > 0;
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags) {
  SC_API(cuDevicePrimaryCtxSetFlags, kNoLock);
  if (device != 0) return CUDA_ERROR_INVALID_DEVICE;
  if ((flags & ~0x1fu) != 0) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard<std::mutex> lock(g_context_mutex);
  g_context_flags = flags;
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
  SC_API(cuCtxSetCurrent, kNoLock);
  if (context != nullptr && !is_context(context)) return CUDA_ERROR_INVALID_CONTEXT;
  if (!t_stack.empty()) t_stack.pop_back();
  if (context != nullptr) t_stack.push_back(context);
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuCtxGetCurrent(CUcontext* context) {
  SC_API(cuCtxGetCurrent, kNoLock | kAfterFault);
  if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *context = current_context();
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context) {
  SC_API(cuCtxPushCurrent, kNoLock);
  if (!is_context(context)) return CUDA_ERROR_INVALID_CONTEXT;
  t_stack.push_back(context);
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  SC_API(cuCtxPopCurrent, kNoLock);
  if (t_stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (context != nullptr) *context = t_stack.back();
  t_stack.pop_back();
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuCtxGetDevice(CUdevice* device) {
  SC_API(cuCtxGetDevice, kNoLock);
  if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (current_context() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  *device = 0;
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuCtxGetFlags(unsigned* flags) {
  SC_API(cuCtxGetFlags, kNoLock);
  if (flags == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (current_context() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  std::lock_guard<std::mutex> lock(g_context_mutex);
  *flags = g_context_flags;
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuCtxSynchronize() {
  SC_API(cuCtxSynchronize, kNoLock);
  if (CUresult r = capture_forbids_device(); r != CUDA_SUCCESS) return r;
  if (current_context() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  return wait_idle("cuCtxSynchronize: all work to finish");
}

SC_EXPORT CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  SC_API(cuCtxGetStreamPriorityRange, kNoLock);
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return CUDA_SUCCESS;
}
