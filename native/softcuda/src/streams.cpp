// Entry points of streams and events.
#include <algorithm>

#include "capture.h"

namespace softcuda {

// Adds an event node to the graph that the stream captures. Implements the flags
// CU_EVENT_RECORD_EXTERNAL and CU_EVENT_WAIT_EXTERNAL, which are only valid on a capturing stream.
static void capture_external(CUstream stream, WorkKind kind, std::shared_ptr<Event> event) {
  require(capture_work(stream, Work(kind, std::move(event))), CUDA_ERROR_INVALID_VALUE,
          "the EXTERNAL flag is only valid for a capturing stream");
}

// Returns the result of a query: the sticky error after a fault, SUCCESS if the operation is
// complete, else NOT_READY.
static CUresult readiness(const OpRef& op) {
  const bool done = is_done(op);
  if (sticky() != CUDA_SUCCESS) return sticky();
  return done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
}  // namespace softcuda

using namespace softcuda;

static void create_stream(CUstream* out, unsigned flags, int priority) {
  require(out != nullptr && (flags & ~CU_STREAM_NON_BLOCKING) == 0);
  // Priorities outside of the range are clamped, as documented.
  auto stream = new_stream(flags, std::clamp(priority, kGreatestPriority, kLeastPriority));
  live_add(Resource::stream, 1);
  *out = static_cast<CUstream>(stream->handle);
}

SC_API(cuStreamCreate, 2000, kContext, CUstream*, out, unsigned, flags) {
  create_stream(out, flags, 0);
}

SC_API(cuStreamCreateWithPriority, 5050, kContext, CUstream*, out, unsigned, flags, int, priority) {
  create_stream(out, flags, priority);
}

// The call returns immediately. Work that is queued on the stream still runs.
SC_API(cuStreamDestroy_v2, 4000, 0, CUstream, handle) {
  const auto stream = streams.remove(handle);
  live_add(Resource::stream, -1);
  capture_stream_destroyed(handle);
  detach(*stream);
}

SC_API_CODE(cuStreamSynchronize, 2000, kNoLock, CUstream, handle) {
  const auto stream = find_stream(handle);
  capture_reject_stream_sync(handle);
  return wait_op(load(stream->tail), "cuStreamSynchronize: the stream's work");
}

SC_API_CODE(cuStreamQuery, 2000, kNoLock, CUstream, handle) {
  const auto stream = find_stream(handle);
  capture_reject_stream_sync(handle);
  return readiness(load(stream->tail));
}

SC_API(cuStreamWaitEvent, 3020, 0, CUstream, handle, CUevent, event_handle, unsigned, flags) {
  const auto stream = find_stream(handle);
  const auto event = events.find(event_handle);
  require(flags <= 1);
  if (flags == 1) return capture_external(handle, WorkKind::event_wait, event);
  if (capture_wait(handle, event_handle)) return;
  OpRef op = load(event->op);
  if (op) enqueue(*stream, Work(), op);  // an event that was never recorded is complete
}

#define STREAM_GET(symbol, from, T, value)                    \
  SC_API(symbol, from, kNoLock, CUstream, handle, T*, out) {  \
    [[maybe_unused]] const auto stream = find_stream(handle); \
    require(out != nullptr);                                  \
    *out = value;                                             \
  }
STREAM_GET(cuStreamGetCtx, 9020, CUcontext,
           stream->context != nullptr ? stream->context : primary_context())
STREAM_GET(cuStreamGetFlags, 5050, unsigned, stream->flags)
STREAM_GET(cuStreamGetPriority, 5050, int, stream->priority)
STREAM_GET(cuStreamGetId, 12000, unsigned long long, stream->id)
STREAM_GET(cuStreamGetDevice, 12080, CUdevice, 0)

SC_API(cuEventCreate, 2000, kContext, CUevent*, out, unsigned, flags) {
  require(out != nullptr && flags <= 7);
  require((flags & CU_EVENT_INTERPROCESS) == 0, CUDA_ERROR_NOT_SUPPORTED,
          "interprocess events are not implemented");
  auto event = std::make_shared<Event>();
  event->flags = flags;
  event->handle = events.add(event);
  *out = static_cast<CUevent>(event->handle);
  live_add(Resource::event, 1);
}

SC_API(cuEventDestroy_v2, 4000, 0, CUevent, handle) {
  const auto event = events.remove(handle);
  event->destroyed.store(true);
  live_add(Resource::event, -1);
  capture_event_destroyed(handle);
}

static void record(CUevent event_handle, CUstream handle, bool external) {
  const auto stream = find_stream(handle);
  const auto event = events.find(event_handle);
  if (external) return capture_external(handle, WorkKind::event_record, event);
  if (capture_record(handle, event_handle)) return;
  store(event->op, enqueue(*stream, Work()));
}

SC_API(cuEventRecord, 2000, 0, CUevent, event, CUstream, stream) { record(event, stream, false); }

SC_API(cuEventRecordWithFlags, 11010, 0, CUevent, event, CUstream, stream, unsigned, flags) {
  require(flags <= 1);
  record(event, stream, flags == 1);
}

SC_API_CODE(cuEventQuery, 2000, kNoLock, CUevent, handle) {
  const auto event = events.find(handle);
  capture_reject_event_sync(handle);
  return readiness(load(event->op));
}

SC_API_CODE(cuEventSynchronize, 2000, kNoLock, CUevent, handle) {
  const auto event = events.find(handle);
  capture_reject_event_sync(handle);
  return wait_op(load(event->op), "cuEventSynchronize: the event");
}

SC_API_CODE(cuEventElapsedTime_v2, 2000, kNoLock, float*, ms, CUevent, start_handle, CUevent,
            end_handle) {
  const auto start = events.find(start_handle);
  const auto end = events.find(end_handle);
  require(ms != nullptr);
  for (CUevent event : {start_handle, end_handle}) capture_reject_event_sync(event);
  const OpRef a = load(start->op);
  const OpRef b = load(end->op);
  require(a && b && ((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING) == 0,
          CUDA_ERROR_INVALID_HANDLE,
          "an event was created with CU_EVENT_DISABLE_TIMING or was never recorded");
  if (!is_done(a) || !is_done(b)) return CUDA_ERROR_NOT_READY;
  const auto elapsed = static_cast<int64_t>(finished_ns(b)) - static_cast<int64_t>(finished_ns(a));
  *ms = static_cast<float>(static_cast<double>(elapsed) * 1e-6);
  return CUDA_SUCCESS;
}
