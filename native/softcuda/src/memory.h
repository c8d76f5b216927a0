// Device memory and pinned host memory. Each allocation has an alias, which is its device address,
// and a storage, which is the host memory behind the alias.
#pragma once

#include <memory>

#include "runtime.h"

namespace softcuda {

// One allocation of device memory or pinned host memory. Programs use `alias`, an address in a
// reserved PROT_NONE range. Host code that dereferences it therefore faults (M1). Kernels and
// copies access `storage`, which is in a separate mapping. The mapping has a guard page at each
// end, and the storage ends at the upper guard page (M2). The mapping exists until the last
// operation that refers to the allocation is destroyed.
struct Allocation {
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
  std::string describe() const;
};

// A resolved address: its allocation and the storage address. `owner` is null for pageable host
// memory.
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
// because the device has unified addressing, the host address of pinned memory (K6). The call fails
// for pageable memory.
bool resolve_for_device(unsigned long long p, size_t bytes, Target* out, std::string* why);
// Allocates the memory of a module's variables. Such memory is not counted as the caller's.
std::shared_ptr<Allocation> allocate_for_module(size_t bytes);
void free_for_module(const std::shared_ptr<Allocation>& allocation);
// Returns the allocation whose alias range or mapping, including guard pages, contains `address`;
// null if there is none.
std::shared_ptr<Allocation> find_for_fault(unsigned long long address);

}  // namespace softcuda
