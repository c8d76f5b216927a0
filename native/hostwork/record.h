// Records: the immutable data a graph node or an eager host function carries a pointer to.
//
// INVARIANTS.md states the rules: R1 to R5, E1 to E3.
#pragma once

#include <Python.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "hostwork/driver.h"
#include "hostwork/reaper.h"
#include "hostwork/state.h"

namespace graft::hostwork {

// Keeps Python objects alive for as long as the driver may use what they own.
class Record : public Reapable {
 public:
  // Takes a new reference to `keep` (GIL held).
  explicit Record(PyObject* keep);
  ~Record() override;
  void reap(std::vector<PyObject*>& references) noexcept override;

 private:
  PyObject* const keep_;
};

// A Python callable with its arguments, or a native function with its data.
struct Work {
  PyObject* callable = nullptr;
  PyObject* arguments = nullptr;
  HostFunction function = nullptr;
  void* data = nullptr;
};

class HostRecord : public Record {
 public:
  // Takes new references, like Record.
  HostRecord(std::string name, const Work& work, PyObject* keep);

  // The work then gets the cell's payload of its replay: native work instead of its data, Python
  // work before its arguments.
  void set_cell(std::shared_ptr<PayloadCell> cell) { cell_ = std::move(cell); }
  void set_state(std::shared_ptr<GraphState> state) { state_ = std::move(state); }
  const std::string& name() const { return name_; }
  void reap(std::vector<PyObject*>& references) noexcept override;

  // One run of the work. Nothing escapes: failures go to the state or, for eager work, to the error
  // list of the stream.
  void run() noexcept;
  // The same for replay `replay`, which the caller counts.
  void run_as(std::int64_t replay) noexcept;

  // Reports a failure of the current run. Takes ownership of `exception`.
  void fail(StatusCode code, std::int64_t replay, PyObject* exception, std::string message);

 protected:
  virtual void fail_eager(Failure failure) { drop_later(failure.exception); }

 private:
  void run_python(std::int64_t replay);  // python_step.cpp

  const std::string name_;
  const Work work_;
  std::shared_ptr<PayloadCell> cell_;
  std::shared_ptr<GraphState> state_;  // null: eager
  std::atomic<std::int64_t> runs_{0};  // written only by the run itself
};

// The function a host node carries; `data` is its HostRecord.
void run_host_record(void* data);

// For native work: the number of the replay that is running on this thread, from 1; 0 in eager work
// or outside of host work. No GIL, no allocation.
std::int64_t current_replay();
// Fails that replay: its later host steps stand down, and the host is told by the next launch(),
// check() or synchronize(). No effect outside of host work.
void fail_current(const char* message);

struct Attached {
  Result result;
  const char* api;  // the call that failed
  Handle object;    // the user object, for detach()
};

// Gives `record` to `graph` through a user object: it is retired when the last of the graph, its
// executables, clones and launches in flight is gone. Consumes the record also on failure.
// Called without the GIL, before the node is added.
Attached attach(Handle graph, Record* record);
// Undoes attach() when adding the node failed.
Result detach(Handle graph, Handle object);

std::int64_t live_records();
std::int64_t released_records();

// Host work that is running now, for reports about what is stuck.
struct Running {
  const HostRecord* record;
  std::string node;
  std::int64_t replay;
  double seconds;
  std::uint64_t thread;  // threading.get_ident() of the thread
  int tid;               // and the kernel's number of it
};
std::vector<Running> running_host_work();

}  // namespace graft::hostwork
