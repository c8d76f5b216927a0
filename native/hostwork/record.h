// Records: the objects that the driver passes to host functions. A record holds the work and keeps
// everything alive that the work uses. Eager records belong to work that is enqueued on a stream
// and runs once. The other records belong to nodes of graphs.
//
// INVARIANTS.md states the rules R1 to R5 and E1 to E3 for them.
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
  // Takes a new reference to `keep`. The caller must hold the GIL.
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

// A record of host work.
class HostRecord : public Record {
 public:
  // Takes new references to the objects in `work` and to `keep`. The caller must hold the GIL.
  HostRecord(std::string name, const Work& work, PyObject* keep);

  // Sets a payload, whose value for the replay is passed to the work. Python work receives it
  // before its arguments, native work in place of its data.
  void set_cell(std::shared_ptr<PayloadCell> cell) { cell_ = std::move(cell); }
  void set_state(std::shared_ptr<GraphState> state) { state_ = std::move(state); }
  const std::string& name() const { return name_; }
  void reap(std::vector<PyObject*>& references) noexcept override;

  // Runs the work once and counts the run. Failures are stored in the state of the graph or, for
  // work that was enqueued on a stream, in the stream's list of failures.
  void run() noexcept;
  // Runs the work for a replay whose number the caller knows. Unlike run(), which derives the
  // number of the replay from the count of runs, this function does not count the run.
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
  std::shared_ptr<GraphState> state_;  // null: work on a stream, without a graph
  std::atomic<std::int64_t> runs_{0};  // written only by the run itself
};

// The function that the driver calls for every host node (the trampoline). `data` is the HostRecord
// of the node.
void run_host_record(void* data);

// Returns the number of the replay whose host work runs on this thread, from 1; 0 in work that was
// enqueued on a stream and outside host work. For native work; needs no GIL and allocates nothing.
std::int64_t current_replay();
// Fails the replay whose host work runs on this thread. The replay's later host steps are skipped,
// and the next launch(), check() or synchronize() raises the error. For native work; no effect
// outside host work.
void fail_current(const char* message);

// Result of attach().
struct Attached {
  Result result;
  const char* api;  // driver function that failed
  Handle object;    // user object, for detach()
};

// Creates a CUDA user object that owns `record` and retains it on `graph`. The record is passed to
// the reaper after the graph, its clones, its executables and all launches in flight are gone. If
// this function fails, it passes the record to the reaper itself, so the caller never frees it.
// Called before the node is added; the caller must not hold the GIL.
Attached attach(Handle graph, Record* record);
// Reverts attach() after the node could not be added.
Result detach(Handle graph, Handle object);

std::int64_t live_records();
std::int64_t released_records();

// A host step that is running now, for reports about exceeded deadlines.
struct RunningHostWork {
  const HostRecord* record;
  std::string node;
  std::int64_t replay;
  double seconds;        // time since the step began
  std::uint64_t thread;  // threading.get_ident() of the thread that runs the step
  int tid;               // Linux thread id of that thread
};
std::vector<RunningHostWork> running_host_work();

}  // namespace graft::hostwork
