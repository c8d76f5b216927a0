// Questions about addresses: aliases of pinned memory, ranges, attributes.
#include "memory.h"
#include "scheduler.h"

using namespace softcuda;

SC_EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* out, void* p, unsigned flags) {
  SC_API(cuMemHostGetDevicePointer, kNoLock);
  if (out == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  Target target;
  std::string why;
  if (!resolve(reinterpret_cast<unsigned long long>(p), 1, &target, &why) || !target.owner ||
      !target.owner->host) {
    return refuse(CUDA_ERROR_INVALID_VALUE,
                  hex(reinterpret_cast<unsigned long long>(p)) + " is not pinned host memory");
  }
  *out = target.owner->alias + static_cast<size_t>(static_cast<char*>(p) - target.owner->storage);
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuMemHostGetFlags(unsigned* out, void* p) {
  SC_API(cuMemHostGetFlags, kNoLock);
  Target target;
  std::string why;
  if (out == nullptr || !resolve(reinterpret_cast<unsigned long long>(p), 1, &target, &why) ||
      !target.owner || !target.owner->host) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *out = target.owner->flags;
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* size, CUdeviceptr p) {
  SC_API(cuMemGetAddressRange, kNoLock);
  Target target;
  std::string why;
  if (!is_alias(p) || !resolve(p, 1, &target, &why)) {
    return refuse(CUDA_ERROR_NOT_FOUND, "cuMemGetAddressRange: " + why);
  }
  if (base != nullptr) *base = target.owner->alias;
  if (size != nullptr) *size = target.owner->size;
  return CUDA_SUCCESS;
}

namespace {
constexpr int kNoDevice = -2;  // CU_DEVICE_INVALID

template <class T>
CUresult tell(void* out, T value) {
  *static_cast<T*>(out) = value;
  return CUDA_SUCCESS;
}

// `a` is null for memory that the device does not know: the values that stand for nothing.
CUresult pointer_attribute(void* out, int attribute, const Target& target) {
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
      return refuse(CUDA_ERROR_NOT_SUPPORTED,
                    "pointer attribute " + std::to_string(attribute) + " is not implemented");
  }
}
}  // namespace

SC_EXPORT CUresult cuPointerGetAttribute(void* out, int attribute, CUdeviceptr p) {
  SC_API(cuPointerGetAttribute, kNoLock);
  constexpr int kHostPointer = 4, kMapped = 13;
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Target target;
  std::string why;
  if (!resolve(p, 1, &target, &why)) target.owner = nullptr;
  if (!target.owner && attribute != kMapped) {
    return refuse(CUDA_ERROR_INVALID_VALUE, hex(p) + " was not allocated by the device");
  }
  if (attribute == kHostPointer && !target.owner->host) return CUDA_ERROR_INVALID_VALUE;
  return pointer_attribute(out, attribute, target);
}

// Succeeds for any address.
SC_EXPORT CUresult cuPointerGetAttributes(unsigned n, int* attributes, void** out, CUdeviceptr p) {
  SC_API(cuPointerGetAttributes, kNoLock);
  if (n == 0 || attributes == nullptr || out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Target target;
  std::string why;
  if (!resolve(p, 1, &target, &why)) target.owner = nullptr;
  for (unsigned i = 0; i < n; ++i) {
    if (CUresult r = pointer_attribute(out[i], attributes[i], target); r != CUDA_SUCCESS) return r;
  }
  return CUDA_SUCCESS;
}
