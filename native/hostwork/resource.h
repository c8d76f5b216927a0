// Owners of driver handles whose destructors never call the driver.
#pragma once

#include <cstdint>

#include "hostwork/reaper.h"

namespace graft::hostwork {

enum class ResourceKind : int { kDeviceMemory, kPinnedMemory, kEvent, kStream, kModule, kGraph };

class ResourceEnd;

// Frees one driver handle when the last reference goes. The free happens on the reaper thread.
class Resource {
 public:
  Resource(ResourceKind kind, std::uint64_t handle);
  ~Resource();
  Resource(const Resource&) = delete;
  Resource& operator=(const Resource&) = delete;

  std::uint64_t handle() const { return handle_; }
  // Somebody else frees the handle from now on.
  void disown() noexcept;

 private:
  ResourceEnd* const end_;  // allocated up front: the destructor must not allocate
  const std::uint64_t handle_;
};

// Handles owned now, and driver calls that refused to free one (the handle is then leaked).
std::int64_t live_resources();
std::int64_t failed_frees();

}  // namespace graft::hostwork
