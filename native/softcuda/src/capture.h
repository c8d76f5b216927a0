// Stream capture: calls on a capturing stream become graph nodes (invariants R1-R6).
#pragma once

#include "graphs.h"

namespace softcuda {

// Called by functions that enqueue work. They return true if the stream is capturing, in which case
// the work was added to the capture's graph, and false if the caller has to enqueue it. A call that
// is illegal during the capture ends with an error. While no stream captures, each function costs
// one load.
bool capture_work(CUstream stream, const Work& work);
bool capture_launch(CUstream stream, const Exec& exec);
// The same for cuEventRecord and cuStreamWaitEvent, by which other streams join a capture.
bool capture_record(CUstream stream, CUevent event);
bool capture_wait(CUstream stream, CUevent event);

// Forgets the captured nodes of an event.
void capture_event_destroyed(CUevent event);
// Invalidates the stream's capture, unless the capture's origin stream already depends on all work
// that was captured on the destroyed stream.
void capture_stream_destroyed(CUstream stream);

// Reject calls that are illegal during a capture, and invalidate the affected captures (R3):
// synchronizing with or querying a capturing stream or a captured event, and synchronizing with the
// device.
void capture_reject_stream_sync(CUstream stream);
void capture_reject_event_sync(CUevent event);
void capture_reject_device_sync();

}  // namespace softcuda
