// Entry points of stream capture; the rules are in capture.cpp.
#include "capture_state.h"

using namespace softcuda::capturing;
using namespace softcuda;

SC_EXPORT CUresult cuStreamBeginCapture_v2(CUstream stream, int mode) {
  SC_API(cuStreamBeginCapture, kNoLock);
  return begin(stream, nullptr, {}, mode);
}

SC_EXPORT CUresult cuStreamBeginCaptureToGraph(CUstream stream, CUgraph handle,
                                               const CUgraphNode* dependencies,
                                               const CUgraphEdgeData*, size_t count, int mode) {
  SC_API(cuStreamBeginCaptureToGraph, kNoLock);
  std::shared_ptr<Graph> graph = graphs().get(handle);
  if (!graph) return refuse(CUDA_ERROR_INVALID_HANDLE, "not a graph");
  if (count > 0 && dependencies == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Ends ends(dependencies, dependencies + count);
  for (CUgraphNode node : ends) {
    std::shared_ptr<Node> found = graph_nodes().get(node);
    if (!found || found->graph != graph.get()) {
      return refuse(CUDA_ERROR_INVALID_VALUE, "a dependency is not a node of the graph");
    }
  }
  return begin(stream, std::move(graph), std::move(ends), mode);
}

SC_EXPORT CUresult cuStreamEndCapture(CUstream stream, CUgraph* out) {
  SC_API(cuStreamEndCapture, kNoLock);
  ApiThread here;
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *out = nullptr;
  stream = own_handle(stream);
  State& s = state();
  std::shared_ptr<Graph> dead;
  std::lock_guard<std::mutex> lock(s.mutex);
  auto it = s.streams.find(stream);
  if (it == s.streams.end()) {
    return refuse(CUDA_ERROR_ILLEGAL_STATE, "the stream is not capturing");
  }
  const std::shared_ptr<Capture> capture = it->second.capture;
  if (capture->origin != stream) {
    return invalidate(*capture, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED,
                      "the capture began on another stream");
  }
  if (capture->mode != kRelaxed && pthread_equal(capture->thread, pthread_self()) == 0) {
    return refuse(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, "the capture began on another thread");
  }
  CUresult r = CUDA_SUCCESS;
  if (capture->invalid) {
    r = refuse(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "the capture was invalidated before");
  } else if (!joined(s, capture)) {
    r = refuse(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "a forked stream was not joined again");
  } else {
    *out = static_cast<CUgraph>(capture->graph->handle);
  }
  dead = leave(s, capture, r == CUDA_SUCCESS);
  return r;
}

SC_EXPORT CUresult cuStreamIsCapturing(CUstream stream, int* status) {
  SC_API(cuStreamIsCapturing, kNoLock);
  return info(stream, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}

static CUresult capture_info(CUstream stream, int* status, uint64_t* id, CUgraph* graph,
                             const CUgraphNode** dependencies, const CUgraphEdgeData** edges,
                             size_t* count) {
  if (edges != nullptr && dependencies == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (id != nullptr) *id = 0;
  if (graph != nullptr) *graph = nullptr;
  if (dependencies != nullptr) *dependencies = nullptr;
  if (edges != nullptr) *edges = nullptr;
  if (count != nullptr) *count = 0;
  return info(stream, status, id, graph, dependencies, count, edges);
}

SC_EXPORT CUresult cuStreamGetCaptureInfo_v2(CUstream stream, int* status, uint64_t* id,
                                             CUgraph* graph, const CUgraphNode** dependencies,
                                             size_t* count) {
  SC_API(cuStreamGetCaptureInfo, kNoLock);
  return capture_info(stream, status, id, graph, dependencies, nullptr, count);
}

SC_EXPORT CUresult cuStreamGetCaptureInfo_v3(CUstream stream, int* status, uint64_t* id,
                                             CUgraph* graph, const CUgraphNode** dependencies,
                                             const CUgraphEdgeData** edges, size_t* count) {
  SC_API(cuStreamGetCaptureInfo, kNoLock);
  return capture_info(stream, status, id, graph, dependencies, edges, count);
}

SC_EXPORT CUresult cuStreamUpdateCaptureDependencies_v2(CUstream stream,
                                                        const CUgraphNode* dependencies,
                                                        const CUgraphEdgeData*, size_t count,
                                                        unsigned flags) {
  SC_API(cuStreamUpdateCaptureDependencies, kNoLock);
  if (flags > 1 || (count > 0 && dependencies == nullptr)) return CUDA_ERROR_INVALID_VALUE;
  stream = own_handle(stream);
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  auto it = s.streams.find(stream);
  if (it == s.streams.end()) {
    return refuse(CUDA_ERROR_ILLEGAL_STATE, "the stream is not capturing");
  }
  if (it->second.capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  Ends given(dependencies, dependencies + count);
  for (CUgraphNode node : given) {
    std::shared_ptr<Node> found = graph_nodes().get(node);
    if (!found || found->graph != it->second.capture->graph.get()) {
      return refuse(CUDA_ERROR_INVALID_VALUE, "a dependency is not a node of the captured graph");
    }
  }
  if (flags == 1) it->second.ends.clear();
  join(&it->second.ends, given);
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuThreadExchangeStreamCaptureMode(int* mode) {
  SC_API(cuThreadExchangeStreamCaptureMode, kNoLock);
  if (mode == nullptr || *mode < kGlobal || *mode > kRelaxed) return CUDA_ERROR_INVALID_VALUE;
  std::swap(*mode, t_mode);
  return CUDA_SUCCESS;
}
