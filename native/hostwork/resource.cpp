#include "hostwork/resource.h"

#include <atomic>

#include "hostwork/driver.h"

namespace graft::hostwork {
namespace {

std::atomic<std::int64_t> live{0};
std::atomic<std::int64_t> failed{0};

Result destroy(ResourceKind kind, std::uint64_t handle) {
  const Driver& d = driver();
  void* pointer = reinterpret_cast<void*>(handle);
  switch (kind) {
    case ResourceKind::kDeviceMemory:
      return d.mem_free(handle);
    case ResourceKind::kPinnedMemory:
      return d.mem_free_host(pointer);
    case ResourceKind::kEvent:
      return d.event_destroy(pointer);
    case ResourceKind::kStream:
      return d.stream_destroy(pointer);
    case ResourceKind::kModule:
      return d.module_unload(pointer);
    case ResourceKind::kGraph:
      return d.graph_destroy(pointer);
  }
  return kSuccess;
}

}  // namespace

class ResourceEnd final : public Reapable {
 public:
  ResourceEnd(ResourceKind kind, std::uint64_t handle) : kind_(kind), handle_(handle) {}

  void reap(std::vector<PyObject*>&) noexcept override {
    // A faulted context refuses every call; the handle then goes with the context.
    if (owned && destroy(kind_, handle_) != kSuccess) failed.fetch_add(1);
    live.fetch_sub(1);
  }

  bool owned = true;  // set before the hand-over

 private:
  const ResourceKind kind_;
  const std::uint64_t handle_;
};

Resource::Resource(ResourceKind kind, std::uint64_t handle)
    : end_(new ResourceEnd(kind, handle)), handle_(handle) {
  live.fetch_add(1);
}

Resource::~Resource() { retire(end_); }

void Resource::disown() noexcept { end_->owned = false; }

std::int64_t live_resources() { return live.load(); }
std::int64_t failed_frees() { return failed.load(); }

}  // namespace graft::hostwork
