// The reaper: a thread that frees driver resources and Python references on behalf of destructors.
//
// Destructors run on driver threads, in garbage collection and inside host functions. There they
// must not call the driver or acquire a lock or the GIL. They retire an object instead, that is,
// they push it to the reaper's list.
#pragma once

#include <Python.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace graft::hostwork {

// Base class of objects that the reaper processes. Such an object is allocated together with the
// resource that it releases, so that the destructor of the resource allocates nothing.
class Reapable {
 public:
  virtual ~Reapable() = default;
  // Releases the resource. Called on the reaper thread without the GIL; may call the driver. Python
  // references are not released here but appended to `references`. The reaper releases them
  // afterwards, together with those of other objects, under one acquisition of the GIL.
  virtual void reap(std::vector<PyObject*>& references) noexcept = 0;
  // Returns whether device work that was enqueued before retire() may use the resource. The reaper
  // then calls reap() only after this work has ended (INVARIANTS.md L8).
  virtual bool used_by_device() const noexcept { return false; }

 private:
  friend class Reaper;
  Reapable* next_ = nullptr;
};

// Passes `item` to the reaper, which calls reap() and deletes it. Lock-free; any thread may call
// it.
void retire(Reapable* item) noexcept;
// Deleter for std::unique_ptr that passes the object to the reaper.
struct Retire {
  void operator()(Reapable* item) const noexcept { retire(item); }
};

// Releases one Python reference on the reaper thread. For use in destructors, it is allocated in
// advance, when the owner of the reference is created (INVARIANTS.md L1).
class ReferenceRelease final : public Reapable {
 public:
  explicit ReferenceRelease(PyObject* object = nullptr) : reference(object) {}
  void reap(std::vector<PyObject*>& references) noexcept override {
    if (reference != nullptr) references.push_back(reference);
  }
  PyObject* reference;
};
using Reference = std::unique_ptr<ReferenceRelease, Retire>;

// Lets the reaper release a Python reference. May be called on any thread, with or without the GIL.
// It allocates memory and must therefore not be called by destructors.
inline void release_later(PyObject* reference) noexcept {
  if (reference != nullptr) retire(new ReferenceRelease(reference));
}

// Kinds of driver handles. The functions that free them are listed in the same order in reaper.cpp.
enum class ResourceKind : int { kDeviceMemory, kPinnedMemory, kEvent, kStream, kModule, kGraph };
class ResourceRelease;
// Owns one driver handle. The destructor lets the reaper free the handle.
class Resource {
 public:
  Resource(ResourceKind kind, std::uint64_t handle);
  ~Resource();
  std::uint64_t handle() const { return handle_; }
  // Gives up ownership, so that the destructor does not free the handle.
  void disown() noexcept;

 private:
  // The item that the destructor passes to the reaper. The constructor allocates it, because a
  // destructor must not allocate.
  const std::unique_ptr<ResourceRelease, Retire> release_;
  const std::uint64_t handle_;
};

// Returns the number of driver handles that were not freed yet.
std::int64_t live_resources();
// Returns the number of handles that the driver failed to free and that are leaked.
std::int64_t failed_frees();

// Waits until the reaper has processed all retired objects, including those that are retired while
// it processes others. The caller must not hold the GIL. Returns false on timeout, inside host
// work, while objects wait for the end of a stream capture (INVARIANTS.md L8), and after Python has
// begun to exit (gate.h).
bool flush(double timeout_s);

// Lets the reaper query graft's streams. If the context has a fault, it calls abandon_mailboxes().
// A worker cannot query the streams itself, because a driver call may wait until the device has
// finished work that waits for the worker. Lock-free; any thread may call it.
void check_device() noexcept;

// Starts the reaper thread. Called once, after bind_driver().
void start_reaper();

}  // namespace graft::hostwork
