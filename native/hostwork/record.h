// Records: the immutable data that a graph node or an eager host function points to.
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

// Keeps Python objects alive as long as the driver may use the resources that they own.
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

  // Passes the cell's value for the replay to the work: Python work receives it before its
  // arguments, native work in place of its data.
  void set_cell(std::shared_ptr<PayloadCell> cell) { cell_ = std::move(cell); }
  void set_state(std::shared_ptr<GraphState> state) { state_ = std::move(state); }
  const std::string& name() const { return name_; }
  void reap(std::vector<PyObject*>& references) noexcept override;

  // Runs the work once. Nothing is thrown: failures are stored in the state or, for eager work, in
  // the list of the stream.
  void run() noexcept;
  // Runs the work for a replay that the caller counts.
  void run_as(std::int64_t replay) noexcept;

  // Reports a failure of the current run. Takes ownership of `exception`.
  void fail(StatusCode code, std::int64_t replay, PyObject* exception, std::string message);

 protected:
  virtual void fail_eager(Failure failure) { release_later(failure.exception); }

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

// For native work: returns the number of the replay that runs on this thread, from 1; 0 in eager
// work or outside host work. No GIL, no allocation.
std::int64_t current_replay();
// For native work: fails that replay. Its later host steps are skipped, and the next launch(),
// check() or synchronize() raises the error. No effect outside host work.
void fail_current(const char* message);

struct Attached {
  Result result;
  const char* api;  // driver function that failed
  Handle object;    // user object, for detach()
};

// Retains `record` on `graph` through a user object. The record is retired when the graph, its
// executables, clones and launches in flight are all gone. Consumes the record also on failure.
// Called without the GIL, before the node is added.
Attached attach(Handle graph, Record* record);
// Reverts attach() after the node could not be added.
Result detach(Handle graph, Handle object);

std::int64_t live_records();
std::int64_t released_records();

// A host function that is running now, for reports about exceeded deadlines.
struct RunningHostWork {
  const HostRecord* record;
  std::string node;
  std::int64_t replay;
  double seconds;
  std::uint64_t thread;  // threading.get_ident() of the thread
  int tid;               // its kernel thread id
};
std::vector<RunningHostWork> running_host_work();

}  // namespace graft::hostwork
