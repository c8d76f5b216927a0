#include "hostwork/exec.h"

#include <unistd.h>

#include <utility>

namespace graft::hostwork {

class ExecEnd final : public Reapable {
 public:
  explicit ExecEnd(Handle exec) : exec_(exec) {}

  // An executable in flight is freed by the driver when its launches end; an event likewise. What
  // changed nodes use is not the driver's, so that is waited for here (L3).
  void reap(std::vector<PyObject*>& references) noexcept override {
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
  static constexpr unsigned kPollMicroseconds = 200;
  const Handle exec_;
};

Exec::Exec(std::uint64_t exec, std::uint64_t event, std::shared_ptr<GraphState> state)
    : exec_(reinterpret_cast<Handle>(exec)),
      end_(new ExecEnd(exec_)),
      event_(std::make_shared<Resource>(ResourceKind::kEvent, event)) {
  adopt(std::move(state));
}

Exec::~Exec() { close(); }

void Exec::close() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (end_ == nullptr) return;
  end_->event = std::move(event_);
  retire(end_);
  end_ = nullptr;
}

Outcome Exec::launch(std::uint64_t stream) {
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
  return {driver().event_record(reinterpret_cast<Handle>(event_->handle()), on), "cuEventRecord"};
}

std::shared_ptr<Resource> Exec::launched_so_far() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (end_ == nullptr || launches_ == 0) return nullptr;
  waited_for_ = true;
  return event_;
}

bool Exec::closed() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return end_ == nullptr;
}

Outcome Exec::upload(std::uint64_t stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (end_ == nullptr) return {kClosed, "cuGraphUpload"};
  return {driver().graph_upload(exec_, reinterpret_cast<Handle>(stream)), "cuGraphUpload"};
}

Result Exec::update(std::uint64_t graph, std::shared_ptr<GraphState> state, UpdateInfo* info) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (end_ == nullptr) return kClosed;
  const Result result = driver().graph_exec_update(exec_, reinterpret_cast<Handle>(graph), info);
  if (result == kSuccess) adopt(std::move(state));
  return result;
}

Outcome Exec::set_kernel(std::uint64_t node, std::uint64_t params) {
  constexpr const char* kName = "cuGraphExecKernelNodeSetParams";
  const std::lock_guard<std::mutex> lock(mutex_);
  if (end_ == nullptr) return {kClosed, kName};
  const void* with = reinterpret_cast<const void*>(params);
  return {driver().graph_exec_kernel_set(exec_, reinterpret_cast<Handle>(node), with), kName};
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
  return {driver().event_query(reinterpret_cast<Handle>(event_->handle())), "cuEventQuery"};
}

// The mutex is held, or nobody else knows this yet.
void Exec::adopt(std::shared_ptr<GraphState> state) {
  // Records count every run of theirs, also those under an earlier executable.
  state->set_base(launches_ - state->launched());
  state_ = std::move(state);
}

std::int64_t Exec::launches() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return launches_;
}

}  // namespace graft::hostwork
