// Managed memory: allocation, hints and prefetching (INVARIANTS.md M7). Host and device share the
// memory of the machine, so nothing is migrated. Hints are stored per allocation and returned by
// queries.
#include "memory.h"
#include "scheduler.h"

namespace softcuda {
namespace {

constexpr int kCpu = -1;      // CU_DEVICE_CPU
constexpr int kNowhere = -2;  // CU_DEVICE_INVALID
enum Advice : int { kReadMostly = 1, kPreferred = 3, kAccessedBy = 5, kLastAdvice = 6 };
enum Range : int {
  kRangeReadMostly = 1,
  kRangePreferred = 2,
  kRangeAccessedBy = 3,
  kRangePrefetched = 4,
  kRangePreferredType = 5,
  kRangePreferredId = 6,
  kRangePrefetchedType = 7,
  kRangePrefetchedId = 8,
};

// Returns the managed allocation that contains a range.
std::shared_ptr<Allocation> find_managed(CUdeviceptr p, size_t bytes) {
  Target target;
  std::string why;
  require(bytes > 0, CUDA_ERROR_INVALID_VALUE, "the range is empty");
  const bool found =
      resolve(p, bytes, &target, &why) && target.owner && target.owner->kind == MemoryKind::managed;
  if (found) return target.owner;
  refuse(CUDA_ERROR_INVALID_VALUE,
         why.empty() ? hex(p) + " is not in managed memory" : "managed memory: " + why);
}

// Returns the managed allocation that a range covers. The range must begin at the start of the
// allocation, and may leave out less than a page at its end, because hints apply to whole pages.
// Refuses any other range.
std::shared_ptr<Allocation> find_whole(CUdeviceptr p, size_t bytes) {
  const auto a = find_managed(p, bytes);
  constexpr size_t kPage = 4096;
  const bool whole = p == a->device_address() && bytes + kPage > a->size;
  require(whole, CUDA_ERROR_NOT_SUPPORTED,
          "hints for a part of a managed allocation are not implemented");
  return a;
}

void check_location(const CUmemLocation& location) {
  const bool known = location.type >= CU_MEM_LOCATION_TYPE_DEVICE &&
                     location.type <= CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT;
  require(known, CUDA_ERROR_INVALID_VALUE, "unknown location of memory");
  if (location.type == CU_MEM_LOCATION_TYPE_DEVICE) {
    require(location.id == 0, CUDA_ERROR_INVALID_DEVICE);
  }
  require(location.type != CU_MEM_LOCATION_TYPE_HOST_NUMA || location.id == 0,
          CUDA_ERROR_INVALID_VALUE, "the only NUMA node is 0");
}

CUmemLocation location_of(CUdevice device) {
  if (device == kCpu) return {CU_MEM_LOCATION_TYPE_HOST, 0};
  return {CU_MEM_LOCATION_TYPE_DEVICE, device};
}

void advise(CUdeviceptr p, size_t bytes, int advice, const CUmemLocation& location) {
  require(advice >= kReadMostly && advice <= kLastAdvice);
  const bool set = advice % 2 == 1;
  const int kind = set ? advice : advice - 1;
  if (kind == kAccessedBy || (kind == kPreferred && set)) check_location(location);
  const auto a = find_whole(p, bytes);
  std::lock_guard<std::mutex> lock(memory_mutex());
  ManagedHints& hints = a->hints;
  if (kind == kReadMostly) {
    hints.read_mostly = set;
  } else if (kind == kPreferred) {
    hints.preferred = set ? location : CUmemLocation{CU_MEM_LOCATION_TYPE_NONE, 0};
  } else {
    require(location.type <= CU_MEM_LOCATION_TYPE_HOST, CUDA_ERROR_INVALID_VALUE,
            "ACCESSED_BY needs a device or the host");
    const bool device = location.type == CU_MEM_LOCATION_TYPE_DEVICE;
    (device ? hints.accessed_by_device : hints.accessed_by_host) = set;
  }
}

// Stores `location` as the last prefetch location. The prefetch itself has no effect, because host
// and device share the memory.
void prefetch(CUdeviceptr p, size_t bytes, const CUmemLocation& location, CUstream stream) {
  check_location(location);
  const auto a = find_managed(p, bytes);
  find_stream(stream);
  std::lock_guard<std::mutex> lock(memory_mutex());
  a->hints.prefetched = location;
}

// Converts a location to one number: a device number, CU_DEVICE_CPU or CU_DEVICE_INVALID. The older
// range attributes return this number, the newer ones type and id of the location.
int device_of(const CUmemLocation& location) {
  if (location.type == CU_MEM_LOCATION_TYPE_DEVICE) return location.id;
  return location.type == CU_MEM_LOCATION_TYPE_HOST ? kCpu : kNowhere;
}

void write_accessed_by(int* out, size_t n, const ManagedHints& hints) {
  size_t used = 0;
  if (hints.accessed_by_device && used < n) out[used++] = 0;
  if (hints.accessed_by_host && used < n) out[used++] = kCpu;
  while (used < n) out[used++] = kNowhere;
}

int range_attribute(int attribute, const ManagedHints& hints) {
  switch (attribute) {
    case kRangeReadMostly:
      return hints.read_mostly;
    case kRangePreferred:
      return device_of(hints.preferred);
    case kRangePrefetched:
      return device_of(hints.prefetched);
    case kRangePreferredType:
      return hints.preferred.type;
    case kRangePreferredId:
      return hints.preferred.id;
    case kRangePrefetchedType:
      return hints.prefetched.type;
    case kRangePrefetchedId:
      return hints.prefetched.id;
    default:
      refuse(CUDA_ERROR_INVALID_VALUE, "unknown range attribute " + std::to_string(attribute));
  }
}

void read_range(void* data, size_t size, int attribute, CUdeviceptr p, size_t bytes) {
  require(data != nullptr && size > 0 && size % sizeof(int) == 0);
  require(size == sizeof(int) || attribute == kRangeAccessedBy);
  const auto a = find_managed(p, bytes);
  std::lock_guard<std::mutex> lock(memory_mutex());
  int* const out = static_cast<int*>(data);
  if (attribute == kRangeAccessedBy) return write_accessed_by(out, size / sizeof(int), a->hints);
  *out = range_attribute(attribute, a->hints);
}

// Checks the ranges of a batch. All are checked before the first one takes effect.
void check_ranges(const CUdeviceptr* ptrs, const size_t* sizes, size_t count, uint64_t flags,
                  CUstream stream) {
  require(ptrs != nullptr && sizes != nullptr && count > 0 && flags == 0);
  for (size_t i = 0; i < count; ++i) find_managed(ptrs[i], sizes[i]);
  find_stream(stream);
}

// Prefetches each range of a batch to the location of its group. The ranges are grouped in order:
// group i begins with range number firsts[i], and its location is locations[i].
void prefetch_batch(const CUdeviceptr* ptrs, const size_t* sizes, size_t count,
                    const CUmemLocation* locations, const size_t* firsts, size_t groups,
                    CUstream stream) {
  require(locations != nullptr && firsts != nullptr && groups > 0 && groups <= count &&
          firsts[0] == 0);
  for (size_t i = 0; i < groups; ++i) {
    check_location(locations[i]);
    require(i == 0 || (firsts[i] > firsts[i - 1] && firsts[i] < count), CUDA_ERROR_INVALID_VALUE,
            "the first ranges of the locations do not ascend");
  }
  size_t group = 0;
  for (size_t i = 0; i < count; ++i) {
    if (group + 1 < groups && firsts[group + 1] == i) ++group;
    prefetch(ptrs[i], sizes[i], locations[group], stream);
  }
}

}  // namespace
}  // namespace softcuda

using namespace softcuda;

SC_API(cuMemAllocManaged, 6000, kContext | kUnsafe, CUdeviceptr*, out, size_t, size, unsigned,
       flags) {
  require(out != nullptr);
  require(flags == 1 || flags == 2, CUDA_ERROR_INVALID_VALUE,
          "the flags must be CU_MEM_ATTACH_GLOBAL or CU_MEM_ATTACH_HOST");
  *out = allocate_memory(size, MemoryKind::managed, flags)->device_address();
}

SC_API(cuMemAdvise, 8000, kContext, CUdeviceptr, p, size_t, bytes, int, advice, CUdevice, device) {
  advise(p, bytes, advice, location_of(device));
}

SC_API(cuMemAdvise_v2, 12020, kContext, CUdeviceptr, p, size_t, bytes, int, advice, CUmemLocation,
       location) {
  advise(p, bytes, advice, location);
}

SC_API(cuMemPrefetchAsync, 8000, kContext, CUdeviceptr, p, size_t, bytes, CUdevice, device,
       CUstream, stream) {
  prefetch(p, bytes, location_of(device), stream);
}

SC_API(cuMemPrefetchAsync_v2, 12020, kContext, CUdeviceptr, p, size_t, bytes, CUmemLocation,
       location, unsigned, flags, CUstream, stream) {
  require(flags == 0);
  prefetch(p, bytes, location, stream);
}

SC_API(cuMemPrefetchBatchAsync, 13000, kContext, const CUdeviceptr*, ptrs, const size_t*, sizes,
       size_t, count, const CUmemLocation*, locations, const size_t*, firsts, size_t, groups,
       uint64_t, flags, CUstream, stream) {
  check_ranges(ptrs, sizes, count, flags, stream);
  prefetch_batch(ptrs, sizes, count, locations, firsts, groups, stream);
}

// The contents of discarded memory are undefined. The soft device leaves them as they are.
SC_API(cuMemDiscardBatchAsync, 13000, kContext, const CUdeviceptr*, ptrs, const size_t*, sizes,
       size_t, count, uint64_t, flags, CUstream, stream) {
  check_ranges(ptrs, sizes, count, flags, stream);
}

SC_API(cuMemDiscardAndPrefetchBatchAsync, 13000, kContext, const CUdeviceptr*, ptrs, const size_t*,
       sizes, size_t, count, const CUmemLocation*, locations, const size_t*, firsts, size_t, groups,
       uint64_t, flags, CUstream, stream) {
  check_ranges(ptrs, sizes, count, flags, stream);
  prefetch_batch(ptrs, sizes, count, locations, firsts, groups, stream);
}

SC_API(cuMemRangeGetAttribute, 8000, kContext, void*, data, size_t, size, int, attribute,
       CUdeviceptr, p, size_t, bytes) {
  read_range(data, size, attribute, p, bytes);
}

SC_API(cuMemRangeGetAttributes, 8000, kContext, void**, data, const size_t*, sizes, const int*,
       attributes, size_t, n, CUdeviceptr, p, size_t, bytes) {
  require(data != nullptr && sizes != nullptr && attributes != nullptr && n > 0);
  for (size_t i = 0; i < n; ++i) read_range(data[i], sizes[i], attributes[i], p, bytes);
}

// Host and device may always access managed memory at the same time, so attaching memory to a
// stream has no effect.
SC_API(cuStreamAttachMemAsync, 6000, kContext, CUstream, stream, CUdeviceptr, p, size_t, length,
       unsigned, flags) {
  find_stream(stream);
  const auto a = find_managed(p, 1);
  require((length == 0 || length == a->size) && p == a->device_address() &&
              (flags == 1 || flags == 2 || flags == 4),
          CUDA_ERROR_INVALID_VALUE, "a managed allocation can only be attached as a whole");
}
