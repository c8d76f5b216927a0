// Device resources and green contexts. A green context has its own streams, and stores the
// resources with which it was created. These resources have no effect on where its work runs.
#include <algorithm>
#include <cstring>

#include "scheduler.h"

namespace softcuda {
CUcontext add_context();
bool remove_context(CUcontext context);
CUcontext current_context();
}  // namespace softcuda

using namespace softcuda;

namespace {

using CUgreenCtx = void*;

enum Type : int { kNone = 0, kSm = 1, kQueueConfig = 1000, kQueue = 10000 };

struct SmResource {
  unsigned smCount, minSmPartitionSize, smCoscheduledAlignment, flags, localityDomainId;
};

struct QueueConfig {
  CUdevice device;
  unsigned concurrency_limit;
  int scope;
};

struct CUdevResource {
  int type;
  unsigned char padding[92];
  union {
    SmResource sm;
    QueueConfig queue_config;
    unsigned char bytes[40];
  };
  CUdevResource* next;
};
static_assert(sizeof(CUdevResource) == 144, "driver ABI");

struct GroupParams {
  unsigned smCount, coscheduledSmCount, preferredCoscheduledSmCount, flags, reserved[12];
};
static_assert(sizeof(GroupParams) == 64, "driver ABI");

enum : unsigned { kBackfill = 1 };
// Number of multiprocessors in the smallest partition, and in a cluster. The sizes of all
// partitions are multiples of this number.
constexpr unsigned kAlignment = 2;

using Resources = std::vector<CUdevResource>;
auto& descriptors = *new Handles<Resources>(0x5e000000000000, "the resource descriptor is unknown");

struct GreenContext {
  void* handle = nullptr;
  CUcontext context = nullptr;
  Resources resources;
};
auto& green_contexts =
    *new Handles<GreenContext>(0x5d000000000000, "the green context is unknown or was destroyed");

CUdevResource sm_resource(unsigned count, unsigned alignment, unsigned flags) {
  CUdevResource out{};
  if (count == 0) return out;
  out.type = kSm;
  out.sm = {count, kAlignment, alignment, flags, 0};
  return out;
}

// Stores the resource with the given type in `out`: the one in `given` or, if `given` has none, the
// resource of the device.
void query(const Resources& given, CUdevResource* out, int type) {
  require(out != nullptr);
  require(type == kSm || type == kQueueConfig || type == kQueue, CUDA_ERROR_INVALID_RESOURCE_TYPE,
          "unknown type of a device resource");
  for (const CUdevResource& resource : given) {
    if (resource.type != type) continue;
    *out = resource;
    return;
  }
  if (type == kSm) {
    *out = sm_resource(settings().workers, kAlignment, 0);
    return;
  }
  constexpr unsigned kConcurrency = 8;
  CUdevResource resource{};
  resource.type = type;
  if (type == kQueueConfig) resource.queue_config = {0, kConcurrency, 0};
  *out = resource;
}

std::shared_ptr<GreenContext> green_context_of(CUcontext context) {
  for (auto& green : green_contexts.all()) {
    if (green->context == context) return green;
  }
  return nullptr;
}

// Returns the green context in which a stream was created or, for the default streams, the current
// green context; null if there is none.
std::shared_ptr<GreenContext> green_context_of_stream(CUstream handle) {
  const auto stream = find_stream(handle);
  const bool is_default = reinterpret_cast<uint64_t>(handle) <= 2;
  return green_context_of(is_default ? current_context() : stream->context);
}

void require_sm(const CUdevResource* input) {
  require(input != nullptr);
  require(input->type == kSm, CUDA_ERROR_INVALID_RESOURCE_TYPE,
          "only a resource of multiprocessors can be split");
}

// Returns the number of multiprocessors of the group that `p` describes: a multiple of `alignment`,
// unless `p` has the flag kBackfill. `rest` multiprocessors are in no group yet.
unsigned group_size(const GroupParams& p, unsigned alignment, unsigned rest) {
  constexpr CUresult kInvalid = CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
  require((p.flags & ~kBackfill) == 0, CUDA_ERROR_NOT_SUPPORTED,
          "locality domains are not implemented");
  const bool backfill = (p.flags & kBackfill) != 0;
  constexpr unsigned kMaxCoscheduled = 32;
  require(alignment % kAlignment == 0 && alignment <= kMaxCoscheduled, kInvalid,
          "the number of co-scheduled multiprocessors is not an even number up to 32");
  unsigned count = p.smCount;
  if (count == 0) count = backfill ? rest : rest - rest % alignment;
  require(count >= kAlignment && count % kAlignment == 0 && count <= rest, kInvalid,
          "the number of multiprocessors of a group is odd, too small or not available");
  require(backfill || count % alignment == 0, kInvalid,
          "the number of multiprocessors is not a multiple of those that are co-scheduled");
  return count;
}

}  // namespace

SC_API(cuDeviceGetDevResource, 12040, 0, CUdevice, device, CUdevResource*, out, int, type) {
  require(device == 0, CUDA_ERROR_INVALID_DEVICE);
  query({}, out, type);
}

SC_API(cuCtxGetDevResource, 12040, 0, CUcontext, context, CUdevResource*, out, int, type) {
  require(is_context(context), CUDA_ERROR_INVALID_CONTEXT);
  const auto green = green_context_of(context);
  query(green ? green->resources : Resources(), out, type);
}

SC_API(cuGreenCtxGetDevResource, 12040, 0, CUgreenCtx, handle, CUdevResource*, out, int, type) {
  query(green_contexts.find(handle)->resources, out, type);
}

SC_API(cuStreamGetDevResource, 13010, 0, CUstream, stream, CUdevResource*, out, int, type) {
  const auto green = green_context_of_stream(stream);
  query(green ? green->resources : Resources(), out, type);
}

// If `out` is null, only the number of possible groups is returned.
SC_API(cuDevSmResourceSplitByCount, 12040, 0, CUdevResource*, out, unsigned*, groups,
       const CUdevResource*, input, CUdevResource*, remaining, unsigned, flags, unsigned,
       min_count) {
  require(groups != nullptr && flags <= 3);
  require_sm(input);
  const unsigned total = input->sm.smCount;
  require(min_count <= total, CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION,
          "a group is larger than the resource");
  const unsigned size =
      std::max((min_count + kAlignment - 1) / kAlignment * kAlignment, kAlignment);
  const unsigned possible = total / size;
  require(possible > 0, CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION,
          "the resource is smaller than a group");
  const unsigned created = out == nullptr ? possible : std::min(*groups, possible);
  for (unsigned i = 0; out != nullptr && i < created; ++i) {
    out[i] = sm_resource(size, kAlignment, 0);
  }
  if (remaining != nullptr) *remaining = sm_resource(total - created * size, kAlignment, 0);
  *groups = created;
}

// The sizes of the groups are stored in `params`. If `out` is null, nothing else is returned.
SC_API(cuDevSmResourceSplit, 13010, 0, CUdevResource*, out, unsigned, groups, const CUdevResource*,
       input, CUdevResource*, remaining, unsigned, flags, GroupParams*, params) {
  require(groups > 0 && flags == 0 && params != nullptr);
  require_sm(input);
  unsigned rest = input->sm.smCount;
  Resources created;
  for (unsigned i = 0; i < groups; ++i) {
    const unsigned alignment = params[i].coscheduledSmCount != 0 ? params[i].coscheduledSmCount
                                                                 : input->sm.smCoscheduledAlignment;
    const unsigned count = group_size(params[i], alignment, rest);
    created.push_back(sm_resource(count, alignment, params[i].flags));
    rest -= count;
  }
  for (unsigned i = 0; i < groups; ++i) params[i].smCount = created[i].sm.smCount;
  if (out != nullptr) std::copy(created.begin(), created.end(), out);
  if (remaining != nullptr) *remaining = sm_resource(rest, kAlignment, 0);
}

SC_API(cuDevResourceGenerateDesc, 12040, 0, void**, out, CUdevResource*, resources, unsigned, n) {
  require(out != nullptr && resources != nullptr && n > 0);
  for (unsigned i = 0; i < n; ++i) {
    const int type = resources[i].type;
    require(type == kSm || type == kQueueConfig || type == kQueue, CUDA_ERROR_INVALID_RESOURCE_TYPE,
            "unknown type of a device resource");
  }
  *out = descriptors.add(std::make_shared<Resources>(resources, resources + n));
}

SC_API(cuGreenCtxCreate, 12040, 0, CUgreenCtx*, out, void*, descriptor, CUdevice, device, unsigned,
       flags) {
  require(device == 0, CUDA_ERROR_INVALID_DEVICE);
  require(out != nullptr && flags <= 1);
  auto green = std::make_shared<GreenContext>();
  green->resources = *descriptors.find(descriptor);
  green->context = add_context();
  green->handle = green_contexts.add(green);
  *out = green->handle;
}

SC_API(cuGreenCtxDestroy, 12040, 0, CUgreenCtx, handle) {
  green_contexts.find(handle);
  wait_idle("cuGreenCtxDestroy: all work to finish");
  remove_context(green_contexts.remove(handle)->context);
}

SC_API(cuCtxFromGreenCtx, 12040, 0, CUcontext*, out, CUgreenCtx, handle) {
  const auto green = green_contexts.find(handle);
  require(out != nullptr);
  *out = green->context;
}

SC_API(cuGreenCtxGetId, 12090, 0, CUgreenCtx, handle, unsigned long long*, out) {
  green_contexts.find(handle);
  require(out != nullptr);
  *out = reinterpret_cast<uint64_t>(handle) / 16 & 0xffffffff;
}

SC_API(cuStreamGetGreenCtx, 12040, 0, CUstream, stream, CUgreenCtx*, out) {
  const auto green = green_context_of_stream(stream);
  require(out != nullptr);
  *out = green ? green->handle : nullptr;
}

SC_API(cuStreamGetCtx_v2, 12050, kNoLock, CUstream, stream, CUcontext*, out, CUgreenCtx*, green) {
  const auto found = green_context_of_stream(stream);
  require(out != nullptr && green != nullptr);
  *out = primary_context();
  *green = found ? found->handle : nullptr;
}

SC_API(cuGreenCtxStreamCreate, 12050, 0, CUstream*, out, CUgreenCtx, handle, unsigned, flags, int,
       priority) {
  const auto green = green_contexts.find(handle);
  require(out != nullptr && flags == CU_STREAM_NON_BLOCKING);
  const auto stream = new_stream(flags, std::clamp(priority, kGreatestPriority, kLeastPriority));
  stream->context = green->context;
  live_add(Resource::stream, 1);
  *out = static_cast<CUstream>(stream->handle);
}
