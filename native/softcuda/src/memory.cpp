// Allocation and freeing of memory, device addresses (aliases) and their translation to storage
// addresses (INVARIANTS.md M1 to M6).
#include "memory.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstring>
#include <deque>

#include "memory_pools.h"

namespace softcuda {
namespace {

// Device addresses (aliases) of allocations are multiples of kAliasStep. At least kAliasStep bytes
// between two allocations stay unused, so that accesses beyond the end of one are detected.
constexpr size_t kAliasStep = 1 << 16;
constexpr size_t kHugePage = 2 << 20;
// Alignment in bytes of an allocation's storage. Fewer than this number of bytes are between the
// end of the storage of device memory and the guard page.
constexpr size_t kAlign = 16;

struct Table {
  std::mutex mutex;
  CUdeviceptr base = 0;  // start of the reserved alias range
  CUdeviceptr end = 0;
  CUdeviceptr next = 0;  // where the search for a free alias begins
  // Number of the newest allocation. Error texts identify allocations by their numbers.
  uint64_t ids = 0;
  // Bytes of device memory that are allocated.
  size_t used = 0;
  std::map<CUdeviceptr, std::shared_ptr<Allocation>> by_alias;
  std::map<unsigned long long, std::shared_ptr<Allocation>> by_host;
  std::map<CUdeviceptr, std::shared_ptr<Allocation>> freed;  // recently freed, for error texts
};
Table& g_table = *new Table;

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

// Reserves the address range of all aliases.
bool reserve() {
  if (g_table.base != 0) return true;
  for (size_t bytes = size_t{1} << 44; bytes >= size_t{1} << 32; bytes >>= 2) {
    void* range =
        mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) continue;
    madvise(range, bytes, MADV_DONTDUMP);
    g_table.base = round_up(reinterpret_cast<CUdeviceptr>(range), kAliasStep);
    g_table.next = g_table.base;
    g_table.end = reinterpret_cast<CUdeviceptr>(range) + bytes;
    return true;
  }
  return false;
}

// Whether `address` lies in the allocation's mapping, including the guard pages.
bool contains(const Allocation& a, unsigned long long address) {
  const auto from = reinterpret_cast<unsigned long long>(a.mapping);
  return a.mapping != nullptr && address >= from && address < from + a.mapping_bytes;
}

// Returns the entry with the greatest key that is not greater than `key`, or null.
template <class Map>
std::shared_ptr<Allocation> floor_entry(const Map& map, unsigned long long key) {
  auto it = map.upper_bound(key);
  return it == map.begin() ? nullptr : std::prev(it)->second;
}

// Returns a hint for error texts if the address space of the process is limited, otherwise "".
std::string address_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "";
  return ": the address space of the process is limited to " + std::to_string(limit.rlim_cur) +
         " bytes (ulimit -v)";
}

// Returns the number of device addresses that an allocation of `size` bytes takes up, including the
// unused gap after it.
size_t alias_bytes(size_t size) { return round_up(size + kAliasStep, kAliasStep); }

// Returns the start of the next free range of `span` device addresses. The search goes upwards from
// the device address that was assigned last, and starts again at the lowest address when it reaches
// the end (INVARIANTS.md M1). Returns 0 if no range is free.
CUdeviceptr next_free(size_t span) {
  CUdeviceptr at = g_table.next;
  for (bool wrapped = false;;) {
    if (g_table.end - at < span) {
      if (wrapped) return 0;
      wrapped = true;
      at = g_table.base;
    }
    auto after = g_table.by_alias.lower_bound(at);
    if (after != g_table.by_alias.begin()) {
      const Allocation& below = *std::prev(after)->second;
      if (below.alias + alias_bytes(below.size) > at) {
        at = below.alias + alias_bytes(below.size);
        continue;
      }
    }
    if (after == g_table.by_alias.end() || after->first - at >= span) return at;
    at = after->first + alias_bytes(after->second->size);
  }
}

// Assigns a device address (alias) to an allocation and adds the allocation to g_table.
void assign_alias(const std::shared_ptr<Allocation>& a) {
  const size_t span = alias_bytes(a->size);
  if (!reserve()) {
    refuse(CUDA_ERROR_OUT_OF_MEMORY, "cannot reserve device addresses" + address_limit());
  }
  a->alias = next_free(span);
  if (a->alias == 0) {
    refuse(CUDA_ERROR_OUT_OF_MEMORY, "all device addresses are in use" + address_limit());
  }
  g_table.next = a->alias + span;
  // Forget freed allocations that the new range overlaps.
  auto freed = g_table.freed.lower_bound(a->alias);
  if (freed != g_table.freed.begin()) --freed;
  while (freed != g_table.freed.end() && freed->first < g_table.next) {
    if (freed->first + freed->second->size < a->alias) {
      ++freed;
    } else {
      freed = g_table.freed.erase(freed);
    }
  }
  a->id = ++g_table.ids;
  g_table.by_alias.emplace(a->alias, a);
  if (a->host) g_table.by_host.emplace(reinterpret_cast<unsigned long long>(a->storage), a);
}

// The value of the padding, which consists of the bytes between the storage and the ends of its
// pages. Guard pages do not protect these bytes. They are therefore checked when the allocation is
// freed (INVARIANTS.md M6).
constexpr unsigned char kPadding = 0xc5;

// Calls visit(first, last) for the padding before and after the storage.
template <class Visit>
void visit_padding(const Allocation& a, const Visit& visit) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  char* from = static_cast<char*>(a.mapping) + page;
  char* to = static_cast<char*>(a.mapping) + a.mapping_bytes - page;
  visit(from, a.storage);
  visit(a.storage + a.size, to);
}

// Raises a fault if the padding was overwritten.
void check_padding(const Allocation& a) {
  if (a.mapping == nullptr) return;
  std::string where;
  visit_padding(a, [&](const char* from, const char* to) {
    for (const char* at = from; at < to && where.empty(); ++at) {
      if (static_cast<unsigned char>(*at) == kPadding) continue;
      where = at < a.storage ? std::to_string(a.storage - at) + " bytes before the start"
                             : std::to_string(at - a.storage - a.size) + " bytes past the end";
    }
  });
  if (where.empty()) return;
  fault(CUDA_ERROR_ILLEGAL_ADDRESS, "out-of-bounds write: when " + a.describe() +
                                        " was freed, the memory " + where +
                                        " had been overwritten");
  require(false, sticky());
}

// Maps the storage of an allocation between two guard pages. Returns false on failure.
bool map_storage(Allocation* a) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  // Use whole huge pages, which save TLB misses, if the wasted bytes are at most a quarter of the
  // allocation's size (INVARIANTS.md M2).
  const bool huge = round_up(a->size, kHugePage) - a->size <= a->size / 4;
  const size_t unit = huge ? kHugePage : page;
  const size_t body = round_up(a->size, unit);
  const size_t bytes = body + unit + page;
  void* range = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) return false;
  // The memory between the guard pages starts at a multiple of `unit`. The parts of `range` before
  // the lower guard page and after the upper one are unmapped.
  const size_t from = reinterpret_cast<size_t>(range);
  const size_t at = round_up(from + page, unit);
  char* const start = static_cast<char*>(range) + (at - from);
  a->mapping = start - page;
  a->mapping_bytes = body + 2 * page;
  munmap(range, at - page - from);
  munmap(start + body + page, from + bytes - (at + body + page));
  if (mprotect(start, body, PROT_READ | PROT_WRITE) != 0) return false;
  if (huge) madvise(start, body, MADV_HUGEPAGE);
  // Pinned memory starts at a page boundary, as NumPy views and cache-line layouts expect.
  a->storage = a->host ? start : start + body - round_up(a->size, kAlign);
  if (settings().poison && !a->host) std::memset(start, 0xff, body);
  visit_padding(*a, [](char* from, char* to) {
    std::memset(from, kPadding, static_cast<size_t>(to - from));
  });
  return true;
}

size_t physical_memory() {
  static const size_t bytes =
      static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

// Returns the resource counter that counts the allocation while it is live.
Resource resource_of(const Allocation& a) {
  return a.host && !a.unified() ? Resource::pinned_memory : Resource::device_memory;
}

// Returns the bytes of device memory that are free. Memory of an allocation node counts as used
// from the time at which the node runs, without a check against the total memory. If more than the
// total memory is therefore in use, the result is 0.
size_t free_device_bytes() {
  const size_t total = total_memory();
  return total > g_table.used ? total - g_table.used : 0;
}

std::shared_ptr<Allocation> allocate(size_t size, MemoryKind kind, unsigned flags) {
  require(size > 0, CUDA_ERROR_INVALID_VALUE, "an allocation must have at least 1 byte");
  wait_to_allocate();
  const bool host = kind != MemoryKind::device && kind != MemoryKind::module;
  auto a = std::make_shared<Allocation>();
  a->size = size;
  a->host = host;
  a->kind = kind;
  a->flags = flags;
  {
    std::lock_guard<std::mutex> lock(g_table.mutex);
    const size_t left = host ? physical_memory() : free_device_bytes();
    if (size > left) {
      refuse(CUDA_ERROR_OUT_OF_MEMORY,
             std::to_string(size) + " bytes were requested, " + std::to_string(left) + " are free");
    }
    if (!host) g_table.used += size;
  }
  // g_table.mutex is not held here, because filling gigabytes (SOFTCUDA_POISON) takes a long time.
  const bool mapped = map_storage(a.get());
  std::lock_guard<std::mutex> lock(g_table.mutex);
  try {
    if (!mapped) {
      refuse(CUDA_ERROR_OUT_OF_MEMORY,
             "cannot map " + std::to_string(size) + " bytes" + address_limit());
    }
    assign_alias(a);
  } catch (const Refused&) {
    if (!host) g_table.used -= size;
    throw;
  }
  live_add(resource_of(*a), 1);
  return a;
}

// Frees an allocation: callers can no longer use it, and its pages return to the system. Its
// address range remains reserved until the last reference is released (INVARIANTS.md M4).
void retire(const std::shared_ptr<Allocation>& a) {
  a->live.store(false, std::memory_order_release);
  g_table.by_alias.erase(a->alias);
  if (a->host) g_table.by_host.erase(reinterpret_cast<unsigned long long>(a->storage));
  if (a->mapping != nullptr) {
    mprotect(a->mapping, a->mapping_bytes, PROT_NONE);
    madvise(a->mapping, a->mapping_bytes, MADV_DONTNEED);
  }
  auto record = std::make_shared<Allocation>();
  record->alias = a->alias;
  record->size = a->size;
  record->id = a->id;
  record->host = a->host;
  record->live.store(false);
  g_table.freed.emplace(a->alias, std::move(record));
  if (g_table.freed.size() > 4096) g_table.freed.erase(g_table.freed.begin());
  live_add(resource_of(*a), -1);
}

// Checks the padding of an allocation, frees it and updates the amount of used memory.
void free_checked(const std::shared_ptr<Allocation>& a) {
  check_padding(*a);
  if (!a->host) g_table.used -= a->size;
  retire(a);
}

}  // namespace

Allocation::Allocation() = default;
Allocation::~Allocation() {
  if (mapping != nullptr) munmap(mapping, mapping_bytes);
}

std::string Allocation::describe() const {
  std::string text = live ? "" : "freed ";
  text += kind == MemoryKind::managed ? "managed" : host ? "pinned" : "device";
  text += " allocation #" + std::to_string(id);
  return text + " (" + std::to_string(size) + " bytes at " + hex(alias) + ")";
}

size_t total_memory() { return settings().memory != 0 ? settings().memory : physical_memory(); }

bool is_alias(unsigned long long address) {
  return address >= g_table.base && address < g_table.end && g_table.base != 0;
}

bool resolve(unsigned long long p, size_t bytes, Target* out, std::string* why) {
  std::lock_guard<std::mutex> lock(g_table.mutex);
  if (!is_alias(p)) {
    std::shared_ptr<Allocation> a = floor_entry(g_table.by_host, p);
    const auto at = a ? p - reinterpret_cast<unsigned long long>(a->storage) : 0;
    out->owner = a && at < a->size ? a : nullptr;
    out->address = reinterpret_cast<char*>(p);
    if (out->owner && bytes > a->size - at) {
      *why = "host range [" + hex(p) + ", +" + std::to_string(bytes) +
             ") extends past the end of " + a->describe();
      return false;
    }
    if (p == 0 && bytes > 0) *why = "a null pointer";
    return p != 0 || bytes == 0;
  }
  std::shared_ptr<Allocation> a = floor_entry(g_table.by_alias, p);
  if (a == nullptr || p > a->alias + a->size) {
    std::shared_ptr<Allocation> freed = floor_entry(g_table.freed, p);
    *why = "device address " + hex(p);
    if (freed != nullptr && p <= freed->alias + freed->size) {
      *why += " is inside " + freed->describe();
    } else {
      *why += " is in no allocation";
      if (a) *why += "; the nearest one below is " + a->describe();
    }
    return false;
  }
  const size_t offset = p - a->alias;
  if (bytes > a->size - offset) {
    *why = "device range [" + hex(p) + ", +" + std::to_string(bytes) +
           ") extends past the end of " + a->describe();
    return false;
  }
  out->address = a->storage + offset;
  out->owner = std::move(a);
  return true;
}

bool resolve_for_device(unsigned long long p, size_t bytes, Target* out, std::string* why) {
  if (!resolve(p, bytes, out, why)) return false;
  if (is_alias(p) || (out->owner && !out->owner->registered)) return true;
  *why = hex(p) + (out->owner ? " is in registered memory, which has another device address "
                                "(cuMemHostGetDevicePointer)"
                              : " is the address of pageable host memory");
  return false;
}

std::shared_ptr<Allocation> allocate_for_module(size_t bytes) {
  auto allocation = allocate(bytes, MemoryKind::module, 0);
  live_add(Resource::device_memory, -1);
  return allocation;
}

void free_for_module(const std::shared_ptr<Allocation>& allocation) {
  std::lock_guard<std::mutex> lock(g_table.mutex);
  g_table.used -= allocation->size;
  retire(allocation);
  live_add(Resource::device_memory, 1);
}

std::shared_ptr<Allocation> allocate_memory(size_t size, MemoryKind kind, unsigned flags) {
  return allocate(size, kind, flags);
}

void free_memory(const std::shared_ptr<Allocation>& allocation) {
  std::lock_guard<std::mutex> lock(g_table.mutex);
  free_checked(allocation);
}

std::shared_ptr<Allocation> find_device_start(CUdeviceptr p) {
  std::lock_guard<std::mutex> lock(g_table.mutex);
  auto it = g_table.by_alias.find(p);
  if (it != g_table.by_alias.end() && it->second->kind == MemoryKind::device) return it->second;
  auto host = g_table.by_host.find(p);
  return host != g_table.by_host.end() && host->second->unified() ? host->second : nullptr;
}

// Changes the protection of the memory between the guard pages of a mapping.
static void protect(const Allocation& a, int protection) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  mprotect(static_cast<char*>(a.mapping) + page, a.mapping_bytes - 2 * page, protection);
}

std::shared_ptr<Allocation> allocate_closed(size_t size, MemoryKind kind) {
  auto a = allocate(size, kind, 0);
  std::lock_guard<std::mutex> lock(g_table.mutex);
  if (!a->host) g_table.used -= a->size;  // a closed range does not count as used
  live_add(resource_of(*a), -1);
  a->live.store(false);
  protect(*a, PROT_NONE);
  return a;
}

void open_range(Allocation& a) {
  if (a.live.load()) return;  // with AUTO_FREE_ON_LAUNCH, a launch frees the memory implicitly
  protect(a, PROT_READ | PROT_WRITE);
  if (settings().poison && !a.host) std::memset(a.storage, 0xff, a.size);
  if (!a.host) g_table.used += a.size;
  live_add(resource_of(a), 1);
  a.live.store(true, std::memory_order_release);
}

void close_range(const std::shared_ptr<Allocation>& a) {
  if (!a->live.load()) return;
  check_padding(*a);
  a->live.store(false, std::memory_order_release);
  protect(*a, PROT_NONE);
  if (!a->host) g_table.used -= a->size;
  live_add(resource_of(*a), -1);
}

void release_range(const std::shared_ptr<Allocation>& a) {
  // close_range() has already subtracted the memory from its resource counter. retire() subtracts
  // it again, so add it once before.
  live_add(resource_of(*a), 1);
  retire(a);
}

std::shared_ptr<Allocation> reserve_range(size_t size) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  auto a = std::make_shared<Allocation>();
  a->size = size;
  a->kind = MemoryKind::reserved;
  void* range =
      mmap(nullptr, size + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) {
    refuse(CUDA_ERROR_OUT_OF_MEMORY,
           "cannot reserve " + std::to_string(size) + " bytes" + address_limit());
  }
  a->mapping = range;
  a->mapping_bytes = size + 2 * page;
  a->storage = static_cast<char*>(range) + page;
  std::lock_guard<std::mutex> lock(g_table.mutex);
  assign_alias(a);
  live_add(Resource::device_memory, 1);
  return a;
}

void unreserve_range(const std::shared_ptr<Allocation>& range) {
  std::lock_guard<std::mutex> lock(g_table.mutex);
  retire(range);
}

void reserve_physical(long delta) {
  std::lock_guard<std::mutex> lock(g_table.mutex);
  if (delta > 0 && static_cast<size_t>(delta) > free_device_bytes()) {
    refuse(CUDA_ERROR_OUT_OF_MEMORY, std::to_string(delta) + " bytes were requested, " +
                                         std::to_string(free_device_bytes()) + " are free");
  }
  g_table.used += static_cast<size_t>(delta);
}

std::mutex& memory_mutex() { return g_table.mutex; }

std::shared_ptr<Allocation> find_for_fault(unsigned long long address) {
  // A worker that reports a fault calls this function from the code that handles the signal. It can
  // take the lock, because kernels run without holding a lock.
  std::lock_guard<std::mutex> lock(g_table.mutex);
  if (is_alias(address)) {
    auto a = floor_entry(g_table.by_alias, address);
    if (a && address < a->alias + a->size + kAliasStep) return a;
    a = floor_entry(g_table.freed, address);
    return a && address < a->alias + a->size + kAliasStep ? a : nullptr;
  }
  for (auto& item : g_table.by_alias) {
    if (contains(*item.second, address)) return item.second;
  }
  return nullptr;
}

}  // namespace softcuda

using namespace softcuda;

SC_API(cuMemAlloc_v2, 3020, kContext | kUnsafe, CUdeviceptr*, out, size_t, size) {
  require(out != nullptr);
  *out = allocate(size, MemoryKind::device, 0)->alias;
}

SC_API(cuMemHostAlloc, 2020, kContext | kUnsafe, void**, out, size_t, size, unsigned, flags) {
  require(out != nullptr && (flags & ~7u) == 0);
  *out = allocate(size, MemoryKind::pinned, flags)->storage;
}

SC_API(cuMemAllocHost_v2, 3020, kContext | kUnsafe, void**, out, size_t, size) {
  require(out != nullptr);
  *out = allocate(size, MemoryKind::pinned, CU_MEMHOSTALLOC_DEVICEMAP)->storage;
}

// Frees pinned memory or, with `registered`, unregisters memory of the caller. `unknown` is the
// error code for other addresses.
static void free_host(void* p, bool registered, CUresult unknown) {
  wait_to_free("freeing pinned memory: all work to finish");
  require(sticky() == CUDA_SUCCESS, sticky());
  std::lock_guard<std::mutex> lock(g_table.mutex);
  auto it = g_table.by_host.find(reinterpret_cast<unsigned long long>(p));
  if (it == g_table.by_host.end() || it->second->unified() ||
      it->second->registered != registered) {
    refuse(unknown, hex(reinterpret_cast<unsigned long long>(p)) + " is not the start of " +
                        (registered ? "registered memory" : "a pinned allocation"));
  }
  const std::shared_ptr<Allocation> a = it->second;
  free_checked(a);
}

SC_API(cuMemFreeHost, 2000, kContext | kUnsafe, void*, p) {
  free_host(p, false, CUDA_ERROR_INVALID_VALUE);
}

SC_API(cuMemHostRegister_v2, 6050, kContext | kUnsafe, void*, p, size_t, size, unsigned, flags) {
  require(p != nullptr && size > 0 && (flags & ~15u) == 0);
  auto a = std::make_shared<Allocation>();
  a->size = size;
  a->host = true;
  a->registered = true;
  a->kind = MemoryKind::pinned;
  a->flags = flags;
  a->storage = static_cast<char*>(p);
  const auto from = reinterpret_cast<unsigned long long>(p);
  std::lock_guard<std::mutex> lock(g_table.mutex);
  const auto below = floor_entry(g_table.by_host, from + size - 1);
  if (below && reinterpret_cast<unsigned long long>(below->storage) + below->size > from) {
    refuse(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "the range overlaps " + below->describe());
  }
  assign_alias(a);
  live_add(Resource::pinned_memory, 1);
}

// `p` must be the start of registered memory. An address inside of it is refused with
// INVALID_VALUE.
SC_API(cuMemHostUnregister, 4000, kContext | kUnsafe, void*, p) {
  const auto from = reinterpret_cast<unsigned long long>(p);
  {
    std::lock_guard<std::mutex> lock(g_table.mutex);
    const auto below = floor_entry(g_table.by_host, from);
    const auto start = below ? reinterpret_cast<unsigned long long>(below->storage) : 0;
    if (below && below->registered && from > start && from < start + below->size) {
      refuse(CUDA_ERROR_INVALID_VALUE, hex(from) + " is inside of " + below->describe());
    }
  }
  free_host(p, true, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
}

SC_API(cuMemGetInfo_v2, 3020, kContext, size_t*, free_bytes, size_t*, total) {
  require(free_bytes != nullptr && total != nullptr);
  std::lock_guard<std::mutex> lock(g_table.mutex);
  *total = total_memory();
  *free_bytes = free_device_bytes();
}
