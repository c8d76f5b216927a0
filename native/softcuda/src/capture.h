// Stream capture: calls on a capturing stream become graph nodes (INVARIANTS.md R1 to R6).
#pragma once

#include "graphs.h"

namespace softcuda {

// A function that enqueues work on a stream first calls capture_work() or capture_launch(). If the
// stream is capturing, these two functions add the work to the captured graph and return true.
// Otherwise they return false, and their caller enqueues the work. They refuse a driver call that
// is illegal during the capture. While no stream captures, they cost one atomic load.
bool capture_work(CUstream stream, const Work& work);
bool capture_launch(CUstream stream, const Exec& exec);
// cuEventRecord and cuStreamWaitEvent first call these functions, which return whether they have
// captured the call. A stream joins a capture by waiting for an event that was recorded in the
// capture.
bool capture_record(CUstream stream, CUevent event);
bool capture_wait(CUstream stream, CUevent event);

// Removes a destroyed event from its capture.
void capture_event_destroyed(CUevent event);
// Removes a destroyed stream from its capture. If it is the origin stream, the capture ends and is
// invalid. Otherwise, the capture becomes invalid unless the work that was captured on the
// destroyed stream was already joined to the origin stream.
void capture_stream_destroyed(CUstream stream);

// These functions reject a call that is illegal during a capture and invalidate the affected
// captures (INVARIANTS.md R3). Illegal calls are: synchronizing with a capturing stream or a
// captured event, querying one of these, and synchronizing with the device.
void capture_reject_stream_sync(CUstream stream);
void capture_reject_event_sync(CUevent event);
void capture_reject_device_sync();

}  // namespace softcuda
