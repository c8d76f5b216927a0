#include "hostwork/exec.h"

#include <utility>

namespace graft::hostwork {

class ExecEnd final : public Reapable {
 public:
  ExecEnd(Handle exec, Handle event) : exec_(exec), event_(event) {}

  // An executable in flight is freed by the driver when its launches end; an event likewise.
  void reap(std::vector<PyObject*>&) noexcept override {
    driver().graph_exec_destroy(exec_);
    driver().event_destroy(event_);
  }

 private:
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
