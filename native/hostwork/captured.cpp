#include "hostwork/captured.h"

#include <deque>
#include <map>
#include <mutex>
#include <utility>

namespace graft::hostwork {
namespace {

struct Known {
  std::uint64_t id;
  std::weak_ptr<GraphState> state;
};

// Leaked on purpose: driver threads may still use it while static objects are being destroyed.
struct Captures {
  std::mutex mutex;  // never held while taking the GIL or calling the driver
  std::map<Handle, Known> graphs;
  std::deque<std::weak_ptr<GraphState>> failed;
};
Captures& captures() {
  static Captures* const instance = new Captures;
  return *instance;
}

// A driver uses a handle again, so graphs that are gone are forgotten now and then.
void sweep(Captures& c) {
  for (auto it = c.graphs.begin(); it != c.graphs.end();) {
    it = it->second.state.expired() ? c.graphs.erase(it) : std::next(it);
  }
}

void note_failure(GraphState& state) {
  const std::lock_guard<std::mutex> lock(captures().mutex);
  captures().failed.push_back(state.weak_from_this());
}

}  // namespace

Result capture_info(std::uint64_t stream, CaptureInfo* out) {
  return driver().stream_get_capture_info(reinterpret_cast<Handle>(stream), &out->status, &out->id,
                                          &out->graph, nullptr, nullptr, nullptr);
}

std::shared_ptr<GraphState> capture_state(const CaptureInfo& capture) {
  Captures& c = captures();
  const std::lock_guard<std::mutex> lock(c.mutex);
  auto found = c.graphs.find(capture.graph);
  if (found != c.graphs.end() && found->second.id == capture.id) {
    if (std::shared_ptr<GraphState> state = found->second.state.lock()) return state;
  }
  if (c.graphs.size() >= 64) sweep(c);
  auto state = std::make_shared<GraphState>(nullptr);
  state->report_to(note_failure);
  c.graphs[capture.graph] = Known{capture.id, state};
  return state;
}

Attached launch_captured(std::uint64_t stream, const CaptureInfo& capture, HostRecord* record,
                         bool spin) {
  const Attached attached = attach(capture.graph, record);
  if (attached.result != kSuccess) return attached;
  const Handle on = reinterpret_cast<Handle>(stream);
  const Result result = launch_host(on, &run_host_record, record, spin);
  if (result == kSuccess) return attached;
  detach(capture.graph, attached.object);
  return {result, "cuLaunchHostFunc", nullptr};
}

bool take_captured_failure(Failure* out) {
  for (;;) {
    std::shared_ptr<GraphState> state;
    {
      const std::lock_guard<std::mutex> lock(captures().mutex);
      if (captures().failed.empty()) return false;
      state = captures().failed.front().lock();
      captures().failed.pop_front();
    }
    if (state == nullptr || !state->pending(out)) continue;
    state->clear();
    return true;
  }
}

}  // namespace graft::hostwork
