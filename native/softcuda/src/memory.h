// Device memory and pinned host memory: device addresses (aliases) and the storage behind them.
#pragma once

#include <memory>

#include "runtime.h"

namespace softcuda {

// One allocation. Callers hold `alias`, an address inside a reserved PROT_NONE range, so host code
// that dereferences it faults (M1). Kernels and copies access `storage`, a separate mapping that
// lies between two guard pages and ends at the upper one (M2). The mapping lives until the last
// operation that refers to the allocation is destroyed.
struct Allocation {
  ~Allocation();
  CUdeviceptr alias = 0;
  size_t size = 0;
  char* storage = nullptr;
  void* mapping = nullptr;
  size_t mapping_bytes = 0;
  bool host = false;  // pinned host memory: `storage` is also the host pointer
  unsigned flags = 0;
  uint64_t id = 0;
  std::atomic<bool> live{true};
  std::string describe() const;
};

// A resolved address. `owner` is null for pageable host memory.
struct Target {
  std::shared_ptr<Allocation> owner;
  char* address = nullptr;
  bool live() const { return owner == nullptr || owner->live.load(std::memory_order_acquire); }
};

bool is_alias(unsigned long long address);
// Resolves the range [p, p + bytes). Bounds and lifetime of aliases are checked; every other
// address is a host address. On failure returns false and sets `why` to the reason.
bool resolve(unsigned long long p, size_t bytes, Target* out, std::string* why);
// Same for an address that device code accesses: an alias or, because unified addressing is
// reported, a host address of pinned memory (K6). Pageable memory fails.
bool resolve_for_device(unsigned long long p, size_t bytes, Target* out, std::string* why);
// Returns the allocation whose alias range or mapping, including guard pages, contains `address`.
std::shared_ptr<Allocation> find_for_fault(unsigned long long address);

}  // namespace softcuda
