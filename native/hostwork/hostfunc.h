// Host functions enqueued on a stream, which run once or become nodes of the captured graph.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "hostwork/record.h"

namespace graft::hostwork {

// A record that is freed after its only run, or abandoned if it can never run. It is registered
// until then, so that exactly one of the two happens (R5).
class EagerRecord final : public HostRecord {
 public:
  using HostRecord::HostRecord;
  // Enqueues the record, which it consumes also on failure. Called without the GIL. With `spin` the
  // driver's thread spins while it waits (cuLaunchHostFunc_v2 of CUDA 13.2); returns NOT_SUPPORTED
  // if the driver does not have that function.
  Result launch(std::uint64_t stream, bool spin);

 private:
  friend void abandon_eager();
  static void entry(void* data);
  void fail_eager(Failure failure) override;

  std::atomic<bool> claimed_{false};
  std::uint64_t stream_ = 0;
};

// Takes the oldest unreported failure on this stream; false if there is none. The caller owns the
// exception. GIL held.
bool take_eager_failure(std::uint64_t stream, Failure* out);

// Takes all unreported failures of all streams.
std::vector<Failure> take_eager_failures();

// Abandons all pending records after a context fault, when the driver calls no host function any
// more. Their Python references are released. The native parts stay, in case one is called.
void abandon_eager();

constexpr int kCapturing = 1;  // CU_STREAM_CAPTURE_STATUS_ACTIVE

struct CaptureInfo {
  int status = 0;
  std::uint64_t id = 0;
  Handle graph = nullptr;  // graph being captured, if status is kCapturing
};
Result capture_info(std::uint64_t stream, CaptureInfo* out);

// Returns the state that all host functions of one capture share. It lives as long as their
// records.
std::shared_ptr<GraphState> capture_state(const CaptureInfo& capture);

// Retains `record` on the captured graph, then enqueues it (INVARIANTS.md C1, C2). Consumes the
// record also on failure. Called without the GIL.
Attached launch_captured(std::uint64_t stream, const CaptureInfo& capture, HostRecord* record,
                         bool spin);

// Takes the oldest unreported failure in a captured graph, whose host steps run again afterwards;
// false if there is none. The caller owns the exception. GIL held.
bool take_captured_failure(Failure* out);

}  // namespace graft::hostwork
