// Memory pools and stream-ordered allocation (INVARIANTS.md M7, M8).
#include "memory_pools.h"

#include <algorithm>

#include "capture.h"

namespace softcuda {
namespace {

// Unit in which the reserved size of a pool grows.
constexpr uint64_t kReserveStep = 2 << 20;

uint64_t round_up(uint64_t n) { return (n + kReserveStep - 1) / kReserveStep * kReserveStep; }

// The default pool and the current pool of one `MemoryKind`. A default pool cannot be destroyed.
struct Slot {
  std::shared_ptr<MemoryPool> fallback, current;
};
std::mutex& g_slots_mutex = *new std::mutex;
Slot g_slots[4];

std::shared_ptr<MemoryPool> new_pool(MemoryKind kind, int type, CUmemLocation location) {
  auto pool = std::make_shared<MemoryPool>();
  pool->kind = kind;
  pool->type = type;
  pool->location = location;
  pool->handle = memory_pools.add(pool);
  return pool;
}

// Returns the default and current pools for a location and an allocation type. Creates the default
// pool if it does not exist. The caller holds g_slots_mutex.
Slot& slot_of(int type, const CUmemLocation& location) {
  const MemoryKind kind = kind_of(type, location);
  Slot& slot = g_slots[static_cast<size_t>(kind)];
  if (!slot.fallback) slot.fallback = slot.current = new_pool(kind, type, location);
  return slot;
}

Slot& device_slot(CUdevice device) {
  require(device == 0, CUDA_ERROR_INVALID_DEVICE);
  return slot_of(CU_MEM_ALLOCATION_TYPE_PINNED, {CU_MEM_LOCATION_TYPE_DEVICE, 0});
}

// Whether a pool is the default pool of its kind. The caller holds g_slots_mutex.
bool is_default(const MemoryPool& pool) {
  return g_slots[static_cast<size_t>(pool.kind)].fallback.get() == &pool;
}

std::shared_ptr<MemoryPool> find_pool(const void* handle) {
  auto pool = memory_pools.get(handle);
  require(pool != nullptr, CUDA_ERROR_INVALID_VALUE, "the memory pool is unknown or was destroyed");
  return pool;
}

void require_node_zero(const CUmemLocation& location) {
  require(location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT ||
              location.type == CU_MEM_LOCATION_TYPE_HOST || location.id == 0,
          location.type == CU_MEM_LOCATION_TYPE_DEVICE ? CUDA_ERROR_INVALID_DEVICE
                                                       : CUDA_ERROR_INVALID_VALUE,
          "the only device and the only NUMA node of the soft device have id 0");
}

}  // namespace

MemoryKind kind_of(int type, const CUmemLocation& location) {
  require(type == CU_MEM_ALLOCATION_TYPE_PINNED || type == CU_MEM_ALLOCATION_TYPE_MANAGED,
          CUDA_ERROR_INVALID_VALUE, "the allocation type must be PINNED or MANAGED");
  const bool managed = type == CU_MEM_ALLOCATION_TYPE_MANAGED;
  require(location.type >= (managed ? CU_MEM_LOCATION_TYPE_NONE : CU_MEM_LOCATION_TYPE_DEVICE) &&
              location.type <= CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT,
          CUDA_ERROR_INVALID_VALUE, "unknown location of memory");
  if (location.type != CU_MEM_LOCATION_TYPE_NONE) require_node_zero(location);
  if (managed) return MemoryKind::managed;
  return location.type == CU_MEM_LOCATION_TYPE_DEVICE ? MemoryKind::device
                                                      : MemoryKind::pooled_pinned;
}

void MemoryPool::grow(size_t bytes) {
  const size_t limit = std::max(max_size, round_up(max_size));  // round_up() may overflow
  if (max_size != 0 && used + bytes > limit) {
    refuse(CUDA_ERROR_OUT_OF_MEMORY, "the pool is limited to " + std::to_string(max_size) +
                                         " bytes, of which " + std::to_string(used) + " are used");
  }
  used += bytes;
  reserved = std::max(reserved, round_up(used));
  used_high = std::max(used_high, used);
  reserved_high = std::max(reserved_high, reserved);
}

void MemoryPool::trim(uint64_t keep) {
  reserved = std::max(round_up(used), std::min(reserved, keep));
}

void MemoryPool::shrink(size_t bytes) {
  used -= bytes;
  trim(release_threshold);
}

static void allocate_from(const std::shared_ptr<MemoryPool>& pool, CUdeviceptr* out, size_t size,
                          CUstream stream) {
  require(out != nullptr);
  find_stream(stream);
  CUDA_MEM_ALLOC_NODE_PARAMS params{};
  params.poolProps.allocType = pool->type;
  params.poolProps.location = pool->location;
  params.bytesize = size;
  const auto work = std::make_shared<MemoryWork>();
  work->params = params;
  if (capture_work(stream, Work(WorkKind::mem_alloc, work))) {
    *out = work->params.dptr;
    return;
  }
  *out = 0;
  if (size == 0) return;
  const auto allocation = allocate_memory(size, pool->kind);
  try {
    std::lock_guard<std::mutex> lock(memory_mutex());
    pool->grow(size);
  } catch (const Refused&) {
    free_memory(allocation);
    throw;
  }
  std::lock_guard<std::mutex> lock(memory_mutex());
  allocation->pool = pool;
  *out = allocation->device_address();
}

// Returns the allocation that starts at `p`. Refuses the call if there is none, or if it is already
// being freed.
static std::shared_ptr<Allocation> find_to_free(CUdeviceptr p, const char* function) {
  auto allocation = find_device_start(p);
  if (!allocation) {
    refuse(CUDA_ERROR_INVALID_VALUE, std::string(function) + " of " + hex(p) +
                                         ", which is not the start of a device allocation");
  }
  return allocation;
}

// Marks an allocation as being freed by the current call, so that a second free is refused.
static void mark_free(Allocation& a) {
  std::lock_guard<std::mutex> lock(memory_mutex());
  if (a.graph == nullptr) {
    require(!a.free_queued, CUDA_ERROR_INVALID_VALUE, "the memory is already being freed");
    a.free_queued = true;
    return;
  }
  require(a.graph->allocated && !a.graph->has_free_node, CUDA_ERROR_INVALID_VALUE,
          "memory of a graph can be freed once after each launch, and only if its graph does not "
          "free it");
  a.graph->allocated = false;
}

}  // namespace softcuda

using namespace softcuda;

SC_API(cuMemFree_v2, 3020, kContext | kUnsafe, CUdeviceptr, p) {
  if (p == 0) return;
  wait_to_free("cuMemFree: all work to finish");
  require(sticky() == CUDA_SUCCESS, sticky());
  const auto allocation = find_to_free(p, "cuMemFree");
  mark_free(*allocation);
  Work work(WorkKind::mem_free, std::make_shared<MemoryWork>());
  work.memory->allocation = allocation;
  run_memory(work);
  require(sticky() == CUDA_SUCCESS, sticky());
}

SC_API(cuMemFreeAsync, 11020, kContext, CUdeviceptr, p, CUstream, handle) {
  const auto stream = find_stream(handle);
  if (p == 0) return;
  find_to_free(p, "cuMemFreeAsync");
  Work work(WorkKind::mem_free, make_free(p));
  if (capture_work(handle, work)) return;
  mark_free(*work.memory->allocation);
  enqueue(*stream, std::move(work));
}

SC_API(cuMemAllocAsync, 11020, kContext, CUdeviceptr*, out, size_t, size, CUstream, stream) {
  std::shared_ptr<MemoryPool> pool;
  {
    std::lock_guard<std::mutex> lock(g_slots_mutex);
    pool = device_slot(0).current;
  }
  allocate_from(pool, out, size, stream);
}

SC_API(cuMemAllocFromPoolAsync, 11020, kContext, CUdeviceptr*, out, size_t, size, void*, pool,
       CUstream, stream) {
  require(out != nullptr);
  allocate_from(find_pool(pool), out, size, stream);
}

SC_API(cuMemPoolCreate, 11020, 0, void**, out, const CUmemPoolProps*, props) {
  require(out != nullptr && props != nullptr);
  const MemoryKind kind = kind_of(props->allocType, props->location);
  require(props->handleTypes == 0 && props->usage == 0, CUDA_ERROR_NOT_SUPPORTED,
          "pools with shareable handles or with hardware decompression are not implemented");
  const auto pool = new_pool(kind, props->allocType, props->location);
  pool->max_size = props->maxSize;
  *out = pool->handle;
}

// The memory that was allocated from the pool stays valid until it is freed. If the pool is the
// current pool, the default pool becomes the current one.
SC_API(cuMemPoolDestroy, 11020, 0, void*, handle) {
  const auto pool = find_pool(handle);
  std::lock_guard<std::mutex> lock(g_slots_mutex);
  require(!is_default(*pool), CUDA_ERROR_INVALID_VALUE, "a default pool cannot be destroyed");
  Slot& slot = g_slots[static_cast<size_t>(pool->kind)];
  if (slot.current == pool) slot.current = slot.fallback;
  memory_pools.take(handle);
}

SC_API(cuMemPoolTrimTo, 11020, 0, void*, pool, size_t, keep) {
  const auto found = find_pool(pool);
  std::lock_guard<std::mutex> lock(memory_mutex());
  found->trim(keep);
}

SC_API(cuMemPoolSetAttribute, 11020, 0, void*, handle, int, attribute, void*, value) {
  const auto pool = find_pool(handle);
  require(value != nullptr);
  std::lock_guard<std::mutex> lock(memory_mutex());
  if (attribute >= CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES &&
      attribute <= CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES) {
    // Freed addresses are never reused early, so the reuse policies have no effect.
    pool->reuse[attribute - 1] = *static_cast<const int*>(value) != 0;
    return;
  }
  const uint64_t number = *static_cast<const uint64_t*>(value);
  const bool high =
      attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH || attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH;
  require(attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD || (high && number == 0),
          CUDA_ERROR_INVALID_VALUE,
          "the attribute is read-only, or a high watermark that can only be set to 0");
  if (attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD) pool->release_threshold = number;
  if (attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH) pool->reserved_high = pool->reserved;
  if (attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH) pool->used_high = pool->used;
}

// Returns the value of a 64-bit attribute of a pool.
static uint64_t long_attribute(const MemoryPool& pool, int attribute) {
  switch (attribute) {
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
      return pool.release_threshold;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
      return pool.reserved;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
      return pool.reserved_high;
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
      return pool.used;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
      return pool.used_high;
    case CU_MEMPOOL_ATTR_MAX_POOL_SIZE:
      return pool.max_size;
    default:
      refuse(CUDA_ERROR_INVALID_VALUE, "unknown pool attribute " + std::to_string(attribute));
  }
}

SC_API(cuMemPoolGetAttribute, 11020, 0, void*, handle, int, attribute, void*, out) {
  const auto pool = find_pool(handle);
  require(out != nullptr);
  std::lock_guard<std::mutex> lock(memory_mutex());
  int* const number = static_cast<int*>(out);
  switch (attribute) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES + 1:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
      *number = pool->reuse[attribute - 1];
      return;
    case CU_MEMPOOL_ATTR_ALLOCATION_TYPE:
      *number = pool->type;
      return;
    case CU_MEMPOOL_ATTR_EXPORT_HANDLE_TYPES:
      *number = 0;
      return;
    case CU_MEMPOOL_ATTR_LOCATION_ID:
      *number = pool->location.id;
      return;
    case CU_MEMPOOL_ATTR_LOCATION_TYPE:
      *number = pool->location.type;
      return;
    default:
      *static_cast<uint64_t*>(out) = long_attribute(*pool, attribute);
  }
}

// The device can always access the memory of its pools, and this access cannot be revoked.
SC_API(cuMemPoolSetAccess, 11020, 0, void*, pool, const CUmemAccessDesc*, map, size_t, count) {
  find_pool(pool);
  require(map != nullptr || count == 0);
  for (size_t i = 0; i < count; ++i) {
    require(map[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE);
    require_node_zero(map[i].location);
    require(map[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE, CUDA_ERROR_INVALID_VALUE,
            "the access of the device to its own memory cannot be revoked");
  }
}

SC_API(cuMemPoolGetAccess, 11020, 0, int*, flags, void*, handle, const CUmemLocation*, location) {
  const auto pool = find_pool(handle);
  require(flags != nullptr && location != nullptr);
  require(location->type >= CU_MEM_LOCATION_TYPE_DEVICE &&
          location->type <= CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT);
  require_node_zero(*location);
  const bool device = location->type == CU_MEM_LOCATION_TYPE_DEVICE;
  *flags = device || pool->kind != MemoryKind::device ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                                                      : CU_MEM_ACCESS_FLAGS_PROT_NONE;
}

SC_API(cuDeviceGetDefaultMemPool, 11020, kNoLock, void**, out, CUdevice, device) {
  std::lock_guard<std::mutex> lock(g_slots_mutex);
  Slot& slot = device_slot(device);
  require(out != nullptr);
  *out = slot.fallback->handle;
}

SC_API(cuDeviceGetMemPool, 11020, kNoLock, void**, out, CUdevice, device) {
  std::lock_guard<std::mutex> lock(g_slots_mutex);
  Slot& slot = device_slot(device);
  require(out != nullptr);
  *out = slot.current->handle;
}

static void set_current(Slot& slot, MemoryKind kind, void* handle) {
  auto pool = find_pool(handle);
  require(pool->kind == kind, CUDA_ERROR_INVALID_VALUE,
          "the pool has another location or allocation type");
  slot.current = std::move(pool);
}

SC_API(cuDeviceSetMemPool, 11020, kNoLock, CUdevice, device, void*, pool) {
  std::lock_guard<std::mutex> lock(g_slots_mutex);
  set_current(device_slot(device), MemoryKind::device, pool);
}

SC_API(cuMemGetDefaultMemPool, 13000, kNoLock, void**, out, const CUmemLocation*, location, int,
       type) {
  require(out != nullptr && location != nullptr);
  std::lock_guard<std::mutex> lock(g_slots_mutex);
  *out = slot_of(type, *location).fallback->handle;
}

SC_API(cuMemGetMemPool, 13000, kNoLock, void**, out, const CUmemLocation*, location, int, type) {
  require(out != nullptr && location != nullptr);
  std::lock_guard<std::mutex> lock(g_slots_mutex);
  *out = slot_of(type, *location).current->handle;
}

SC_API(cuMemSetMemPool, 13000, kNoLock, const CUmemLocation*, location, int, type, void*, pool) {
  require(location != nullptr);
  std::lock_guard<std::mutex> lock(g_slots_mutex);
  set_current(slot_of(type, *location), kind_of(type, *location), pool);
}
