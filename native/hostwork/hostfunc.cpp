#include "hostwork/hostfunc.h"

#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <utility>

namespace graft::hostwork {
namespace {

constexpr std::size_t kCapturedLimit = 64;

struct CapturedGraph {
  std::uint64_t id;
  std::weak_ptr<GraphState> state;
};

// Records of eager work (host work on a stream) that have not run yet, captured graphs, and
// failures of both that were not raised yet. The only object of this type is leaked on purpose,
// because driver threads may use it while static objects are being destroyed.
struct EnqueuedWork {
  std::mutex mutex;  // is never held while acquiring the GIL or calling the driver
  std::set<EagerRecord*> pending;
  std::map<std::uint64_t, std::deque<Failure>> failures;  // failures of eager work, by stream
  std::map<Handle, CapturedGraph> captured;               // captured graphs, by CUgraph
  std::deque<std::weak_ptr<GraphState>> failed;           // states of captured graphs that failed
};
EnqueuedWork& enqueued_work = *new EnqueuedWork;

Result launch_host(std::uint64_t stream, HostFunction fn, HostRecord* record, bool spin) {
  constexpr Result kNotSupported = 801;  // CUDA_ERROR_NOT_SUPPORTED
  constexpr unsigned int kSpinWait = 1;  // CU_HOST_TASK_SPINWAIT
  const Driver& d = driver();
  const Handle target = reinterpret_cast<Handle>(stream);
  if (!spin) return d.launch_host_func(target, fn, record);
  if (d.launch_host_func_v2 == nullptr) return kNotSupported;
  return d.launch_host_func_v2(target, fn, record, kSpinWait);
}

void unregister(EagerRecord* record) {
  const std::lock_guard<std::mutex> lock(enqueued_work.mutex);
  enqueued_work.pending.erase(record);
}

// Releases the Python references of a record that the driver will never run (see abandon_eager),
// but not the record itself.
class AbandonedRelease final : public Reapable {
 public:
  explicit AbandonedRelease(EagerRecord* record) : record_(record) {}
  void reap(std::vector<PyObject*>& references) noexcept override { record_->reap(references); }

 private:
  EagerRecord* const record_;
};

void register_failed_state(GraphState& state) {
  const std::lock_guard<std::mutex> lock(enqueued_work.mutex);
  enqueued_work.failed.push_back(state.weak_from_this());
}

}  // namespace

void EagerRecord::entry(void* data) {
  auto* record = static_cast<EagerRecord*>(static_cast<HostRecord*>(data));
  if (record->claimed_.exchange(true)) return;  // the record was abandoned
  record->run();
  unregister(record);
  retire(record);
}

Result EagerRecord::launch(std::uint64_t stream, bool spin) {
  stream_ = stream;
  {
    const std::lock_guard<std::mutex> lock(enqueued_work.mutex);
    enqueued_work.pending.insert(this);
  }
  // If the launch succeeds, the record may run and be deleted before the driver call returns, so it
  // must not be used afterwards.
  const Result result = launch_host(stream, &EagerRecord::entry, this, spin);
  if (result != kSuccess) {
    unregister(this);
    retire(this);
  }
  return result;
}

void EagerRecord::fail_eager(Failure failure) {
  const std::lock_guard<std::mutex> lock(enqueued_work.mutex);
  enqueued_work.failures[stream_].push_back(std::move(failure));
}

bool take_eager_failure(std::uint64_t stream, Failure* out) {
  const std::lock_guard<std::mutex> lock(enqueued_work.mutex);
  const auto found = enqueued_work.failures.find(stream);
  if (found == enqueued_work.failures.end()) return false;
  *out = std::move(found->second.front());
  found->second.pop_front();
  if (found->second.empty()) enqueued_work.failures.erase(found);
  return true;
}

std::vector<Failure> take_eager_failures() {
  std::vector<Failure> out;
  const std::lock_guard<std::mutex> lock(enqueued_work.mutex);
  for (auto& [stream, failures] : enqueued_work.failures) {
    for (Failure& failure : failures) out.push_back(std::move(failure));
  }
  enqueued_work.failures.clear();
  return out;
}

void abandon_eager() {
  const std::lock_guard<std::mutex> lock(enqueued_work.mutex);
  for (EagerRecord* record : enqueued_work.pending) {
    if (!record->claimed_.exchange(true)) retire(new AbandonedRelease(record));
  }
  enqueued_work.pending.clear();
}

Result capture_info(std::uint64_t stream, CaptureInfo* out) {
  return driver().stream_get_capture_info(reinterpret_cast<Handle>(stream), &out->status, &out->id,
                                          &out->graph, nullptr, nullptr, nullptr);
}

std::shared_ptr<GraphState> capture_state(const CaptureInfo& capture) {
  const std::lock_guard<std::mutex> lock(enqueued_work.mutex);
  auto& captured = enqueued_work.captured;
  const auto found = captured.find(capture.graph);
  if (found != captured.end() && found->second.id == capture.id) {
    if (std::shared_ptr<GraphState> state = found->second.state.lock()) return state;
  }
  // Entries of destroyed graphs are removed only when the table has become large, so that most
  // calls need not search it.
  if (captured.size() >= kCapturedLimit) {
    for (auto it = captured.begin(); it != captured.end();) {
      it = it->second.state.expired() ? captured.erase(it) : std::next(it);
    }
  }
  auto state = std::make_shared<GraphState>(nullptr);
  state->set_failure_callback(register_failed_state);
  captured[capture.graph] = CapturedGraph{capture.id, state};
  return state;
}

Attached launch_captured(std::uint64_t stream, const CaptureInfo& capture, HostRecord* record,
                         bool spin) {
  const Attached attached = attach(capture.graph, record);
  if (attached.result != kSuccess) return attached;
  const Result result = launch_host(stream, &run_host_record, record, spin);
  if (result == kSuccess) return attached;
  detach(capture.graph, attached.object);
  return {result, "cuLaunchHostFunc", nullptr};
}

bool take_captured_failure(Failure* out) {
  for (;;) {
    std::shared_ptr<GraphState> state;
    {
      const std::lock_guard<std::mutex> lock(enqueued_work.mutex);
      if (enqueued_work.failed.empty()) return false;
      state = enqueued_work.failed.front().lock();
      enqueued_work.failed.pop_front();
    }
    if (state == nullptr || !state->pending(out)) continue;
    state->clear();
    return true;
  }
}

}  // namespace graft::hostwork
