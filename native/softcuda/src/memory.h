// Device and pinned memory: aliases that only the device can follow, and the storage behind them.
#pragma once

#include <memory>

#include "runtime.h"

namespace softcuda {

// One allocation. `alias` is what callers hold: an address inside a reserved PROT_NONE range, never
// handed out twice. `storage` is what kernels and copies touch: its own mapping between guard
// pages, ending at the upper one. The mapping lives until the last operation that names it is gone.
struct Allocation {
  ~Allocation();
  CUdeviceptr alias = 0;
  size_t size = 0;
  char* storage = nullptr;
  void* mapping = nullptr;
  size_t mapping_bytes = 0;
  bool host = false;  // pinned: `storage` is also the host pointer
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
// Resolves [p, p + bytes). Aliases are checked for bounds and lifetime; anything else is a host
// address. On failure `why` says what is wrong with the address.
bool resolve(unsigned long long p, size_t bytes, Target* out, std::string* why);
// The same for what device code may follow: an alias or, as unified addressing is reported, pinned
// memory that the driver allocated (K6).
bool resolve_for_device(unsigned long long p, size_t bytes, Target* out, std::string* why);
// Allocation whose alias range or storage (guards included) holds `address`, for fault messages.
std::shared_ptr<Allocation> find_for_fault(unsigned long long address);

}  // namespace softcuda
