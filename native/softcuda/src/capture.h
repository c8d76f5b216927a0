// Stream capture: calls on a capturing stream become graph nodes (invariants T1-T6).
#pragma once

#include "graphs.h"

namespace softcuda {

// What a call on `stream` does about capture: false, it enqueues its work; true, the work was put
// into the capture's graph. What capture forbids is refused. Every hook costs one load while
// nothing is captured anywhere.
bool capture_work(CUstream stream, const Work& work);
bool capture_launch(CUstream stream, const Exec& exec);

// Event record and wait: fork and join.
bool capture_record(CUstream stream, CUevent event);
bool capture_wait(CUstream stream, CUevent event);
void capture_forget_event(CUevent event);     // destroyed
void capture_forget_stream(CUstream stream);  // destroyed: its capture is void

// Calls that cannot be captured; the captures concerned are invalidated.
void capture_forbids_stream(CUstream stream);  // querying or waiting for a capturing stream
void capture_forbids_event(CUevent event);     // the same for an event recorded in a capture
void capture_forbids_device();                 // waiting for everything

}  // namespace softcuda
