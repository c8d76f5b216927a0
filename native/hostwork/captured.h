// Host functions enqueued on a stream that captures a graph, whoever began the capture.
#pragma once

#include <cstdint>
#include <memory>

#include "hostwork/record.h"

namespace graft::hostwork {

enum CaptureStatus : int { kNotCapturing = 0, kCapturing = 1, kCaptureInvalid = 2 };

struct CaptureInfo {
  int status = kNotCapturing;
  std::uint64_t id = 0;
  Handle graph = nullptr;  // the graph being captured into, while kCapturing
};
Result capture_info(std::uint64_t stream, CaptureInfo* out);

// The state that all host functions of one capture share. It lives as long as their records.
std::shared_ptr<GraphState> capture_state(const CaptureInfo& capture);

// Gives `record` to the captured graph, then enqueues it (INVARIANTS.md C1, C2). Consumes the
// record also on failure. Without the GIL.
Attached launch_captured(std::uint64_t stream, const CaptureInfo& capture, HostRecord* record,
                         bool spin);

// The oldest failure in a captured graph that nobody was told yet; its graph may run on then. The
// caller owns the failure. GIL held.
bool take_captured_failure(Failure* out);

}  // namespace graft::hostwork
