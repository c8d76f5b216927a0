// Device memory and pinned host memory: device addresses (aliases) and the memory to which they are
// translated (storage).
#pragma once

#include <memory>

#include "runtime.h"

namespace softcuda {

// One allocation of device memory or pinned host memory. Programs hold `alias`, an address in a
// reserved PROT_NONE range, so that host code that dereferences it faults (M1). Kernels and copies
// access `storage`, which is in a separate mapping between two guard pages and ends at the upper
// one (M2). The mapping exists until the last operation that refers to the allocation is destroyed.
struct Allocation {
  ~Allocation();
  CUdeviceptr alias = 0;
  size_t size = 0;
  char* storage = nullptr;
  void* mapping = nullptr;  // the mapping with its guard pages
  size_t mapping_bytes = 0;
  bool host = false;             // pinned host memory: `storage` is also the host pointer
  unsigned flags = 0;            // flags of cuMemHostAlloc
  uint64_t id = 0;               // number of the allocation, for error texts
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
// The same for an address that device code accesses: a device address or, because the device
// reports unified addressing, a host address of pinned memory (K6). Pageable memory fails.
bool resolve_for_device(unsigned long long p, size_t bytes, Target* out, std::string* why);
// Returns the allocation whose alias range or mapping, including guard pages, contains `address`;
// null if there is none.
std::shared_ptr<Allocation> find_for_fault(unsigned long long address);

}  // namespace softcuda
