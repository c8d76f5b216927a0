// Stream capture: work that is enqueued on a capturing stream becomes nodes of the capture's graph
// (INVARIANTS.md R1 to R6).
#include "capture.h"

#include <pthread.h>

#include <algorithm>
#include <set>

namespace softcuda {
namespace {

enum Mode : int { kGlobal = 0, kThreadLocal = 1, kRelaxed = 2 };
enum Status : int { kNone = 0, kActive = 1, kInvalidated = 2 };

// One stream capture, from cuStreamBeginCapture to cuStreamEndCapture.
struct Capture {
  uint64_t id = 0;
  std::shared_ptr<Graph> graph;
  // True if cuStreamBeginCapture created the graph, which is destroyed if the capture fails. False
  // if the caller passed the graph to cuStreamBeginCaptureToGraph.
  bool owns_graph = true;
  int mode = kGlobal;
  pthread_t thread{};
  CUstream origin = nullptr;
  bool invalid = false;
  bool ended = false;
};
using Dependencies = std::vector<CUgraphNode>;
// The state of one stream or event that belongs to a capture.
struct Member {
  std::shared_ptr<Capture> capture;
  Dependencies dependencies;  // nodes on which the next captured node depends
  // The edge data that cuStreamGetCaptureInfo returns: one edge for each dependency, not
  // programmatic.
  std::vector<CUgraphEdgeData> edges;
};

struct State {
  std::mutex mutex;  // lock it before graph_mutex
  std::map<CUstream, Member> streams;
  std::map<CUevent, Member> events;
  std::set<std::shared_ptr<Capture>> active;
  uint64_t next_id = 0;

  Member* member(CUstream stream) {
    auto it = streams.find(stream);
    return it == streams.end() ? nullptr : &it->second;
  }
};
// Never destroyed, because detached threads may use it until the process exits.
State& g_state = *new State;
// Total number of entries of State::streams and State::events. While it is 0, nothing is captured,
// and calls skip all checks.
std::atomic<int> g_members{0};
thread_local int t_mode = kGlobal;

bool nothing_captured() { return g_members.load(std::memory_order_acquire) == 0; }
void update_member_count() {
  g_members.store(static_cast<int>(g_state.streams.size() + g_state.events.size()),
                  std::memory_order_release);
}

[[noreturn]] void invalidate(Capture& capture, CUresult code, const std::string& why) {
  capture.invalid = true;
  refuse(code, why + "; the capture is invalidated");
}

void require_valid(const Capture& capture) {
  require(!capture.invalid, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
          "the capture was invalidated by an earlier error");
}

// Returns the key of a stream in State::streams. For CU_STREAM_PER_THREAD this is the handle of the
// calling thread's stream.
CUstream stream_key(CUstream handle) {
  if (handle != kPerThread) return handle;
  return static_cast<CUstream>(find_stream(handle)->handle);
}

bool is_legacy(CUstream stream) { return reinterpret_cast<uint64_t>(stream) <= 1; }

// Whether the stream is a blocking stream, which synchronizes with the legacy stream. While a
// blocking stream captures, calls must not use the legacy stream.
bool is_blocking(CUstream handle) {
  const auto stream = streams.get(handle);
  return stream && (stream->flags & CU_STREAM_NON_BLOCKING) == 0;
}

// Called when a call uses the legacy stream. If a blocking stream is capturing, invalidates the
// captures of all blocking streams and refuses the call.
void invalidate_for_legacy_stream() {
  bool forbidden = false;
  for (auto& item : g_state.streams) {
    if (!is_blocking(item.first)) continue;
    item.second.capture->invalid = true;
    forbidden = true;
  }
  require(!forbidden, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
          "the legacy stream cannot be used while a blocking stream is capturing, because it "
          "synchronizes with that stream; the capture is invalidated");
}

// Appends to `list` those elements of `nodes` that it does not contain yet.
void merge(Dependencies* list, const Dependencies& nodes) {
  for (CUgraphNode node : nodes) {
    if (std::find(list->begin(), list->end(), node) == list->end()) list->push_back(node);
  }
}

// Converts the caller's array of dependencies to a list. Refuses the call if an element is not a
// node of `graph`.
Dependencies checked_dependencies(const CUgraphNode* nodes, size_t count, const Graph* graph) {
  require(count == 0 || nodes != nullptr);
  for (size_t i = 0; i < count; ++i) {
    const auto node = graph_nodes.get(nodes[i]);
    require(node && node->graph == graph, CUDA_ERROR_INVALID_VALUE,
            "a dependency is not a node of the graph");
  }
  return Dependencies(nodes, nodes + count);
}

// If the stream is capturing, adds a node to the captured graph, calls `initialize` on the node to
// set its type and work, and returns true. Otherwise, returns false.
template <class Initialize>
bool capture_node(CUstream stream, const Initialize& initialize) {
  if (nothing_captured()) return false;
  stream = stream_key(stream);
  std::lock_guard<std::mutex> lock(g_state.mutex);
  if (is_legacy(stream)) return invalidate_for_legacy_stream(), false;
  Member* const member = g_state.member(stream);
  if (member == nullptr) return false;
  require_valid(*member->capture);
  auto node = std::make_shared<Node>();
  initialize(*node);
  CUgraphNode added = nullptr;
  add_node(&added, static_cast<CUgraph>(member->capture->graph->handle),
           member->dependencies.data(), member->dependencies.size(), node);
  if (node->child) node->child->handle = graphs.add(node->child);
  for (const Node* from : node->dependencies) {
    const bool kernel = from->type == CU_GRAPH_NODE_TYPE_KERNEL;
    if (node->work.programmatic && kernel) node->ports[from] = 1;
  }
  member->dependencies.assign(1, added);
  return true;
}

// Begins a capture. The nodes are added to `graph` or, if it is null, to a new graph. The first
// captured node depends on `dependencies`.
void begin(CUstream handle, int mode, const std::shared_ptr<Graph>& graph = nullptr,
           const Dependencies& dependencies = {}) {
  require(mode >= kGlobal && mode <= kRelaxed);
  require(!is_legacy(handle), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
          "the legacy stream cannot be captured");
  handle = static_cast<CUstream>(find_stream(handle)->handle);
  std::lock_guard<std::mutex> lock(g_state.mutex);
  require(g_state.member(handle) == nullptr, CUDA_ERROR_ILLEGAL_STATE,
          "the stream is already capturing");
  auto capture = std::make_shared<Capture>();
  capture->id = ++g_state.next_id;
  capture->owns_graph = graph == nullptr;
  capture->graph = graph ? graph : std::make_shared<Graph>();
  if (!graph) capture->graph->handle = graphs.add(capture->graph);
  capture->graph->captures.fetch_add(1);
  capture->mode = mode;
  capture->thread = pthread_self();
  capture->origin = handle;
  g_state.active.insert(capture);
  g_state.streams[handle] = Member{std::move(capture), dependencies, {}};
  update_member_count();
}

// Whether a node that is captured on the origin stream now would depend, directly or not, on all
// captured work of the other streams. If `only` is set, only the work of this stream is checked.
bool joined(const std::shared_ptr<Capture>& capture, CUstream only = nullptr) {
  std::lock_guard<std::mutex> lock(graph_mutex);
  std::set<const void*> seen;
  std::vector<Node*> todo;
  const auto visit = [&](Node* node) {
    if (node != nullptr && seen.insert(node->handle).second) todo.push_back(node);
  };
  for (CUgraphNode node : g_state.streams[capture->origin].dependencies) {
    visit(graph_nodes.get(node).get());
  }
  while (!todo.empty()) {
    Node* node = todo.back();
    todo.pop_back();
    for (Node* before : node->dependencies) visit(before);
  }
  for (auto& item : g_state.streams) {
    if (item.second.capture != capture || (only != nullptr && item.first != only)) continue;
    for (CUgraphNode node : item.second.dependencies) {
      if (seen.count(node) == 0) return false;
    }
  }
  return true;
}

// Ends a capture and removes all streams from it (INVARIANTS.md R4). Events that were recorded in
// the capture keep referring to it. If the capture created its graph and `keep_graph` is false,
// removes the handle of the graph and returns the graph, which the caller must destroy after
// releasing the mutex. Otherwise returns null.
std::shared_ptr<Graph> end_capture(const std::shared_ptr<Capture>& capture, bool keep_graph) {
  for (auto it = g_state.streams.begin(); it != g_state.streams.end();) {
    it = it->second.capture == capture ? g_state.streams.erase(it) : std::next(it);
  }
  for (auto& item : g_state.events) {
    if (item.second.capture == capture) item.second.dependencies.clear();
  }
  capture->ended = true;
  capture->graph->captures.fetch_sub(1);
  std::shared_ptr<Graph> graph = std::move(capture->graph);
  g_state.active.erase(capture);
  update_member_count();
  if (keep_graph || !capture->owns_graph) return nullptr;
  return remove_graph(static_cast<CUgraph>(graph->handle));
}

// Implements cuStreamGetCaptureInfo. All outputs except `status` may be null.
void info(CUstream handle, int* status, uint64_t* id, CUgraph* graph,
          const CUgraphNode** dependencies, size_t* count, const CUgraphEdgeData** edges) {
  find_stream(handle);
  require(status != nullptr && (edges == nullptr || dependencies != nullptr));
  *status = kNone;
  if (id != nullptr) *id = 0;
  if (graph != nullptr) *graph = nullptr;
  if (dependencies != nullptr) *dependencies = nullptr;
  if (edges != nullptr) *edges = nullptr;
  if (count != nullptr) *count = 0;
  if (nothing_captured()) return;
  handle = stream_key(handle);
  std::lock_guard<std::mutex> lock(g_state.mutex);
  if (is_legacy(handle)) {
    for (auto& item : g_state.streams)
      require(!is_blocking(item.first), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  }
  Member* const member = g_state.member(handle);
  if (member == nullptr) return;
  const Capture& capture = *member->capture;
  *status = capture.invalid ? kInvalidated : kActive;
  if (capture.invalid) return;
  if (id != nullptr) *id = capture.id;
  if (graph != nullptr) *graph = static_cast<CUgraph>(capture.graph->handle);
  if (dependencies != nullptr) *dependencies = member->dependencies.data();
  if (count != nullptr) *count = member->dependencies.size();
  member->edges.resize(member->dependencies.size());
  if (edges != nullptr) *edges = member->edges.data();
}

}  // namespace

bool capture_work(CUstream stream, const Work& work) {
  return capture_node(stream, [&](Node& node) {
    node.type = type_of(work.kind);
    node.work = work;
  });
}

// Captures the launch of an executable graph as a child graph node, which gets the current
// parameters of the executable graph.
bool capture_launch(CUstream stream, const Exec& exec) {
  return capture_node(stream, [&](Node& node) {
    std::lock_guard<std::mutex> lock(graph_mutex);
    for (const FlatNode& flat : exec.flat) {
      require(!flat.condition, CUDA_ERROR_NOT_SUPPORTED,
              "a graph with conditional nodes cannot be launched on a capturing stream");
    }
    node.type = CU_GRAPH_NODE_TYPE_GRAPH;
    node.child = graph_of(exec);
  });
}

bool capture_record(CUstream stream, CUevent event) {
  if (nothing_captured()) return false;
  stream = stream_key(stream);
  std::lock_guard<std::mutex> lock(g_state.mutex);
  if (is_legacy(stream)) return invalidate_for_legacy_stream(), false;
  Member* const member = g_state.member(stream);
  if (member == nullptr) {
    // This record is not captured, so the event no longer belongs to a capture.
    g_state.events.erase(event);
  } else {
    require_valid(*member->capture);
    g_state.events[event] = *member;
  }
  update_member_count();
  return member != nullptr;
}

bool capture_wait(CUstream stream, CUevent event) {
  if (nothing_captured()) return false;
  stream = stream_key(stream);
  std::lock_guard<std::mutex> lock(g_state.mutex);
  auto captured_event = g_state.events.find(event);
  Member* const member = g_state.member(stream);
  if (captured_event == g_state.events.end()) {
    if (is_legacy(stream)) return invalidate_for_legacy_stream(), false;
    if (member == nullptr) return false;
    require_valid(*member->capture);
    invalidate(*member->capture, CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
               "a capturing stream cannot wait for an event that was recorded outside of the "
               "capture");
  }
  const std::shared_ptr<Capture>& event_capture = captured_event->second.capture;
  if (event_capture->ended) {
    if (member != nullptr) member->capture->invalid = true;
    refuse(CUDA_ERROR_CAPTURED_EVENT,
           "the event was last recorded in a capture that has ended; record it again");
  }
  require_valid(*event_capture);
  if (is_legacy(stream)) {
    invalidate(*event_capture, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
               "the legacy stream cannot join a capture");
  }
  if (member == nullptr) {
    g_state.streams[stream] = captured_event->second;  // the stream joins the capture
    update_member_count();
    return true;
  }
  require_valid(*member->capture);
  if (member->capture != event_capture) {
    event_capture->invalid = true;
    invalidate(*member->capture, CUDA_ERROR_STREAM_CAPTURE_MERGE,
               "the event was recorded in another capture");
  }
  merge(&member->dependencies, captured_event->second.dependencies);
  return true;
}

void capture_event_destroyed(CUevent event) {
  if (nothing_captured()) return;
  std::lock_guard<std::mutex> lock(g_state.mutex);
  g_state.events.erase(event);
  update_member_count();
}

void capture_stream_destroyed(CUstream stream) {
  if (nothing_captured()) return;
  std::shared_ptr<Graph> discarded;  // destroyed after the mutex is released
  std::lock_guard<std::mutex> lock(g_state.mutex);
  Member* const member = g_state.member(stream);
  if (member == nullptr) return;
  const std::shared_ptr<Capture> capture = member->capture;
  if (capture->origin == stream || !joined(capture, stream)) capture->invalid = true;
  if (capture->origin == stream) {
    discarded = end_capture(capture, false);
  } else {
    g_state.streams.erase(stream);
    update_member_count();
  }
}

void capture_reject_stream_sync(CUstream stream) {
  if (nothing_captured()) return;
  stream = stream_key(stream);
  std::lock_guard<std::mutex> lock(g_state.mutex);
  if (is_legacy(stream)) return invalidate_for_legacy_stream();
  Member* const member = g_state.member(stream);
  if (member == nullptr) return;
  require_valid(*member->capture);
  invalidate(*member->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
             "a capturing stream cannot be synchronized or queried");
}

void capture_reject_event_sync(CUevent event) {
  if (nothing_captured()) return;
  std::lock_guard<std::mutex> lock(g_state.mutex);
  auto it = g_state.events.find(event);
  if (it == g_state.events.end()) return;
  it->second.capture->invalid = true;
  refuse(CUDA_ERROR_CAPTURED_EVENT,
         "an event that was last recorded in a capture cannot be synchronized or queried");
}

void capture_reject_device_sync() {
  if (nothing_captured()) return;
  std::lock_guard<std::mutex> lock(g_state.mutex);
  for (auto& capture : g_state.active) capture->invalid = true;
  require(
      g_state.active.empty(), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
      "cuCtxSynchronize is not allowed while a stream is capturing; the capture is invalidated");
}

// Rejects a potentially unsafe call if the thread's capture mode and the modes of the active
// captures forbid it.
void capture_reject_unsafe(const char* api) {
  if (nothing_captured() || t_mode == kRelaxed) return;
  std::lock_guard<std::mutex> lock(g_state.mutex);
  bool forbidden = false;
  for (auto& capture : g_state.active) {
    const bool own = pthread_equal(capture->thread, pthread_self()) != 0;
    if (capture->mode == kRelaxed) continue;
    if (!own && (t_mode != kGlobal || capture->mode != kGlobal)) continue;
    capture->invalid = true;
    forbidden = true;
  }
  if (!forbidden) return;
  refuse(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
         std::string(api) +
             " is not allowed while a stream is capturing in this mode; the capture is "
             "invalidated");
}

}  // namespace softcuda

using namespace softcuda;

SC_API(cuStreamBeginCapture_v2, 10010, kNoLock, CUstream, stream, int, mode) {
  begin(stream, mode);
}

// The edges from `dependencies` to the first captured node must be full dependencies.
SC_API(cuStreamBeginCaptureToGraph, 12030, kNoLock, CUstream, stream, CUgraph, handle,
       const CUgraphNode*, dependencies, const CUgraphEdgeData*, edges, size_t, count, int, mode) {
  const auto graph = graphs.find(handle);
  for (size_t i = 0; edges != nullptr && i < count; ++i) {
    require(edges[i].type == 0 && edges[i].from_port == 0, CUDA_ERROR_NOT_SUPPORTED,
            "programmatic edges to captured nodes are not implemented");
  }
  begin(stream, mode, graph, checked_dependencies(dependencies, count, graph.get()));
}

SC_API(cuStreamEndCapture, 10000, kNoLock, CUstream, stream, CUgraph*, out) {
  InlineDestructorScope inline_destructors;
  require(out != nullptr);
  *out = nullptr;
  stream = stream_key(stream);
  std::shared_ptr<Graph> discarded;  // destroyed after the mutex is released
  std::lock_guard<std::mutex> lock(g_state.mutex);
  Member* const member = g_state.member(stream);
  require(member != nullptr, CUDA_ERROR_ILLEGAL_STATE, "the stream is not capturing");
  const std::shared_ptr<Capture> capture = member->capture;
  if (capture->origin != stream) {
    invalidate(*capture, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED,
               "the capture must be ended on the stream on which it began");
  }
  require(capture->mode == kRelaxed || pthread_equal(capture->thread, pthread_self()) != 0,
          CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,
          "a capture must be ended by the thread that began it, unless its mode is relaxed");
  const bool success = !capture->invalid && joined(capture);
  const auto graph = static_cast<CUgraph>(capture->graph->handle);
  discarded = end_capture(capture, success);
  require_valid(*capture);
  require(success, CUDA_ERROR_STREAM_CAPTURE_UNJOINED,
          "a stream that was forked from the capture has not been joined to the origin stream");
  *out = graph;
}

SC_API(cuStreamIsCapturing, 10000, kNoLock, CUstream, stream, int*, status) {
  info(stream, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}

SC_API(cuStreamGetCaptureInfo_v3, 12030, kNoLock, CUstream, stream, int*, status, uint64_t*, id,
       CUgraph*, graph, const CUgraphNode**, dependencies, const CUgraphEdgeData**, edges, size_t*,
       count) {
  info(stream, status, id, graph, dependencies, count, edges);
}

SC_API(cuStreamUpdateCaptureDependencies_v2, 12030, kNoLock, CUstream, stream, const CUgraphNode*,
       dependencies, const CUgraphEdgeData*, data, size_t, count, unsigned, flags) {
  require(flags <= 1);
  stream = stream_key(stream);
  std::lock_guard<std::mutex> lock(g_state.mutex);
  Member* const member = g_state.member(stream);
  require(member != nullptr, CUDA_ERROR_ILLEGAL_STATE, "the stream is not capturing");
  require_valid(*member->capture);
  const Dependencies nodes =
      checked_dependencies(dependencies, count, member->capture->graph.get());
  if (flags == 1) member->dependencies.clear();
  merge(&member->dependencies, nodes);
}

SC_API(cuThreadExchangeStreamCaptureMode, 10010, kNoLock, int*, mode) {
  require(mode != nullptr && *mode >= kGlobal && *mode <= kRelaxed);
  std::swap(*mode, t_mode);
}
