// The one place where things end: a thread that frees what destructors hand to it.
//
// Destructors run on driver threads, in garbage collection and inside host functions, where no
// driver call, lock or GIL may be taken. They push a node here and return.
#pragma once

#include <Python.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace graft::hostwork {

// Base of everything that can be handed over. Allocated with the thing it frees, so that
// handing over allocates nothing.
class Reapable {
 public:
  virtual ~Reapable() = default;
  // Runs on the reaper thread without the GIL; may call the driver. Python references are added
  // to `references` and dropped together afterwards.
  virtual void reap(std::vector<PyObject*>& references) noexcept = 0;

 private:
  friend class Reaper;
  Reapable* next_ = nullptr;
};

// Hands `item` to the reaper, which reaps and deletes it. Lock-free, from any thread.
void retire(Reapable* item) noexcept;
struct Retire {
  void operator()(Reapable* item) const noexcept { retire(item); }
};

// Drops one Python reference. Made where the reference is taken, for destructors (L1).
class ReferenceEnd final : public Reapable {
 public:
  explicit ReferenceEnd(PyObject* of = nullptr) : reference(of) {}
  void reap(std::vector<PyObject*>& references) noexcept override {
    if (reference != nullptr) references.push_back(reference);
  }
  PyObject* reference;
};
using Reference = std::unique_ptr<ReferenceEnd, Retire>;

// Drops a Python reference from any thread, with or without the GIL. Allocates: not for
// destructors.
inline void drop_later(PyObject* reference) noexcept {
  if (reference != nullptr) retire(new ReferenceEnd(reference));
}

// Owns one driver handle, which is freed on the reaper thread when the last owner goes; what frees
// each kind stands in the same order in reaper.cpp.
enum class ResourceKind : int { kDeviceMemory, kPinnedMemory, kEvent, kStream, kModule, kGraph };
class ResourceEnd;
class Resource {
 public:
  Resource(ResourceKind kind, std::uint64_t handle);
  ~Resource();
  std::uint64_t handle() const { return handle_; }
  // Somebody else frees the handle from now on.
  void disown() noexcept;

 private:
  const std::unique_ptr<ResourceEnd, Retire> end_;  // made here: a destructor must not allocate
  const std::uint64_t handle_;
};

// Handles owned now, and driver calls that refused to free one (the handle is then leaked).
std::int64_t live_resources();
std::int64_t failed_frees();

// Waits until everything handed over so far, and what that released in turn, is gone.
// Call without the GIL. False on timeout or from inside host work.
bool flush(double timeout_s);

// Starts the thread; called once the driver table is bound.
void start_reaper();

}  // namespace graft::hostwork
