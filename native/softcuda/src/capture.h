// Stream capture: calls on a capturing stream become graph nodes (invariants T1-T6).
#pragma once

#include <optional>

#include "graphs.h"

namespace softcuda {

// Every hook below costs one load while nothing is captured anywhere.
bool capture_possible();

// What a call on `stream` does about capture: nothing (no value: enqueue the work), or the result
// of having put the work into the capture's graph, or the error of a call that capture forbids.
std::optional<CUresult> capture_work(CUstream stream, CUgraphNodeType type, const Work& work);
std::optional<CUresult> capture_copy(CUstream stream, const Work& work, const CUDA_MEMCPY3D& p);
std::optional<CUresult> capture_fill(CUstream stream, const Work& work,
                                     const CUDA_MEMSET_NODE_PARAMS& p);
std::optional<CUresult> capture_launch(CUstream stream, const Exec& exec);

// Event record and wait: fork and join.
std::optional<CUresult> capture_record(CUstream stream, CUevent event);
std::optional<CUresult> capture_wait(CUstream stream, CUevent event);
void capture_forget_event(CUevent event);     // destroyed
void capture_forget_stream(CUstream stream);  // destroyed: its capture is void

// Calls that cannot be captured; the captures concerned are invalidated.
CUresult capture_forbids_stream(CUstream stream);  // querying or waiting for a capturing stream
CUresult capture_forbids_event(CUevent event);     // the same for an event recorded in a capture
CUresult capture_forbids_device();                 // waiting for everything

}  // namespace softcuda
