// Queries about addresses: the device address of pinned memory, and pointer attributes.
#include "memory.h"
#include "memory_pools.h"
#include "scheduler.h"

using namespace softcuda;

// Returns the allocation that contains an address. `owner` is null if the device did not allocate
// the memory.
static Target find_allocation(unsigned long long p) {
  Target target;
  std::string why;
  if (!resolve(p, 1, &target, &why)) target.owner = nullptr;
  return target;
}

static std::shared_ptr<Allocation> find_pinned(void* p) {
  const auto address = reinterpret_cast<unsigned long long>(p);
  const Target target = find_allocation(address);
  if (target.owner && target.owner->host && target.owner->kind != MemoryKind::managed) {
    return target.owner;
  }
  refuse(CUDA_ERROR_INVALID_VALUE, hex(address) + " is not pinned host memory");
}

SC_API(cuMemHostGetDevicePointer_v2, 3020, kNoLock, CUdeviceptr*, out, void*, p, unsigned, flags) {
  require(out != nullptr && flags == 0);
  const auto pinned = find_pinned(p);
  *out = pinned->device_address() + static_cast<size_t>(static_cast<char*>(p) - pinned->storage);
}

SC_API(cuMemHostGetFlags, 2030, kNoLock, unsigned*, out, void*, p) {
  require(out != nullptr);
  *out = find_pinned(p)->flags;
}

SC_API(cuMemGetAddressRange_v2, 3020, kNoLock, CUdeviceptr*, base, size_t*, size, CUdeviceptr, p) {
  Target target;
  std::string why;
  const bool found = resolve(p, 1, &target, &why) && target.owner;
  if (!found || !(is_alias(p) || target.owner->unified())) {
    refuse(CUDA_ERROR_NOT_FOUND,
           hex(p) + " is not in an allocation" + (why.empty() ? "" : ": ") + why);
  }
  if (base != nullptr) *base = target.owner->device_address();
  if (size != nullptr) *size = target.owner->size;
}

namespace {
constexpr int kNoDevice = -2;  // CU_DEVICE_INVALID

template <class T>
void write_value(void* out, T value) {
  *static_cast<T*>(out) = value;
}

// Whether the memory is host memory, as opposed to device memory or managed memory.
bool is_host_type(const Allocation& a) { return a.host && a.kind != MemoryKind::managed; }

// Writes a pointer attribute to `out`. The attributes of memory that the device did not allocate
// have the documented default values.
void pointer_attribute(void* out, int attribute, const Target& target) {
  const Allocation* a = target.owner.get();
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      return write_value<CUcontext>(out, a ? primary_context() : nullptr);
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      if (!a) return write_value<unsigned>(out, 0);
      return write_value<unsigned>(out,
                                   is_host_type(*a) ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE);
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      return write_value<CUdeviceptr>(
          out, a ? a->device_address() + static_cast<size_t>(target.address - a->storage) : 0);
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      return write_value<void*>(out, a && a->host ? target.address : nullptr);
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
      return write_value<unsigned long long>(out, a ? a->id : 0);
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      return write_value<int>(out, a ? 0 : kNoDevice);
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
      return write_value<CUdeviceptr>(out, a ? a->device_address() : 0);
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
      return write_value<size_t>(out, a ? a->size : 0);
    case CU_POINTER_ATTRIBUTE_MAPPED:
      return write_value<bool>(out, a != nullptr);
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
      return write_value<bool>(out, a != nullptr && a->sync_memops);
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      return write_value<bool>(out, a != nullptr && a->kind == MemoryKind::managed);
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
      return write_value<int>(
          out, a ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE);
    case CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE:
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
      return write_value<bool>(out, false);
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
      return write_value<unsigned long long>(out, 0);
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
      return write_value<void*>(out, a && a->pool ? a->pool->handle : nullptr);
    default:
      refuse(CUDA_ERROR_NOT_SUPPORTED,
             "pointer attribute " + std::to_string(attribute) + " is not implemented");
  }
}
}  // namespace

SC_API(cuPointerGetAttribute, 4000, kNoLock, void*, out, int, attribute, CUdeviceptr, p) {
  require(out != nullptr);
  const Target target = find_allocation(p);
  if (!target.owner && attribute != CU_POINTER_ATTRIBUTE_MAPPED) {
    refuse(CUDA_ERROR_INVALID_VALUE, hex(p) + " was not allocated by the device");
  }
  require(attribute != CU_POINTER_ATTRIBUTE_HOST_POINTER || target.owner->host);
  pointer_attribute(out, attribute, target);
}

// Succeeds for every address, unlike cuPointerGetAttribute.
SC_API(cuPointerGetAttributes, 7000, kNoLock, unsigned, n, int*, attributes, void**, out,
       CUdeviceptr, p) {
  require(n != 0 && attributes != nullptr && out != nullptr);
  const Target target = find_allocation(p);
  for (unsigned i = 0; i < n; ++i) pointer_attribute(out[i], attributes[i], target);
}

// With SYNC_MEMOPS set, synchronous copies and memsets of the memory must be complete when they
// return. On this device they always are, so the attribute is only stored and returned.
SC_API(cuPointerSetAttribute, 6000, kNoLock, const void*, value, int, attribute, CUdeviceptr, p) {
  require(value != nullptr && attribute == CU_POINTER_ATTRIBUTE_SYNC_MEMOPS);
  const Target target = find_allocation(p);
  require(target.owner != nullptr, CUDA_ERROR_INVALID_VALUE,
          "the address was not allocated by the device");
  std::lock_guard<std::mutex> lock(memory_mutex());
  target.owner->sync_memops = *static_cast<const unsigned char*>(value) != 0;
}
