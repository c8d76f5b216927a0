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
CUresult pointer_attribute(void* out, int attribute, CUdeviceptr p) {
  Target target;
  std::string why;
  const bool known = resolve(p, 1, &target, &why) && target.owner != nullptr;
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (attribute == 13) {  // MAPPED
    *static_cast<int*>(out) = known;
    return CUDA_SUCCESS;
  }
  if (!known) return refuse(CUDA_ERROR_INVALID_VALUE, hex(p) + " was not allocated by the device");
  const Allocation& a = *target.owner;
  const auto offset = static_cast<size_t>(target.address - a.storage);
  switch (attribute) {
    case 1:  // CONTEXT
      *static_cast<CUcontext*>(out) = primary_context();
      return CUDA_SUCCESS;
    case 2:  // MEMORY_TYPE
      *static_cast<unsigned*>(out) = a.host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
      return CUDA_SUCCESS;
    case 3:  // DEVICE_POINTER
      *static_cast<CUdeviceptr*>(out) = a.alias + offset;
      return CUDA_SUCCESS;
    case 4:  // HOST_POINTER
      if (!a.host) return CUDA_ERROR_INVALID_VALUE;
      *static_cast<void**>(out) = target.address;
      return CUDA_SUCCESS;
    case 7:  // BUFFER_ID
      *static_cast<unsigned long long*>(out) = a.id;
      return CUDA_SUCCESS;
    case 8:  // IS_MANAGED
      *static_cast<unsigned*>(out) = 0;
      return CUDA_SUCCESS;
    case 9:  // DEVICE_ORDINAL
      *static_cast<int*>(out) = 0;
      return CUDA_SUCCESS;
    case 11:  // RANGE_START_ADDR
      *static_cast<CUdeviceptr*>(out) = a.alias;
      return CUDA_SUCCESS;
    case 12:  // RANGE_SIZE
      *static_cast<size_t*>(out) = a.size;
      return CUDA_SUCCESS;
    default:
      return refuse(CUDA_ERROR_NOT_SUPPORTED,
                    "pointer attribute " + std::to_string(attribute) + " is not implemented");
  }
}
}  // namespace

SC_EXPORT CUresult cuPointerGetAttribute(void* out, int attribute, CUdeviceptr p) {
  SC_API(cuPointerGetAttribute, kNoLock);
  return pointer_attribute(out, attribute, p);
}

SC_EXPORT CUresult cuPointerGetAttributes(unsigned n, int* attributes, void** out, CUdeviceptr p) {
  SC_API(cuPointerGetAttributes, kNoLock);
  if (attributes == nullptr || out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  for (unsigned i = 0; i < n; ++i) {
    if (CUresult r = pointer_attribute(out[i], attributes[i], p); r != CUDA_SUCCESS) return r;
  }
  return CUDA_SUCCESS;
}
