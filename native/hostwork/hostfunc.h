// Host functions enqueued on a stream: at once, or into the graph that somebody captures there.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "hostwork/record.h"

namespace graft::hostwork {

// A record that frees itself after its one run, or is abandoned when it can never run. It stands
// in a list until then, so that exactly one of the two happens (R5).
class EagerRecord final : public HostRecord {
 public:
  using HostRecord::HostRecord;
  // `spin`: cuLaunchHostFunc_v2 (CUDA 13.2), NOT_SUPPORTED where the driver has none; its thread
  // then spins while it waits. Consumes this also on failure; no GIL.
  Result launch(std::uint64_t stream, bool spin);

 private:
  friend void abandon_eager();
  static void entry(void* data);
  void fail_eager(Failure failure) override;

  std::atomic<bool> taken_{false};
  std::uint64_t stream_ = 0;
};

// The oldest unreported failure on this stream, which the caller then owns. GIL held.
bool take_eager_failure(std::uint64_t stream, Failure* out);

// All of them, of every stream.
std::vector<Failure> take_eager_failures();

// After a context fault host functions are not called any more: gives up every pending record.
// Their Python references are released; the small native part stays, in case one does run.
void abandon_eager();

constexpr int kCapturing = 1;  // CU_STREAM_CAPTURE_STATUS_ACTIVE

struct CaptureInfo {
  int status = 0;
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
