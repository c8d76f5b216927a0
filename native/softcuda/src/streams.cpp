// Streams and events.
#include "capture.h"

namespace softcuda {
namespace {
Handles<Event>& events() {
  static Handles<Event>& h = *new Handles<Event>(0x54000000000000);
  return h;
}
}  // namespace

std::shared_ptr<Event> find_event(CUevent handle) { return events().get(handle); }

// Of an event that is used as an external one: the node a capture gets. No value: there is no
// capture, where the flag is invalid.
static CUresult capture_external(CUstream stream, CUgraphNodeType type, WorkKind kind,
                                 std::shared_ptr<Event> event) {
  Work work;
  work.kind = kind;
  work.event = std::move(event);
  if (auto r = capture_work(stream, type, work)) return *r;
  return refuse(CUDA_ERROR_INVALID_VALUE, "the external flag is for capturing streams");
}
}  // namespace softcuda

using namespace softcuda;

static CUresult create_stream(CUstream* out, unsigned flags, int priority) {
  if (out == nullptr || (flags & ~CU_STREAM_NON_BLOCKING) != 0) return CUDA_ERROR_INVALID_VALUE;
  // Out-of-range priorities are clamped, as documented.
  auto stream = new_stream(flags, priority > 0 ? 0 : priority < -5 ? -5 : priority);
  live_add(Kind::stream, 1);
  *out = static_cast<CUstream>(stream->handle);
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuStreamCreate(CUstream* out, unsigned flags) {
  SC_API(cuStreamCreate, kContext);
  return create_stream(out, flags, 0);
}

SC_EXPORT CUresult cuStreamCreateWithPriority(CUstream* out, unsigned flags, int priority) {
  SC_API(cuStreamCreateWithPriority, kContext);
  return create_stream(out, flags, priority);
}

// Returns at once; what is queued still runs.
SC_EXPORT CUresult cuStreamDestroy_v2(CUstream handle) {
  SC_API(cuStreamDestroy, 0);
  std::shared_ptr<Stream> stream = streams().take(handle);
  if (!stream) return refuse(CUDA_ERROR_INVALID_HANDLE, "not a stream");
  live_add(Kind::stream, -1);
  capture_forget_stream(handle);
  abandon(*stream);
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuStreamSynchronize(CUstream handle) {
  SC_API(cuStreamSynchronize, kNoLock);
  std::shared_ptr<Stream> stream = find_stream(handle);
  if (!stream) return refuse(CUDA_ERROR_INVALID_HANDLE, "not a stream");
  if (CUresult r = capture_forbids_stream(handle); r != CUDA_SUCCESS) return r;
  return wait_op(stream_tail(*stream), "cuStreamSynchronize: the stream's work");
}

SC_EXPORT CUresult cuStreamQuery(CUstream handle) {
  SC_API(cuStreamQuery, kNoLock);
  std::shared_ptr<Stream> stream = find_stream(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (CUresult r = capture_forbids_stream(handle); r != CUDA_SUCCESS) return r;
  const bool done = is_done(stream_tail(*stream));
  if (sticky() != CUDA_SUCCESS) return sticky();
  return done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

SC_EXPORT CUresult cuStreamWaitEvent(CUstream handle, CUevent event_handle, unsigned flags) {
  SC_API(cuStreamWaitEvent, 0);
  std::shared_ptr<Stream> stream = find_stream(handle);
  std::shared_ptr<Event> event = events().get(event_handle);
  if (!stream || !event) return refuse(CUDA_ERROR_INVALID_HANDLE, "not a stream or not an event");
  if (flags > 1) return CUDA_ERROR_INVALID_VALUE;
  if (flags == 1) {
    return capture_external(handle, CU_GRAPH_NODE_TYPE_WAIT_EVENT, WorkKind::event_wait, event);
  }
  if (auto r = capture_wait(handle, event_handle)) return *r;
  OpRef op = event_op(*event);
  if (op) enqueue(*stream, Work(), op);  // an event never recorded is complete
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuStreamGetCtx_v2(CUstream handle, CUcontext* out, void** green) {
  SC_API(cuStreamGetCtx_v2, kNoLock);
  if (!find_stream(handle)) return CUDA_ERROR_INVALID_HANDLE;
  if (out == nullptr || green == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *out = primary_context();
  *green = nullptr;
  return CUDA_SUCCESS;
}

#define STREAM_GET(name, T, value)                        \
  SC_EXPORT CUresult name(CUstream handle, T* out) {      \
    SC_API(name, kNoLock);                                \
    std::shared_ptr<Stream> stream = find_stream(handle); \
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;        \
    if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;  \
    *out = value;                                         \
    return CUDA_SUCCESS;                                  \
  }
STREAM_GET(cuStreamGetCtx, CUcontext, primary_context())
STREAM_GET(cuStreamGetFlags, unsigned, stream->flags)
STREAM_GET(cuStreamGetPriority, int, stream->priority)
STREAM_GET(cuStreamGetId, unsigned long long, stream->id)
STREAM_GET(cuStreamGetDevice, CUdevice, 0)

SC_EXPORT CUresult cuEventCreate(CUevent* out, unsigned flags) {
  SC_API(cuEventCreate, kContext);
  if (out == nullptr || flags > 7) return CUDA_ERROR_INVALID_VALUE;
  if ((flags & CU_EVENT_INTERPROCESS) != 0) {
    return refuse(CUDA_ERROR_NOT_SUPPORTED, "interprocess events are not implemented");
  }
  auto event = std::make_shared<Event>();
  event->flags = flags;
  event->handle = events().add(event);
  *out = static_cast<CUevent>(event->handle);
  live_add(Kind::event, 1);
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuEventDestroy_v2(CUevent handle) {
  SC_API(cuEventDestroy, 0);
  std::shared_ptr<Event> event = events().take(handle);
  if (!event) return refuse(CUDA_ERROR_INVALID_HANDLE, "not an event");
  event->destroyed.store(true);
  live_add(Kind::event, -1);
  capture_forget_event(handle);
  return CUDA_SUCCESS;
}

static CUresult record(CUevent event_handle, CUstream handle, bool external) {
  std::shared_ptr<Stream> stream = find_stream(handle);
  std::shared_ptr<Event> event = events().get(event_handle);
  if (!stream || !event) return refuse(CUDA_ERROR_INVALID_HANDLE, "not a stream or not an event");
  if (external) {
    return capture_external(handle, CU_GRAPH_NODE_TYPE_EVENT_RECORD, WorkKind::event_record, event);
  }
  if (auto r = capture_record(handle, event_handle)) return *r;
  set_event(*event, enqueue(*stream, Work()));
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuEventRecord(CUevent event, CUstream stream) {
  SC_API(cuEventRecord, 0);
  return record(event, stream, false);
}

SC_EXPORT CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned flags) {
  SC_API(cuEventRecordWithFlags, 0);
  if (flags > 1) return CUDA_ERROR_INVALID_VALUE;
  return record(event, stream, flags == 1);
}

SC_EXPORT CUresult cuEventQuery(CUevent handle) {
  SC_API(cuEventQuery, kNoLock);
  std::shared_ptr<Event> event = events().get(handle);
  if (!event) return CUDA_ERROR_INVALID_HANDLE;
  if (CUresult r = capture_forbids_event(handle); r != CUDA_SUCCESS) return r;
  const bool done = is_done(event_op(*event));
  if (sticky() != CUDA_SUCCESS) return sticky();
  return done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

SC_EXPORT CUresult cuEventSynchronize(CUevent handle) {
  SC_API(cuEventSynchronize, kNoLock);
  std::shared_ptr<Event> event = events().get(handle);
  if (!event) return CUDA_ERROR_INVALID_HANDLE;
  if (CUresult r = capture_forbids_event(handle); r != CUDA_SUCCESS) return r;
  return wait_op(event_op(*event), "cuEventSynchronize: the event");
}

SC_EXPORT CUresult cuEventElapsedTime_v2(float* ms, CUevent start_handle, CUevent end_handle) {
  SC_API(cuEventElapsedTime, kNoLock);
  std::shared_ptr<Event> start = events().get(start_handle), end = events().get(end_handle);
  if (!start || !end) return CUDA_ERROR_INVALID_HANDLE;
  if (ms == nullptr) return CUDA_ERROR_INVALID_VALUE;
  for (CUevent event : {start_handle, end_handle}) {
    if (CUresult r = capture_forbids_event(event); r != CUDA_SUCCESS) return r;
  }
  const OpRef a = event_op(*start), b = event_op(*end);
  if (!a || !b || ((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING) != 0) {
    return refuse(CUDA_ERROR_INVALID_HANDLE, "an event without timing, or never recorded");
  }
  if (!is_done(a) || !is_done(b)) return CUDA_ERROR_NOT_READY;
  const auto elapsed = static_cast<int64_t>(finished_ns(b)) - static_cast<int64_t>(finished_ns(a));
  *ms = static_cast<float>(static_cast<double>(elapsed) * 1e-6);
  return CUDA_SUCCESS;
}
