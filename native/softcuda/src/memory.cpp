// Allocation, aliases and translation (invariants M1-M6).
#include "memory.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstring>
#include <deque>

#include "scheduler.h"

namespace softcuda {
namespace {

constexpr size_t kAliasStep = 1 << 16;  // a gap follows every alias, so overruns stay recognisable
constexpr size_t kHugePage = 2 << 20;
constexpr size_t kAlign = 16;  // end alignment: an overrun of a word meets the guard page

struct Table {
  std::mutex mutex;
  CUdeviceptr base = 0, end = 0, next = 0;
  uint64_t ids = 0;
  size_t used = 0;  // bytes of device memory
  std::map<CUdeviceptr, std::shared_ptr<Allocation>> by_alias;
  std::map<unsigned long long, std::shared_ptr<Allocation>> by_host;
  std::map<CUdeviceptr, std::shared_ptr<Allocation>> dead;  // recent ones, for messages
};
Table& g_table = *new Table;

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

bool reserve() {
  if (g_table.base != 0) return true;
  for (size_t bytes = size_t{1} << 44; bytes >= size_t{1} << 32; bytes >>= 2) {
    void* range =
        mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) continue;
    madvise(range, bytes, MADV_DONTDUMP);
    g_table.base = g_table.next = round_up(reinterpret_cast<CUdeviceptr>(range), kAliasStep);
    g_table.end = reinterpret_cast<CUdeviceptr>(range) + bytes;
    return true;
  }
  return false;
}

// The address range outside which an allocation's accesses fault: its mapping, guards included.
bool holds(const Allocation& a, unsigned long long address) {
  const auto from = reinterpret_cast<unsigned long long>(a.mapping);
  return a.mapping != nullptr && address >= from && address < from + a.mapping_bytes;
}

template <class Map>
std::shared_ptr<Allocation> floor_entry(const Map& map, unsigned long long key) {
  auto it = map.upper_bound(key);
  return it == map.begin() ? nullptr : std::prev(it)->second;
}

// "" or what limits the process's addresses.
std::string address_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "";
  return ": the process may have " + std::to_string(limit.rlim_cur) +
         " bytes of addresses (ulimit -v)";
}

size_t span_of(size_t size) { return round_up(size + kAliasStep, kAliasStep); }

// The next free addresses, going up; from the lowest on again once the end is reached (M1).
CUdeviceptr next_free(size_t span) {
  CUdeviceptr at = g_table.next;
  for (bool again = false;;) {
    if (g_table.end - at < span) {
      if (again) return 0;
      again = true;
      at = g_table.base;
    }
    auto after = g_table.by_alias.lower_bound(at);
    if (after != g_table.by_alias.begin()) {
      const Allocation& below = *std::prev(after)->second;
      if (below.alias + span_of(below.size) > at) {
        at = below.alias + span_of(below.size);
        continue;
      }
    }
    if (after == g_table.by_alias.end() || after->first - at >= span) return at;
    at = after->first + span_of(after->second->size);
  }
}

void give_alias(const std::shared_ptr<Allocation>& a) {
  const size_t span = span_of(a->size);
  if (!reserve()) {
    refuse(CUDA_ERROR_OUT_OF_MEMORY, "cannot reserve device addresses" + address_limit());
  }
  a->alias = next_free(span);
  if (a->alias == 0) {
    refuse(CUDA_ERROR_OUT_OF_MEMORY, "no device addresses are free" + address_limit());
  }
  g_table.next = a->alias + span;
  auto dead = g_table.dead.lower_bound(a->alias);
  if (dead != g_table.dead.begin()) --dead;
  while (dead != g_table.dead.end() && dead->first < g_table.next) {
    dead = dead->first + dead->second->size < a->alias ? std::next(dead) : g_table.dead.erase(dead);
  }
  a->id = ++g_table.ids;
  g_table.by_alias.emplace(a->alias, a);
  if (a->host) g_table.by_host.emplace(reinterpret_cast<unsigned long long>(a->storage), a);
}

// The bytes between the storage and its pages' ends: too few for a guard page, so they carry a
// pattern that is checked when the allocation is freed (M6).
constexpr unsigned char kSlack = 0xc5;

template <class Visit>
void visit_slack(const Allocation& a, const Visit& visit) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  char* from = static_cast<char*>(a.mapping) + page;
  char* to = static_cast<char*>(a.mapping) + a.mapping_bytes - page;
  visit(from, a.storage);
  visit(a.storage + a.size, to);
}

// An overrun that stayed within the slack is found late, but it is found.
void check_slack(const Allocation& a) {
  if (a.mapping == nullptr) return;
  std::string where;
  visit_slack(a, [&](const char* from, const char* to) {
    for (const char* at = from; at < to && where.empty(); ++at) {
      if (static_cast<unsigned char>(*at) == kSlack) continue;
      where = at < a.storage ? std::to_string(a.storage - at) + " bytes before the start"
                             : std::to_string(at - a.storage - a.size) + " bytes past the end";
    }
  });
  if (where.empty()) return;
  fault(CUDA_ERROR_ILLEGAL_ADDRESS,
        "when it was freed, " + a.describe() + " was found overwritten " + where);
  need(false, sticky());
}

bool map_storage(Allocation* a) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  // Whole huge pages where they hold little else: a processor knows few addresses of small ones.
  const bool huge = round_up(a->size, kHugePage) - a->size <= a->size / 4;
  const size_t unit = huge ? kHugePage : page, body = round_up(a->size, unit);
  const size_t bytes = body + unit + page;
  void* range = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) return false;
  const size_t from = reinterpret_cast<size_t>(range), at = round_up(from + page, unit);
  char* const start = static_cast<char*>(range) + (at - from);
  a->mapping = start - page;
  a->mapping_bytes = body + 2 * page;
  munmap(range, at - page - from);
  munmap(start + body + page, from + bytes - (at + body + page));
  if (mprotect(start, body, PROT_READ | PROT_WRITE) != 0) return false;
  if (huge) madvise(start, body, MADV_HUGEPAGE);
  // Pinned memory starts on its page, as NumPy views and cache-line layouts expect.
  a->storage = a->host ? start : start + body - round_up(a->size, kAlign);
  if (settings().poison && !a->host) std::memset(start, 0xff, body);
  visit_slack(
      *a, [](char* from, char* to) { std::memset(from, kSlack, static_cast<size_t>(to - from)); });
  return true;
}

size_t physical_memory() {
  static const size_t bytes =
      static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

std::shared_ptr<Allocation> allocate(size_t size, bool host, unsigned flags) {
  need(size > 0, CUDA_ERROR_INVALID_VALUE, "an allocation of 0 bytes");
  auto a = std::make_shared<Allocation>();
  a->size = size;
  a->host = host;
  a->flags = flags;
  std::lock_guard<std::mutex> lock(g_table.mutex);
  const size_t left = host ? physical_memory() : total_memory() - g_table.used;
  if (size > left) {
    refuse(CUDA_ERROR_OUT_OF_MEMORY,
           std::to_string(size) + " bytes were asked for, " + std::to_string(left) + " are free");
  }
  if (!map_storage(a.get())) {
    refuse(CUDA_ERROR_OUT_OF_MEMORY,
           "cannot map " + std::to_string(size) + " bytes" + address_limit());
  }
  give_alias(a);
  if (!host) g_table.used += size;
  live_add(host ? Kind::pinned_memory : Kind::device_memory, 1);
  return a;
}

// Unreachable for callers at once; the pages go now, the mapping with the last reference (M4).
void retire(const std::shared_ptr<Allocation>& a) {
  a->live.store(false, std::memory_order_release);
  g_table.by_alias.erase(a->alias);
  if (a->host) g_table.by_host.erase(reinterpret_cast<unsigned long long>(a->storage));
  if (a->mapping != nullptr) {
    mprotect(a->mapping, a->mapping_bytes, PROT_NONE);
    madvise(a->mapping, a->mapping_bytes, MADV_DONTNEED);
  }
  auto note = std::make_shared<Allocation>();
  note->alias = a->alias;
  note->size = a->size;
  note->id = a->id;
  note->host = a->host;
  note->live.store(false);
  g_table.dead.emplace(a->alias, std::move(note));
  if (g_table.dead.size() > 4096) g_table.dead.erase(g_table.dead.begin());
  live_add(a->host ? Kind::pinned_memory : Kind::device_memory, -1);
}

}  // namespace

Allocation::~Allocation() {
  if (mapping != nullptr) munmap(mapping, mapping_bytes);
}

std::string Allocation::describe() const {
  return std::string(live ? "" : "freed ") + (host ? "pinned" : "device") + " allocation #" +
         std::to_string(id) + " (" + std::to_string(size) + " bytes at " + hex(alias) + ")";
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
      *why = "host range [" + hex(p) + ", +" + std::to_string(bytes) + ") runs past the end of " +
             a->describe();
      return false;
    }
    if (p == 0 && bytes > 0) *why = "a null pointer";
    return p != 0 || bytes == 0;
  }
  std::shared_ptr<Allocation> a = floor_entry(g_table.by_alias, p);
  if (a == nullptr || p > a->alias + a->size) {
    std::shared_ptr<Allocation> gone = floor_entry(g_table.dead, p);
    const bool known = gone != nullptr && p <= gone->alias + gone->size;
    *why = "device address " + hex(p) +
           (known ? " lies in " + gone->describe()
                  : std::string(" lies in no allocation") +
                        (a ? "; the nearest below is " + a->describe() : ""));
    return false;
  }
  const size_t offset = p - a->alias;
  if (bytes > a->size - offset) {
    *why = "device range [" + hex(p) + ", +" + std::to_string(bytes) + ") runs past the end of " +
           a->describe();
    return false;
  }
  out->address = a->storage + offset;
  out->owner = std::move(a);
  return true;
}

bool resolve_for_device(unsigned long long p, size_t bytes, Target* out, std::string* why) {
  if (!resolve(p, bytes, out, why)) return false;
  if (is_alias(p) || out->owner) return true;
  *why = hex(p) + " is the address of pageable host memory";
  return false;
}

std::shared_ptr<Allocation> find_for_fault(unsigned long long address) {
  // Called while a worker reports a fault: it held no lock of ours when it faulted in a kernel.
  std::lock_guard<std::mutex> lock(g_table.mutex);
  if (is_alias(address)) {
    auto a = floor_entry(g_table.by_alias, address);
    if (a && address < a->alias + a->size + kAliasStep) return a;
    a = floor_entry(g_table.dead, address);
    return a && address < a->alias + a->size + kAliasStep ? a : nullptr;
  }
  for (auto& item : g_table.by_alias) {
    if (holds(*item.second, address)) return item.second;
  }
  return nullptr;
}

}  // namespace softcuda

using namespace softcuda;

SC_API(cuMemAlloc_v2, 3020, kContext | kUnsafe, CUdeviceptr*, out, size_t, size) {
  need(out != nullptr);
  *out = allocate(size, false, 0)->alias;
}

SC_API(cuMemFree_v2, 3020, kContext | kUnsafe, CUdeviceptr, p) {
  if (p == 0) return;
  // The documented "may perform implicit synchronization" always happens (M5).
  wait_idle("cuMemFree: all work to finish");
  need(sticky() == CUDA_SUCCESS, sticky());
  std::lock_guard<std::mutex> lock(g_table.mutex);
  auto it = g_table.by_alias.find(p);
  if (it == g_table.by_alias.end() || it->second->host) {
    refuse(CUDA_ERROR_INVALID_VALUE,
           "cuMemFree of " + hex(p) + ", which is not the start of a device allocation");
  }
  std::shared_ptr<Allocation> a = it->second;
  check_slack(*a);
  g_table.used -= a->size;
  retire(a);
}

SC_API(cuMemHostAlloc, 2020, kContext | kUnsafe, void**, out, size_t, size, unsigned, flags) {
  need(out != nullptr && (flags & ~7u) == 0);
  *out = allocate(size, true, flags)->storage;
}

SC_API(cuMemAllocHost_v2, 3020, kContext | kUnsafe, void**, out, size_t, size) {
  need(out != nullptr);
  *out = allocate(size, true, CU_MEMHOSTALLOC_DEVICEMAP)->storage;
}

SC_API(cuMemFreeHost, 2000, kContext | kUnsafe, void*, p) {
  wait_idle("freeing pinned memory: all work to finish");
  need(sticky() == CUDA_SUCCESS, sticky());
  std::lock_guard<std::mutex> lock(g_table.mutex);
  auto it = g_table.by_host.find(reinterpret_cast<unsigned long long>(p));
  if (it == g_table.by_host.end()) {
    refuse(CUDA_ERROR_INVALID_VALUE, hex(reinterpret_cast<unsigned long long>(p)) +
                                         " is not the start of a pinned allocation");
  }
  std::shared_ptr<Allocation> a = it->second;
  check_slack(*a);
  retire(a);
}

SC_API(cuMemGetInfo_v2, 3020, kContext, size_t*, free_bytes, size_t*, total) {
  need(free_bytes != nullptr && total != nullptr);
  std::lock_guard<std::mutex> lock(g_table.mutex);
  *total = total_memory();
  *free_bytes = *total - g_table.used;
}
