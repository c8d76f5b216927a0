// The one place where things end: a thread that frees what destructors hand to it.
//
// Destructors run on driver threads, in garbage collection and inside host functions, where no
// driver call, lock or GIL may be taken. They push a node here and return.
#pragma once

#include <Python.h>

#include <cstdint>
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

// Drops one Python reference. Made where the reference is taken, for destructors (L1).
class ReferenceEnd final : public Reapable {
 public:
  void reap(std::vector<PyObject*>& references) noexcept override;
  PyObject* reference = nullptr;
};

// Hands `item` to the reaper, which reaps and deletes it. Lock-free, from any thread.
void retire(Reapable* item) noexcept;

// Waits until everything handed over so far, and what that released in turn, is gone.
// Call without the GIL. False on timeout or from inside host work.
bool flush(double timeout_s);

// Starts the thread; called once the driver table is bound.
void start_reaper();

// Items handed over and not freed because the interpreter was shutting down.
std::int64_t leaked_items();

}  // namespace graft::hostwork
