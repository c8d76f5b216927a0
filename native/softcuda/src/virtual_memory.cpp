// Virtual memory management: reserved address ranges, physical memory, and mappings of the memory
// into the ranges (INVARIANTS.md M10).
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "scheduler.h"

namespace softcuda {
namespace {

// Sizes, addresses and offsets are multiples of this number of bytes.
constexpr size_t kGranularity = 1 << 16;
constexpr int kPosixFd = 1;  // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

// Physical memory: the pages of an anonymous file.
struct Physical {
  Physical(int file, size_t bytes, const CUmemAllocationProp& p) : fd(file), size(bytes), prop(p) {}
  ~Physical() {
    close(fd);
    reserve_physical(-static_cast<long>(size));
  }
  Physical(const Physical&) = delete;
  Physical& operator=(const Physical&) = delete;
  const int fd;
  const size_t size;
  const CUmemAllocationProp prop;
  void* handle = nullptr;
  // References that cuMemCreate, cuMemImportFromShareableHandle and cuMemRetainAllocationHandle
  // have returned and cuMemRelease has not released.
  int references = 1;
};

struct Mapping {
  size_t size;
  std::shared_ptr<Physical> memory;
  int flags = CU_MEM_ACCESS_FLAGS_PROT_NONE;
};

struct Reservation {
  std::shared_ptr<Allocation> range;
  std::map<CUdeviceptr, Mapping> mappings;
};

Handles<Physical>& g_physical =
    *new Handles<Physical>(0x5a000000000000, "the memory handle is unknown or was released");
std::mutex& g_virtual_mutex = *new std::mutex;
std::map<CUdeviceptr, Reservation>& g_reservations = *new std::map<CUdeviceptr, Reservation>;

void* as_handle(unsigned long long handle) { return reinterpret_cast<void*>(handle); }

void check_prop(const CUmemAllocationProp* prop) {
  require(prop != nullptr);
  require(
      prop->type == CU_MEM_ALLOCATION_TYPE_PINNED && (prop->requestedHandleTypes & ~kPosixFd) == 0,
      CUDA_ERROR_INVALID_VALUE,
      "physical memory must be PINNED and can be shared as a POSIX file descriptor only");
  require(prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE, CUDA_ERROR_NOT_SUPPORTED,
          "physical memory of the host is not implemented");
  require(prop->location.id == 0, CUDA_ERROR_INVALID_DEVICE);
  require(prop->compressionType == 0 && prop->usage == 0, CUDA_ERROR_NOT_SUPPORTED,
          "compressible memory is not implemented");
}

// Returns the reservation that contains a range. The caller holds g_virtual_mutex.
Reservation& find_reservation(CUdeviceptr p, size_t size) {
  require(size > 0 && size % kGranularity == 0 && p % kGranularity == 0, CUDA_ERROR_INVALID_VALUE,
          "addresses and sizes must be multiples of the granularity, 65536 bytes");
  auto it = g_reservations.upper_bound(p);
  if (it != g_reservations.begin()) {
    Reservation& found = std::prev(it)->second;
    const size_t offset = p - found.range->alias;
    if (offset < found.range->size && size <= found.range->size - offset) return found;
  }
  refuse(CUDA_ERROR_INVALID_VALUE, hex(p) + " is not in a reserved address range");
}

char* storage_of(const Reservation& r, CUdeviceptr p) {
  return r.range->storage + (p - r.range->alias);
}

// Calls visit() for each mapping in a range. Refuses the call if the range does not consist of
// whole mappings.
template <class Visit>
void for_mappings(Reservation& r, CUdeviceptr p, size_t size, const Visit& visit) {
  CUdeviceptr at = p;
  for (auto it = r.mappings.find(p); it != r.mappings.end() && at < p + size; ++it) {
    if (it->first != at) break;
    at += it->second.size;
  }
  require(at == p + size, CUDA_ERROR_INVALID_VALUE, "the range does not consist of whole mappings");
  for (at = p; at < p + size;) {
    auto it = r.mappings.find(at);
    const size_t step = it->second.size;
    visit(it);
    at += step;
  }
}

int protection(int flags) {
  if (flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE) return PROT_READ | PROT_WRITE;
  return flags == 1 ? PROT_READ : PROT_NONE;
}

void add_physical(unsigned long long* out, int fd, size_t size, const CUmemAllocationProp& prop) {
  auto memory = std::make_shared<Physical>(fd, size, prop);
  memory->handle = g_physical.add(memory);
  *out = reinterpret_cast<unsigned long long>(memory->handle);
}

}  // namespace

std::mutex& virtual_mutex() { return g_virtual_mutex; }

bool find_mapping(const Target& target, size_t bytes, int* flags) {
  const auto reservation = g_reservations.find(target.owner->alias);
  if (reservation == g_reservations.end()) return false;
  const auto& mappings = reservation->second.mappings;
  const CUdeviceptr p =
      target.owner->alias + static_cast<size_t>(target.address - target.owner->storage);
  const auto after = mappings.upper_bound(p);
  if (after == mappings.begin()) return false;
  const auto& mapping = *std::prev(after);
  *flags = mapping.second.flags;
  return p - mapping.first <= mapping.second.size - bytes;
}
}  // namespace softcuda

using namespace softcuda;

SC_API(cuMemGetAllocationGranularity, 10020, kNoLock, size_t*, out, const CUmemAllocationProp*,
       prop, int, option) {
  require(out != nullptr && (option == 0 || option == 1));
  check_prop(prop);
  *out = kGranularity;
}

// The requested address is a hint, which is ignored.
SC_API(cuMemAddressReserve, 10020, kContext, CUdeviceptr*, out, size_t, size, size_t, alignment,
       CUdeviceptr, address, uint64_t, flags) {
  require(out != nullptr && size > 0 && size % kGranularity == 0 && flags == 0);
  require((alignment & (alignment - 1)) == 0);
  require(alignment <= kGranularity, CUDA_ERROR_NOT_SUPPORTED,
          "alignments greater than 65536 bytes are not implemented");
  auto range = reserve_range(size);
  std::lock_guard<std::mutex> lock(g_virtual_mutex);
  *out = range->alias;
  g_reservations[range->alias].range = std::move(range);
}

SC_API(cuMemAddressFree, 10020, kContext, CUdeviceptr, p, size_t, size) {
  wait_to_free("cuMemAddressFree: all work to finish");
  std::lock_guard<std::mutex> lock(g_virtual_mutex);
  Reservation& r = find_reservation(p, size);
  require(r.range->alias == p && r.range->size == size && r.mappings.empty(),
          CUDA_ERROR_INVALID_VALUE, "the range is not a whole reservation, or memory is mapped");
  unreserve_range(r.range);
  g_reservations.erase(p);
}

SC_API(cuMemCreate, 10020, kContext, unsigned long long*, out, size_t, size,
       const CUmemAllocationProp*, prop, uint64_t, flags) {
  require(out != nullptr && flags == 0);
  check_prop(prop);
  require(size > 0 && size % kGranularity == 0, CUDA_ERROR_INVALID_VALUE,
          "the size must be a multiple of the granularity, 65536 bytes");
  reserve_physical(static_cast<long>(size));
  const int fd = memfd_create("softcuda", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(size)) != 0) {
    if (fd >= 0) close(fd);
    reserve_physical(-static_cast<long>(size));
    refuse(CUDA_ERROR_OUT_OF_MEMORY, "cannot create a file of " + std::to_string(size) + " bytes");
  }
  add_physical(out, fd, size, *prop);
}

// The physical memory exists until all references are released and it is not mapped any more.
SC_API(cuMemRelease, 10020, kContext, unsigned long long, handle) {
  std::lock_guard<std::mutex> lock(g_virtual_mutex);
  const auto memory = g_physical.get(as_handle(handle));
  require(memory != nullptr, CUDA_ERROR_INVALID_VALUE, "unknown handle of physical memory");
  if (--memory->references == 0) g_physical.take(as_handle(handle));
}

SC_API(cuMemMap, 10020, kContext, CUdeviceptr, p, size_t, size, size_t, offset, unsigned long long,
       handle, uint64_t, flags) {
  std::lock_guard<std::mutex> lock(g_virtual_mutex);
  const auto memory = g_physical.get(as_handle(handle));
  require(memory != nullptr, CUDA_ERROR_INVALID_VALUE, "unknown handle of physical memory");
  Reservation& r = find_reservation(p, size);
  require(flags == 0 && offset == 0 && size == memory->size, CUDA_ERROR_INVALID_VALUE,
          "physical memory can only be mapped as a whole");
  auto after = r.mappings.lower_bound(p);
  const bool overlaps =
      (after != r.mappings.end() && after->first < p + size) ||
      (after != r.mappings.begin() && std::prev(after)->first + std::prev(after)->second.size > p);
  require(!overlaps, CUDA_ERROR_INVALID_VALUE, "memory is already mapped in the range");
  void* const at = storage_of(r, p);
  if (mmap(at, size, PROT_NONE, MAP_SHARED | MAP_FIXED, memory->fd, 0) == MAP_FAILED) {
    refuse(CUDA_ERROR_OUT_OF_MEMORY, "cannot map " + std::to_string(size) + " bytes");
  }
  r.mappings.emplace(p, Mapping{size, memory});
}

SC_API(cuMemUnmap, 10020, kContext, CUdeviceptr, p, size_t, size) {
  wait_to_free("cuMemUnmap: all work to finish");
  std::lock_guard<std::mutex> lock(g_virtual_mutex);
  Reservation& r = find_reservation(p, size);
  for_mappings(r, p, size, [&](auto it) {
    mmap(storage_of(r, it->first), it->second.size, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    r.mappings.erase(it);
  });
}

SC_API(cuMemSetAccess, 10020, kContext, CUdeviceptr, p, size_t, size, const CUmemAccessDesc*, desc,
       size_t, count) {
  require(desc != nullptr && count > 0);
  std::lock_guard<std::mutex> lock(g_virtual_mutex);
  Reservation& r = find_reservation(p, size);
  for (size_t i = 0; i < count; ++i) {
    const int flags = desc[i].flags;
    require(desc[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE && desc[i].location.id == 0,
            CUDA_ERROR_INVALID_DEVICE);
    require(flags == 0 || flags == 1 || flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    for_mappings(r, p, size, [&](auto it) {
      mprotect(storage_of(r, it->first), it->second.size, protection(flags));
      it->second.flags = flags;
    });
  }
}

SC_API(cuMemGetAccess, 10020, kContext, unsigned long long*, flags, const CUmemLocation*, location,
       CUdeviceptr, p) {
  require(flags != nullptr && location != nullptr);
  require(location->type == CU_MEM_LOCATION_TYPE_DEVICE && location->id == 0,
          CUDA_ERROR_INVALID_DEVICE);
  std::lock_guard<std::mutex> lock(g_virtual_mutex);
  Reservation& r = find_reservation(p / kGranularity * kGranularity, kGranularity);
  auto it = r.mappings.upper_bound(p);
  require(it != r.mappings.begin() && p - std::prev(it)->first < std::prev(it)->second.size,
          CUDA_ERROR_INVALID_VALUE, "no memory is mapped at the address");
  *flags = static_cast<unsigned>(std::prev(it)->second.flags);
}

SC_API(cuMemRetainAllocationHandle, 11000, kContext, unsigned long long*, out, void*, address) {
  require(out != nullptr);
  const auto p = reinterpret_cast<CUdeviceptr>(address);
  std::lock_guard<std::mutex> lock(g_virtual_mutex);
  Reservation& r = find_reservation(p / kGranularity * kGranularity, kGranularity);
  auto it = r.mappings.upper_bound(p);
  require(it != r.mappings.begin() && p - std::prev(it)->first < std::prev(it)->second.size,
          CUDA_ERROR_INVALID_VALUE, "no memory is mapped at the address");
  const auto& memory = std::prev(it)->second.memory;
  require(memory->references > 0, CUDA_ERROR_NOT_SUPPORTED,
          "the handle of the memory was released");
  ++memory->references;
  *out = reinterpret_cast<unsigned long long>(memory->handle);
}

SC_API(cuMemGetAllocationPropertiesFromHandle, 10020, kContext, CUmemAllocationProp*, out,
       unsigned long long, handle) {
  require(out != nullptr);
  const auto memory = g_physical.get(as_handle(handle));
  require(memory != nullptr, CUDA_ERROR_INVALID_VALUE, "unknown handle of physical memory");
  *out = memory->prop;
}

SC_API(cuMemExportToShareableHandle, 10020, kContext, int*, out, unsigned long long, handle, int,
       type, uint64_t, flags) {
  require(out != nullptr && flags == 0);
  const auto memory = g_physical.get(as_handle(handle));
  require(memory != nullptr && type == kPosixFd && (memory->prop.requestedHandleTypes & type) != 0,
          CUDA_ERROR_INVALID_VALUE, "the memory was not created for this type of handle");
  *out = dup(memory->fd);
  require(*out >= 0, CUDA_ERROR_OPERATING_SYSTEM, "the process has too many open files");
}

SC_API(cuMemImportFromShareableHandle, 10020, kContext, unsigned long long*, out, void*, file, int,
       type) {
  require(out != nullptr && type == kPosixFd);
  struct stat status{};
  const int fd = dup(static_cast<int>(reinterpret_cast<intptr_t>(file)));
  if (fd < 0 || fstat(fd, &status) != 0 || status.st_size <= 0) {
    if (fd >= 0) close(fd);
    refuse(CUDA_ERROR_INVALID_VALUE, "the file descriptor is not that of exported memory");
  }
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.requestedHandleTypes = kPosixFd;
  prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
  const auto size = static_cast<size_t>(status.st_size);
  try {
    reserve_physical(static_cast<long>(size));
  } catch (const Refused&) {
    close(fd);
    throw;
  }
  add_physical(out, fd, size, prop);
}
