// Stream capture: calls on a capturing stream become graph nodes (invariants R1-R6).
#pragma once

#include "graphs.h"

namespace softcuda {

// Called by functions that enqueue work. Return true if the stream is capturing, in which case the
// work was added to the capture's graph, and false if the caller has to enqueue it. A call that is
// illegal during capture ends with an error. While nothing is captured, each costs one load.
bool capture_work(CUstream stream, const Work& work);
bool capture_launch(CUstream stream, const Exec& exec);
// Same for cuEventRecord and cuStreamWaitEvent, which fork and join captures.
bool capture_record(CUstream stream, CUevent event);
bool capture_wait(CUstream stream, CUevent event);

void capture_event_destroyed(CUevent event);
// Invalidates the capture unless its origin has joined the stream's work.
void capture_stream_destroyed(CUstream stream);

// Reject calls that are illegal during capture, and invalidate the affected captures (R3):
// synchronization with or a query of a capturing stream or a captured event, and synchronization
// with the device.
void capture_reject_stream_sync(CUstream stream);
void capture_reject_event_sync(CUevent event);
void capture_reject_device_sync();

}  // namespace softcuda
