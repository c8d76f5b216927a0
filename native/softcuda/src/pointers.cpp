// Questions about addresses: aliases of pinned memory, ranges, attributes.
#include "memory.h"
#include "scheduler.h"

using namespace softcuda;

// Memory that the device knows; none is no failure.
static Target known(unsigned long long p) {
  Target target;
  std::string why;
  if (!resolve(p, 1, &target, &why)) target.owner = nullptr;
  return target;
}

static std::shared_ptr<Allocation> find_pinned(void* p) {
  const auto address = reinterpret_cast<unsigned long long>(p);
  const Target target = known(address);
  if (target.owner && target.owner->host) return target.owner;
  refuse(CUDA_ERROR_INVALID_VALUE, hex(address) + " is not pinned host memory");
}

SC_API(cuMemHostGetDevicePointer_v2, 3020, kNoLock, CUdeviceptr*, out, void*, p, unsigned, flags) {
  need(out != nullptr && flags == 0);
  const auto pinned = find_pinned(p);
  *out = pinned->alias + static_cast<size_t>(static_cast<char*>(p) - pinned->storage);
}

namespace {
constexpr int kNoDevice = -2;  // CU_DEVICE_INVALID

template <class T>
void tell(void* out, T value) {
  *static_cast<T*>(out) = value;
}

// `a` is null for memory that the device does not know: the values that stand for nothing.
void pointer_attribute(void* out, int attribute, const Target& target) {
  const Allocation* a = target.owner.get();
  switch (attribute) {
    case 1:  // CONTEXT
      return tell<CUcontext>(out, a ? primary_context() : nullptr);
    case 2:  // MEMORY_TYPE
      return tell<unsigned>(out, !a        ? 0u
                                 : a->host ? 0u + CU_MEMORYTYPE_HOST
                                           : 0u + CU_MEMORYTYPE_DEVICE);
    case 3:  // DEVICE_POINTER
      return tell<CUdeviceptr>(out,
                               a ? a->alias + static_cast<size_t>(target.address - a->storage) : 0);
    case 4:  // HOST_POINTER
      return tell<void*>(out, a && a->host ? target.address : nullptr);
    case 7:  // BUFFER_ID
      return tell<unsigned long long>(out, a ? a->id : 0);
    case 9:  // DEVICE_ORDINAL
      return tell<int>(out, a ? 0 : kNoDevice);
    case 11:  // RANGE_START_ADDR
      return tell<CUdeviceptr>(out, a ? a->alias : 0);
    case 12:  // RANGE_SIZE
      return tell<size_t>(out, a ? a->size : 0);
    case 13:  // MAPPED
      return tell<bool>(out, a != nullptr);
    case 6:   // SYNC_MEMOPS
    case 8:   // IS_MANAGED
    case 10:  // IS_LEGACY_CUDA_IPC_CAPABLE
    case 15:  // IS_GPU_DIRECT_RDMA_CAPABLE
      return tell<bool>(out, false);
    case 14:  // ALLOWED_HANDLE_TYPES
      return tell<unsigned long long>(out, 0);
    case 17:  // MEMPOOL_HANDLE
      return tell<void*>(out, nullptr);
    default:
      refuse(CUDA_ERROR_NOT_SUPPORTED,
             "pointer attribute " + std::to_string(attribute) + " is not implemented");
  }
}
}  // namespace

SC_API(cuPointerGetAttribute, 4000, kNoLock, void*, out, int, attribute, CUdeviceptr, p) {
  constexpr int kHostPointer = 4, kMapped = 13;
  need(out != nullptr);
  const Target target = known(p);
  if (!target.owner && attribute != kMapped) {
    refuse(CUDA_ERROR_INVALID_VALUE, hex(p) + " was not allocated by the device");
  }
  need(attribute != kHostPointer || target.owner->host);
  pointer_attribute(out, attribute, target);
}

// Succeeds for any address.
SC_API(cuPointerGetAttributes, 7000, kNoLock, unsigned, n, int*, attributes, void**, out,
       CUdeviceptr, p) {
  need(n != 0 && attributes != nullptr && out != nullptr);
  const Target target = known(p);
  for (unsigned i = 0; i < n; ++i) pointer_attribute(out[i], attributes[i], target);
}
