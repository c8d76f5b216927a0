// One executable graph: launches in order, knows when it is idle, dies on the reaper thread.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#include "hostwork/driver.h"
#include "hostwork/reaper.h"
#include "hostwork/state.h"

namespace graft::hostwork {

using Outcome = std::pair<Result, const char*>;  // and the call that was made last

constexpr Result kClosed = -1;  // the executable was closed

// An executable in flight is freed by the driver when its launches end; an event likewise. What
// changed nodes use is not the driver's, so that is waited for here (L3).
class ExecEnd final : public Reapable {
 public:
  explicit ExecEnd(Handle exec) : exec_(exec) {}
  void reap(std::vector<PyObject*>& references) noexcept override {
    constexpr unsigned kPollMicroseconds = 200;
    if (owners != nullptr) {
      const auto handle = reinterpret_cast<Handle>(event->handle());
      while (driver().event_query(handle) == kNotReady) usleep(kPollMicroseconds);
      references.push_back(owners);
    }
    driver().graph_exec_destroy(exec_);
  }

  PyObject* owners = nullptr;       // set before the hand-over, as the next
  std::shared_ptr<Resource> event;  // behind the last launch

 private:
  const Handle exec_;
};

// The driver does not synchronise graph objects internally: one mutex per executable serialises
// its calls. It is taken without the GIL and never held while taking the GIL.
class Exec {
 public:
  // Owns both handles. `event` is recorded after each launch.
  Exec(std::uint64_t exec, std::uint64_t event, std::shared_ptr<GraphState> state)
      : exec_(reinterpret_cast<Handle>(exec)),
        end_(new ExecEnd(exec_)),
        event_(std::make_shared<Resource>(ResourceKind::kEvent, event)) {
    adopt(std::move(state));
  }
  ~Exec() { close(); }
  Exec(const Exec&) = delete;
  Exec& operator=(const Exec&) = delete;

  void close() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (end_ != nullptr) end_->event = std::move(event_);
    end_.reset();
  }

  Outcome launch(std::uint64_t stream) {
    constexpr unsigned kDisableTiming = 2;  // CU_EVENT_DISABLE_TIMING
    const std::lock_guard<std::mutex> lock(mutex_);
    if (end_ == nullptr) return {kClosed, "cuGraphLaunch"};
    if (waited_for_) {
      Handle fresh = nullptr;
      const Result result = driver().event_create(&fresh, kDisableTiming);
      if (result != kSuccess) return {result, "cuEventCreate"};
      event_ =
          std::make_shared<Resource>(ResourceKind::kEvent, reinterpret_cast<std::uint64_t>(fresh));
      waited_for_ = false;
    }
    const Handle on = reinterpret_cast<Handle>(stream);
    const Result result = driver().graph_launch(exec_, on);
    if (result != kSuccess) return {result, "cuGraphLaunch"};
    ++launches_;
    state_->count_launch();
    return {driver().event_record(event(), on), "cuEventRecord"};
  }
  std::int64_t launches() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return launches_;
  }
  // Success when no launch is in flight, kNotReady otherwise.
  Outcome query() {
    return locked("cuEventQuery",
                  [&] { return launches_ == 0 ? kSuccess : driver().event_query(event()); });
  }
  // The event behind what was launched so far: later launches record another one, so that who waits
  // for it waits for no launch of others. Null, and how such a wait ends, where there is none.
  std::pair<Result, std::shared_ptr<Resource>> launched_so_far() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (end_ == nullptr || launches_ == 0) return {end_ == nullptr ? kClosed : kSuccess, nullptr};
    waited_for_ = true;
    return {kNotReady, event_};
  }

  Outcome upload(std::uint64_t stream) {
    return locked("cuGraphUpload",
                  [&] { return driver().graph_upload(exec_, reinterpret_cast<Handle>(stream)); });
  }
  // cuGraphExecUpdate; `info` says which node is to blame when it fails. Launches from now on count
  // in `state`, the other definition's.
  Result update(std::uint64_t graph, std::shared_ptr<GraphState> state, UpdateInfo* info) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (end_ == nullptr) return kClosed;
    const Result result = driver().graph_exec_update(exec_, reinterpret_cast<Handle>(graph), info);
    if (result == kSuccess) adopt(std::move(state));
    return result;
  }
  // Changes a kernel node for later launches; launches in flight keep what they had. `params` is
  // the driver's structure.
  Outcome set_kernel(std::uint64_t node, std::uint64_t params) {
    return locked("cuGraphExecKernelNodeSetParams", [&] {
      const void* with = reinterpret_cast<const void*>(params);
      return driver().graph_exec_kernel_set(exec_, reinterpret_cast<Handle>(node), with);
    });
  }
  Outcome set_enabled(std::uint64_t node, bool enabled) {
    return locked("cuGraphNodeSetEnabled", [&] {
      return driver().graph_node_set_enabled(exec_, reinterpret_cast<Handle>(node), enabled);
    });
  }

  // Keeps what changed nodes use until the launches in flight have ended. Takes over a reference;
  // called once.
  void keep(PyObject* owners) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (end_ == nullptr) {
      drop_later(owners);
    } else {
      end_->owners = owners;
    }
  }
  // The value that launches from now on see. Takes over a reference, and may give one back.
  [[nodiscard]] PyObject* set_payload(PayloadCell& cell, PyObject* value, std::uint64_t address) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return cell.set(launches_ + 1, value, address);
  }
  std::uint64_t handle() const { return reinterpret_cast<std::uint64_t>(exec_); }

 private:
  template <typename Call>
  Outcome locked(const char* name, const Call& call) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return {end_ == nullptr ? kClosed : call(), name};
  }
  Handle event() const { return reinterpret_cast<Handle>(event_->handle()); }
  // The mutex is held, or nobody else knows this yet.
  void adopt(std::shared_ptr<GraphState> state) {
    // Records count every run of theirs, also those under an earlier executable.
    state->set_base(launches_ - state->launched());
    state_ = std::move(state);
  }

  std::mutex mutex_;
  const Handle exec_;
  std::unique_ptr<ExecEnd, Retire> end_;  // null once closed
  std::shared_ptr<Resource> event_;       // behind the last launch; null once closed
  bool waited_for_ = false;               // is somebody waiting for that event?
  std::shared_ptr<GraphState> state_;
  std::int64_t launches_ = 0;
};

}  // namespace graft::hostwork
