#include "hostwork/hostfunc.h"

#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <utility>

namespace graft::hostwork {
namespace {

struct Known {
  std::uint64_t id;
  std::weak_ptr<GraphState> state;
};

// Leaked on purpose: driver threads may still use it while static objects are being destroyed.
struct Enqueued {
  std::mutex mutex;  // never held while taking the GIL or calling the driver
  std::set<EagerRecord*> pending;
  std::map<std::uint64_t, std::deque<Failure>> failures;  // of eager work, by stream
  std::map<Handle, Known> captured;                       // by graph
  std::deque<std::weak_ptr<GraphState>> failed;
};
Enqueued& enqueued = *new Enqueued;

Result launch_host(std::uint64_t stream, HostFunction fn, HostRecord* record, bool spin) {
  constexpr Result kNotSupported = 801;  // CUDA_ERROR_NOT_SUPPORTED
  constexpr unsigned int kSpinWait = 1;  // CU_HOST_TASK_SPINWAIT
  const Driver& d = driver();
  const Handle on = reinterpret_cast<Handle>(stream);
  if (!spin) return d.launch_host_func(on, fn, record);
  if (d.launch_host_func_v2 == nullptr) return kNotSupported;
  return d.launch_host_func_v2(on, fn, record, kSpinWait);
}

void forget(EagerRecord* record) {
  const std::lock_guard<std::mutex> lock(enqueued.mutex);
  enqueued.pending.erase(record);
}

// Releases what an abandoned record refers to, but not the record.
class AbandonedEnd final : public Reapable {
 public:
  explicit AbandonedEnd(EagerRecord* record) : record_(record) {}
  void reap(std::vector<PyObject*>& references) noexcept override { record_->reap(references); }

 private:
  EagerRecord* const record_;
};

void note_failure(GraphState& state) {
  const std::lock_guard<std::mutex> lock(enqueued.mutex);
  enqueued.failed.push_back(state.weak_from_this());
}

}  // namespace

void EagerRecord::entry(void* data) {
  auto* record = static_cast<EagerRecord*>(static_cast<HostRecord*>(data));
  if (record->taken_.exchange(true)) return;  // abandoned before
  record->run();
  forget(record);
  retire(record);
}

Result EagerRecord::launch(std::uint64_t stream, bool spin) {
  stream_ = stream;
  {
    const std::lock_guard<std::mutex> lock(enqueued.mutex);
    enqueued.pending.insert(this);
  }
  // From here on the record may run, and be gone, before the call returns.
  const Result result = launch_host(stream, &EagerRecord::entry, this, spin);
  if (result != kSuccess) {
    forget(this);
    retire(this);
  }
  return result;
}

void EagerRecord::fail_eager(Failure failure) {
  const std::lock_guard<std::mutex> lock(enqueued.mutex);
  enqueued.failures[stream_].push_back(std::move(failure));
}

bool take_eager_failure(std::uint64_t stream, Failure* out) {
  const std::lock_guard<std::mutex> lock(enqueued.mutex);
  const auto found = enqueued.failures.find(stream);
  if (found == enqueued.failures.end()) return false;
  *out = std::move(found->second.front());
  found->second.pop_front();
  if (found->second.empty()) enqueued.failures.erase(found);
  return true;
}

std::vector<Failure> take_eager_failures() {
  std::vector<Failure> out;
  const std::lock_guard<std::mutex> lock(enqueued.mutex);
  for (auto& [stream, failures] : enqueued.failures) {
    for (Failure& failure : failures) out.push_back(std::move(failure));
  }
  enqueued.failures.clear();
  return out;
}

void abandon_eager() {
  const std::lock_guard<std::mutex> lock(enqueued.mutex);
  for (EagerRecord* record : enqueued.pending) {
    if (!record->taken_.exchange(true)) retire(new AbandonedEnd(record));
  }
  enqueued.pending.clear();
}

Result capture_info(std::uint64_t stream, CaptureInfo* out) {
  return driver().stream_get_capture_info(reinterpret_cast<Handle>(stream), &out->status, &out->id,
                                          &out->graph, nullptr, nullptr, nullptr);
}

std::shared_ptr<GraphState> capture_state(const CaptureInfo& capture) {
  const std::lock_guard<std::mutex> lock(enqueued.mutex);
  auto& captured = enqueued.captured;
  const auto found = captured.find(capture.graph);
  if (found != captured.end() && found->second.id == capture.id) {
    if (std::shared_ptr<GraphState> state = found->second.state.lock()) return state;
  }
  // A driver uses a handle again, so graphs that are gone are forgotten now and then.
  if (captured.size() >= 64) {
    for (auto it = captured.begin(); it != captured.end();) {
      it = it->second.state.expired() ? captured.erase(it) : std::next(it);
    }
  }
  auto state = std::make_shared<GraphState>(nullptr);
  state->report_to(note_failure);
  captured[capture.graph] = Known{capture.id, state};
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
      const std::lock_guard<std::mutex> lock(enqueued.mutex);
      if (enqueued.failed.empty()) return false;
      state = enqueued.failed.front().lock();
      enqueued.failed.pop_front();
    }
    if (state == nullptr || !state->pending(out)) continue;
    state->clear();
    return true;
  }
}

}  // namespace graft::hostwork
