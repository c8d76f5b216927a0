// Host functions that are enqueued on a stream. They run once (eager work), or become nodes of the
// graph that the stream is capturing.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "hostwork/record.h"

namespace graft::hostwork {

// A record of eager work. It is freed after its only run, or abandoned if the driver will never
// call it (see abandon_eager). An atomic flag ensures that only one of the two happens
// (INVARIANTS.md R5).
class EagerRecord final : public HostRecord {
 public:
  using HostRecord::HostRecord;
  // Enqueues the record on a stream. The record frees itself, even if enqueueing fails. The caller
  // must not hold the GIL. With `spin` the driver's thread spins until the work may run. If the
  // driver lacks cuLaunchHostFunc_v2 (CUDA 13.2), a launch with `spin` returns
  // CUDA_ERROR_NOT_SUPPORTED.
  Result launch(std::uint64_t stream, bool spin);

 private:
  friend void abandon_eager();
  static void entry(void* data);
  void fail_eager(Failure failure) override;

  std::atomic<bool> claimed_{false};
  std::uint64_t stream_ = 0;
};

// Removes the oldest recorded failure of eager work on this stream and stores it in `out`. Returns
// false if there is none. The caller must hold the GIL and owns the reference `out->exception`.
bool take_eager_failure(std::uint64_t stream, Failure* out);

// Removes and returns all recorded failures of eager work, of all streams.
std::vector<Failure> take_eager_failures();

// Abandons all pending eager records. Called after a context fault, because the driver then calls
// no host function any more. The Python references of the records are released. The native parts
// are never freed, in case the driver calls one of them after all.
void abandon_eager();

constexpr int kCapturing = 1;  // CU_STREAM_CAPTURE_STATUS_ACTIVE

struct CaptureInfo {
  int status = 0;
  std::uint64_t id = 0;
  Handle graph = nullptr;  // graph being captured, if status is kCapturing
};
Result capture_info(std::uint64_t stream, CaptureInfo* out);

// Returns the state that the host functions of one capture share, and creates it at the first call.
// The records of the host functions keep the state alive.
std::shared_ptr<GraphState> capture_state(const CaptureInfo& capture);

// Makes the captured graph keep `record` alive (in a CUDA user object), then enqueues the host
// function that runs the record (INVARIANTS.md C1, C2). With `spin`, the host function is enqueued
// with CU_HOST_TASK_SPINWAIT. If a step fails, the record is released, and the reaper deletes it.
// The caller must not hold the GIL.
Attached launch_captured(std::uint64_t stream, const CaptureInfo& capture, HostRecord* record,
                         bool spin);

// Removes the oldest recorded failure of a captured graph and stores it in `out`. Returns false if
// there is none. Since the failure, the host steps of that graph were skipped; after this call,
// later replays run them again. The caller must hold the GIL and owns the reference
// `out->exception`.
bool take_captured_failure(Failure* out);

}  // namespace graft::hostwork
