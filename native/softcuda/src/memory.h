// Device memory and pinned host memory. Each allocation has an alias, which is its device address,
// and a storage, which is the host memory behind the alias.
#pragma once

#include <memory>

#include "runtime.h"

namespace softcuda {

struct MemoryPool;
struct GraphMemory;

// The kinds of memory. The device address of device memory and of pinned memory differs from the
// address of the storage (Allocation::alias). Pooled pinned memory and managed memory have the same
// address in host code and in device code (INVARIANTS.md M7). `reserved` is a range of virtual
// memory management (INVARIANTS.md M10), and `module` holds the variables of a module.
enum class MemoryKind { device, pinned, pooled_pinned, managed, reserved, module };

// Hints of cuMemAdvise and cuMemPrefetchAsync about one allocation of managed memory. They are
// returned by cuMemRangeGetAttribute and have no other effect.
struct ManagedHints {
  bool read_mostly = false;
  CUmemLocation preferred{0, 0};  // of type 0: none
  CUmemLocation prefetched{0, 0};
  bool accessed_by_device = false;
  bool accessed_by_host = false;
};

// One allocation of device memory or pinned host memory. Programs use `alias`, an address in a
// reserved PROT_NONE range. Host code that dereferences it therefore faults (INVARIANTS.md M1).
// Kernels and copies access `storage`, which is in a separate mapping. The mapping has a guard page
// at each end, and the storage of device memory ends at the upper one (INVARIANTS.md M2). The
// mapping exists until the last operation that refers to the allocation is destroyed.
struct Allocation {
  Allocation();
  ~Allocation();
  CUdeviceptr alias = 0;
  size_t size = 0;
  char* storage = nullptr;
  void* mapping = nullptr;  // the mapping with its guard pages; null for registered memory
  size_t mapping_bytes = 0;
  // Whether this is pinned host memory. Its host pointer is `storage`.
  bool host = false;
  // Whether this is memory of the caller that was pinned by cuMemHostRegister.
  bool registered = false;
  // Flags of cuMemHostAlloc.
  unsigned flags = 0;
  // Number of the allocation, which error texts show.
  uint64_t id = 0;
  std::atomic<bool> live{true};  // false after the memory was freed
  MemoryKind kind = MemoryKind::device;
  // The pool from which the memory was allocated; null for other memory.
  std::shared_ptr<MemoryPool> pool;
  // memory_mutex() guards this member and the following ones.
  // Whether a queued operation will free the memory (cuMemFreeAsync).
  bool free_queued = false;
  // Value of CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, which is only stored and returned (pointers.cpp).
  bool sync_memops = false;
  // State of memory that a graph node allocates; null for other memory.
  std::unique_ptr<GraphMemory> graph;
  ManagedHints hints;
  // Whether host and device use the same address (INVARIANTS.md M7).
  bool unified() const { return kind == MemoryKind::pooled_pinned || kind == MemoryKind::managed; }
  // The address that device code and the driver API use.
  CUdeviceptr device_address() const {
    return unified() ? reinterpret_cast<CUdeviceptr>(storage) : alias;
  }
  std::string describe() const;
};

// A resolved address: its allocation `owner` and, in `address`, the host address of its storage.
// `owner` is null for pageable host memory.
struct Target {
  std::shared_ptr<Allocation> owner;
  char* address = nullptr;
  bool live() const { return owner == nullptr || owner->live.load(std::memory_order_acquire); }
};

// Whether `address` is in the range that is reserved for device addresses.
bool is_alias(unsigned long long address);
// Resolves the address range [p, p + bytes). Bounds and lifetime of device memory and pinned memory
// are checked; any other address is a pageable host address. On failure, returns false and sets
// `why` to the reason.
bool resolve(unsigned long long p, size_t bytes, Target* out, std::string* why);
// Resolves an address range that device code accesses. The address must be a device address or,
// because the device has unified addressing, the host address of pinned memory (INVARIANTS.md K6).
// The call fails for pageable memory.
bool resolve_for_device(unsigned long long p, size_t bytes, Target* out, std::string* why);
// Allocates memory. Refuses the call if there is not enough memory.
std::shared_ptr<Allocation> allocate_memory(size_t size, MemoryKind kind, unsigned flags = 0);
// Frees an allocation (INVARIANTS.md M4). If bytes outside of it were overwritten, records a fault.
void free_memory(const std::shared_ptr<Allocation>& allocation);
// Returns the allocation that starts at a device address and that cuMemFree or a free node may
// free; null if there is none.
std::shared_ptr<Allocation> find_device_start(CUdeviceptr p);
// Allocates the address range of graph memory. The memory is accessible only while the range is
// open: from the run of an allocation node until the memory is freed (INVARIANTS.md M9).
std::shared_ptr<Allocation> allocate_closed(size_t size, MemoryKind kind);
// open_range() makes the range of graph memory accessible, and close_range() makes it inaccessible.
// release_range() frees the address range. The caller holds memory_mutex().
void open_range(Allocation& allocation);
void close_range(const std::shared_ptr<Allocation>& allocation);
void release_range(const std::shared_ptr<Allocation>& allocation);
// Reserves and releases a range of device addresses for virtual memory management. Its storage is
// an inaccessible range of addresses, into which the caller maps memory (INVARIANTS.md M10).
std::shared_ptr<Allocation> reserve_range(size_t size);
void unreserve_range(const std::shared_ptr<Allocation>& range);
// virtual_mutex() guards the mappings of memory into reserved ranges. find_mapping() returns
// whether memory is mapped at `target`, which is in a reserved range. `flags` receives the access
// rights of the device. The caller of find_mapping() holds virtual_mutex().
std::mutex& virtual_mutex();
bool find_mapping(const Target& target, size_t bytes, int* flags);
// Adds `delta` bytes, a negative number for released memory, to the amount of used device memory.
// Refuses the call if fewer bytes are free.
void reserve_physical(long delta);
// The mutex of the allocation tables. It also guards the members of Allocation that say so.
std::mutex& memory_mutex();
// Allocates the memory of a module's variables. It is not counted as memory that the program has
// allocated.
std::shared_ptr<Allocation> allocate_for_module(size_t bytes);
void free_for_module(const std::shared_ptr<Allocation>& allocation);
// Returns the allocation whose alias range or mapping, including guard pages, contains `address`;
// null if there is none.
std::shared_ptr<Allocation> find_for_fault(unsigned long long address);

}  // namespace softcuda
