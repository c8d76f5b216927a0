// An executable graph: launches, completion queries, updates, and destruction on the reaper thread.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "hostwork/driver.h"
#include "hostwork/reaper.h"
#include "hostwork/state.h"

namespace graft::hostwork {

using Outcome = std::pair<Result, const char*>;  // result and name of the last driver call

constexpr Result kClosed = -1;  // the executable was closed

// Destroys an executable on the reaper thread. The driver frees the executable after its launches
// in flight have ended, but does not keep the operands alive that set_kernel() has given to nodes.
// The reaper therefore waits for the launches before it releases these operands (INVARIANTS.md A3).
class ExecRelease final : public Reapable {
 public:
  explicit ExecRelease(Handle exec) : exec_(exec) {}
  void reap(std::vector<PyObject*>& references) noexcept override {
    constexpr unsigned kPollMicroseconds = 200;
    if (owners != nullptr && event != nullptr) {
      const auto handle = reinterpret_cast<Handle>(event->handle());
      while (driver().event_query(handle) == kNotReady) usleep(kPollMicroseconds);
      references.push_back(owners);
    }
    driver().graph_exec_destroy(exec_);
  }

  // Exec sets these members before it retires this object.
  PyObject* owners = nullptr;  // owners of the operands of changed nodes
  // Event that was recorded after the last launch; null if recording failed. Without the event, the
  // reaper cannot know when the launch ends, and never releases `owners`.
  std::shared_ptr<Resource> event;

 private:
  const Handle exec_;
};

// An executable graph. The driver does not synchronize calls on graph objects, so one mutex per
// executable serializes them. Its mutexes are locked without the GIL and never held while acquiring
// the GIL.
class Exec {
 public:
  // Takes ownership of both handles. `event` is recorded after each launch.
  Exec(std::uint64_t exec, std::uint64_t event, std::shared_ptr<GraphState> state)
      : exec_(reinterpret_cast<Handle>(exec)),
        release_(new ExecRelease(exec_)),
        event_(std::make_shared<Resource>(ResourceKind::kEvent, event)) {
    use_state(std::move(state));
  }
  // The destructor cannot block on a mutex that another thread held when the process forked: that
  // thread also held a reference to this object, so the destructor never runs in the child.
  ~Exec() { close(); }
  Exec(const Exec&) = delete;
  Exec& operator=(const Exec&) = delete;

  // Closes the executable. During a launch call, it is closed after the call has returned.
  void close() {
    {
      const std::lock_guard<std::mutex> lock(launch_mutex_);
      closed_ = true;
      if (launching_) return;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    release();
  }

  Outcome launch(std::uint64_t stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!begin_launch()) return {kClosed, "cuGraphLaunch"};
    const Outcome outcome = launch_and_record(reinterpret_cast<Handle>(stream));
    if (end_launch()) release();
    return outcome;
  }
  // Host work may call launches(), set_payload() and close() (INVARIANTS.md A5).
  std::int64_t launches() {
    const std::lock_guard<std::mutex> lock(launch_mutex_);
    return launches_;
  }
  // Returns kSuccess if no launch is in flight, and kNotReady otherwise. If the event of the last
  // launch could not be recorded, returns the error of cuEventRecord instead.
  Outcome query() {
    return locked("cuEventQuery", [&] {
      if (launches_ == 0 || record_failure_ != kSuccess) return record_failure_;
      return driver().event_query(event());
    });
  }
  // Returns kNotReady and the event recorded after the last launch, even if that launch has ended.
  // Later launches record other events, so a wait for this event does not include them. If there is
  // no event, returns null with kSuccess if there has been no launch, with kClosed if the
  // executable is closed, or with the error of cuEventRecord.
  std::pair<Result, std::shared_ptr<Resource>> last_launch() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (release_ == nullptr || launches_ == 0)
      return {release_ == nullptr ? kClosed : kSuccess, nullptr};
    if (record_failure_ != kSuccess) return {record_failure_, nullptr};
    event_in_use_ = true;
    return {kNotReady, event_};
  }

  Outcome upload(std::uint64_t stream) {
    return locked("cuGraphUpload",
                  [&] { return driver().graph_upload(exec_, reinterpret_cast<Handle>(stream)); });
  }
  // Updates the executable to another definition, with cuGraphExecUpdate. `graph` is the CUgraph of
  // the other definition and `state` its state, which counts the launches from now on. If the
  // driver rejects the update, `info` receives the reason and the node that caused it.
  Result update(std::uint64_t graph, std::shared_ptr<GraphState> state, UpdateInfo* info) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (release_ == nullptr) return kClosed;
    const Result result = driver().graph_exec_update(exec_, reinterpret_cast<Handle>(graph), info);
    if (result == kSuccess) use_state(std::move(state));
    return result;
  }
  // Changes a kernel node for later launches; launches in flight keep its old parameters. `params`
  // points to CUDA_KERNEL_NODE_PARAMS.
  Outcome set_kernel(std::uint64_t node, std::uint64_t params) {
    return locked("cuGraphExecKernelNodeSetParams", [&] {
      const void* structure = reinterpret_cast<const void*>(params);
      return driver().graph_exec_kernel_set(exec_, reinterpret_cast<Handle>(node), structure);
    });
  }
  Outcome set_enabled(std::uint64_t node, bool enabled) {
    return locked("cuGraphNodeSetEnabled", [&] {
      return driver().graph_node_set_enabled(exec_, reinterpret_cast<Handle>(node), enabled);
    });
  }

  // Keeps `owners`, the owners of the operands of changed nodes, alive until the executable is
  // closed and its launches have ended. Steals the reference. Called once.
  void keep(PyObject* owners) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (release_ == nullptr) {
      release_later(owners);
    } else {
      release_->owners = owners;
    }
  }
  // Sets the value of a payload for later launches. Steals the reference to `value`. Returns the
  // replaced value, which the caller then owns, or null; see PayloadCell::set().
  [[nodiscard]] PyObject* set_payload(const std::shared_ptr<PayloadCell>& cell, PyObject* value,
                                      std::uint64_t address) {
    const std::lock_guard<std::mutex> lock(launch_mutex_);
    if (launching_) set_while_launching_.push_back(cell);
    return cell->set(launches_ + (launching_ ? 2 : 1), value, address);
  }
  std::uint64_t handle() const { return reinterpret_cast<std::uint64_t>(exec_); }

 private:
  template <typename Call>
  Outcome locked(const char* name, const Call& call) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return {release_ == nullptr ? kClosed : call(), name};
  }
  Handle event() const { return reinterpret_cast<Handle>(event_->handle()); }

  // The caller of the following functions must hold `mutex_`.

  // Returns false if the executable is closed.
  bool begin_launch() {
    const std::lock_guard<std::mutex> lock(launch_mutex_);
    launching_ = !closed_;
    return launching_;
  }
  Outcome launch_and_record(Handle stream) {
    constexpr unsigned kDisableTiming = 2;  // CU_EVENT_DISABLE_TIMING
    if (event_in_use_) {
      Handle fresh = nullptr;
      const Result result = driver().event_create(&fresh, kDisableTiming);
      if (result != kSuccess) return {result, "cuEventCreate"};
      event_ =
          std::make_shared<Resource>(ResourceKind::kEvent, reinterpret_cast<std::uint64_t>(fresh));
      event_in_use_ = false;
    }
    // Wake workers and watchdog before the call: the call may not return before the replay has
    // ended, and the replay may wait for a worker's answer (INVARIANTS.md M7).
    state_->announce_launch();
    const Result result = driver().graph_launch(exec_, stream);
    if (result != kSuccess) {
      state_->cancel_launch();
      return {result, "cuGraphLaunch"};
    }
    {
      const std::lock_guard<std::mutex> lock(launch_mutex_);
      ++launches_;
      launching_ = false;
    }
    state_->confirm_launch();
    record_failure_ = driver().event_record(event(), stream);
    return {record_failure_, "cuEventRecord"};
  }
  // Returns whether the executable must be closed.
  bool end_launch() {
    const std::lock_guard<std::mutex> lock(launch_mutex_);
    if (launching_) {  // the driver has refused the launch
      for (const auto& cell : set_while_launching_) cell->bring_forward(launches_ + 1);
    }
    set_while_launching_.clear();
    launching_ = false;
    return closed_;
  }
  void release() {
    if (release_ != nullptr && record_failure_ == kSuccess) release_->event = std::move(event_);
    release_.reset();
  }
  // Sets the state that counts the launches from now on. The constructor need not hold the mutex.
  void use_state(std::shared_ptr<GraphState> state) {
    // A host step counts its runs under all executables of its graph. Adding the base to the count
    // yields the number of the replay in this executable.
    state->set_base(launches_ - state->launched());
    state_ = std::move(state);
  }

  std::mutex mutex_;
  // Guards the next four members and the order of payload values. It is never held during a driver
  // call, and may be locked while `mutex_` is held.
  std::mutex launch_mutex_;
  std::int64_t launches_ = 0;
  bool launching_ = false;  // whether a launch call is in progress
  bool closed_ = false;
  std::vector<std::shared_ptr<PayloadCell>> set_while_launching_;
  const Handle exec_;
  std::unique_ptr<ExecRelease, Retire> release_;  // null after close()
  std::shared_ptr<Resource> event_;   // event recorded after the last launch; null after close()
  bool event_in_use_ = false;         // whether a thread may be waiting for `event_`
  Result record_failure_ = kSuccess;  // result of recording the event of the last launch
  std::shared_ptr<GraphState> state_;
};

}  // namespace graft::hostwork
