// The reaper: a thread that releases resources on behalf of destructors.
//
// Destructors run on driver threads, in garbage collection and inside host functions, where no
// driver call may be made and no lock or GIL acquired. They push an object to the reaper and
// return.
#pragma once

#include <Python.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace graft::hostwork {

// Base class of objects that the reaper processes. They are allocated together with the resource
// that they release, so that a destructor allocates nothing.
class Reapable {
 public:
  virtual ~Reapable() = default;
  // Releases the resource on the reaper thread, without the GIL; may call the driver. Python
  // references are added to `references`, which are released together afterwards.
  virtual void reap(std::vector<PyObject*>& references) noexcept = 0;

 private:
  friend class Reaper;
  Reapable* next_ = nullptr;
};

// Passes `item` to the reaper, which reaps and deletes it. Lock-free, from any thread.
void retire(Reapable* item) noexcept;
struct Retire {
  void operator()(Reapable* item) const noexcept { retire(item); }
};

// Releases one Python reference. Created together with the reference, for destructors (L1).
class ReferenceRelease final : public Reapable {
 public:
  explicit ReferenceRelease(PyObject* object = nullptr) : reference(object) {}
  void reap(std::vector<PyObject*>& references) noexcept override {
    if (reference != nullptr) references.push_back(reference);
  }
  PyObject* reference;
};
using Reference = std::unique_ptr<ReferenceRelease, Retire>;

// Releases a Python reference from any thread, with or without the GIL. It allocates and is
// therefore not for destructors.
inline void release_later(PyObject* reference) noexcept {
  if (reference != nullptr) retire(new ReferenceRelease(reference));
}

// Owns one driver handle, which the reaper frees after the last owner is gone. The functions that
// free each kind are listed in the same order in reaper.cpp.
enum class ResourceKind : int { kDeviceMemory, kPinnedMemory, kEvent, kStream, kModule, kGraph };
class ResourceRelease;
class Resource {
 public:
  Resource(ResourceKind kind, std::uint64_t handle);
  ~Resource();
  std::uint64_t handle() const { return handle_; }
  // Gives up ownership: the handle is not freed here.
  void disown() noexcept;

 private:
  // Allocated by the constructor, because a destructor must not allocate.
  const std::unique_ptr<ResourceRelease, Retire> release_;
  const std::uint64_t handle_;
};

// Number of handles that are owned, and of driver calls that failed to free one (which is leaked).
std::int64_t live_resources();
std::int64_t failed_frees();

// Waits until everything retired so far, including objects retired as a consequence, is released.
// Called without the GIL. Returns false on timeout or inside host work.
bool flush(double timeout_s);

// Starts the thread. Called once, after bind_driver().
void start_reaper();

}  // namespace graft::hostwork
