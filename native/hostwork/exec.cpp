#include "hostwork/exec.h"

#include <unistd.h>

#include <utility>

namespace graft::hostwork {

class ExecEnd final : public Reapable {
 public:
  ExecEnd(Handle exec, Handle event) : exec_(exec), event_(event) {}

  // An executable in flight is freed by the driver when its launches end; an event likewise. What
  // changed nodes use is not the driver's, so that is waited for here (L3).
  void reap(std::vector<PyObject*>& references) noexcept override {
    if (owners != nullptr) {
      while (driver().event_query(event_) == kNotReady) usleep(kPollMicroseconds);
      references.push_back(owners);
    }
    driver().graph_exec_destroy(exec_);
    driver().event_destroy(event_);
  }

  PyObject* owners = nullptr;  // set before the hand-over

 private:
  static constexpr unsigned kPollMicroseconds = 200;
  const Handle exec_;
  const Handle event_;
};

Exec::Exec(std::uint64_t exec, std::uint64_t event, std::shared_ptr<GraphState> state)
    : exec_(reinterpret_cast<Handle>(exec)),
      event_(reinterpret_cast<Handle>(event)),
      end_(new ExecEnd(exec_, event_)) {
  adopt(std::move(state));
}

Exec::~Exec() { close(); }

void Exec::close() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (end_ != nullptr) retire(end_);
  end_ = nullptr;
}

Outcome Exec::launch(std::uint64_t stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (end_ == nullptr) return {kClosed, "cuGraphLaunch"};
  const Handle on = reinterpret_cast<Handle>(stream);
  const Result result = driver().graph_launch(exec_, on);
  if (result != kSuccess) return {result, "cuGraphLaunch"};
  ++launches_;
  state_->count_launch();
  return {driver().event_record(event_, on), "cuEventRecord"};
}

Outcome Exec::upload(std::uint64_t stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (end_ == nullptr) return {kClosed, "cuGraphUpload"};
  return {driver().graph_upload(exec_, reinterpret_cast<Handle>(stream)), "cuGraphUpload"};
}

Result Exec::update(std::uint64_t graph, UpdateInfo* info) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (end_ == nullptr) return kClosed;
  return driver().graph_exec_update(exec_, reinterpret_cast<Handle>(graph), info);
}

Outcome Exec::set_node(NodeKind kind, std::uint64_t node, std::uint64_t params) {
  static constexpr const char* kNames[] = {
      "cuGraphExecKernelNodeSetParams", "cuGraphExecMemcpyNodeSetParams",
      "cuGraphExecMemsetNodeSetParams", "cuGraphExecEventRecordNodeSetEvent",
      "cuGraphExecEventWaitNodeSetEvent"};
  const char* name = kNames[static_cast<int>(kind)];
  const Driver& d = driver();
  const Handle which = reinterpret_cast<Handle>(node);
  const void* with = reinterpret_cast<const void*>(params);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (end_ == nullptr) return {kClosed, name};
  switch (kind) {
    case NodeKind::kKernel:
      return {d.graph_exec_kernel_set(exec_, which, with), name};
    case NodeKind::kCopy:
      return {d.graph_exec_memcpy_set(exec_, which, with, primary_context()), name};
    case NodeKind::kFill:
      return {d.graph_exec_memset_set(exec_, which, with, primary_context()), name};
    case NodeKind::kEventRecord:
      return {d.graph_exec_record_set(exec_, which, reinterpret_cast<Handle>(params)), name};
    case NodeKind::kEventWait:
      return {d.graph_exec_wait_set(exec_, which, reinterpret_cast<Handle>(params)), name};
  }
  return {kClosed, name};
}

Outcome Exec::set_enabled(std::uint64_t node, bool enabled) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (end_ == nullptr) return {kClosed, "cuGraphNodeSetEnabled"};
  return {driver().graph_node_set_enabled(exec_, reinterpret_cast<Handle>(node), enabled ? 1 : 0),
          "cuGraphNodeSetEnabled"};
}

Outcome Exec::get_enabled(std::uint64_t node, bool* enabled) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (end_ == nullptr) return {kClosed, "cuGraphNodeGetEnabled"};
  unsigned int value = 0;
  const Result result =
      driver().graph_node_get_enabled(exec_, reinterpret_cast<Handle>(node), &value);
  *enabled = value != 0;
  return {result, "cuGraphNodeGetEnabled"};
}

void Exec::keep(PyObject* owners) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (end_ == nullptr || end_->owners != nullptr) {
    drop_later(owners);
  } else {
    end_->owners = owners;
  }
}

PyObject* Exec::set_payload(PayloadCell& cell, PyObject* value, std::uint64_t address) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return cell.set(launches_ + 1, value, address);
}

Outcome Exec::query() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (end_ == nullptr) return {kClosed, "cuEventQuery"};
  if (launches_ == 0) return {kSuccess, "cuEventQuery"};
  return {driver().event_query(event_), "cuEventQuery"};
}

void Exec::adopt(std::shared_ptr<GraphState> state) {
  const std::lock_guard<std::mutex> lock(mutex_);
  // Records count every run of theirs, also those under an earlier executable.
  state->set_base(launches_ - state->launched());
  state_ = std::move(state);
}

std::int64_t Exec::launches() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return launches_;
}

}  // namespace graft::hostwork
