// Stream capture (invariants T1-T6).
//
// T1 A stream belongs to at most one capture; its next node depends on the nodes in `ends`.
// T2 A captured event carries a capture and nodes; waiting for it brings a stream into the capture.
// T3 An error that capture forbids invalidates the captures concerned: until cuStreamEndCapture
//    every call on their streams answers STREAM_CAPTURE_INVALIDATED.
// T4 cuStreamEndCapture takes all streams of the capture out of it, whatever it answers.
// T5 Dependencies never cross the border between captured and enqueued work.
// T6 The graph belongs to the capture until it ends well; then to the caller.
#include "capture.h"

#include <pthread.h>

#include <algorithm>
#include <set>

namespace softcuda {
namespace {

enum Mode : int { kGlobal = 0, kThreadLocal = 1, kRelaxed = 2 };
enum Status : int { kNone = 0, kActive = 1, kInvalidated = 2 };

struct Capture {
  uint64_t id = 0;
  std::shared_ptr<Graph> graph;
  int mode = kGlobal;
  pthread_t thread{};
  CUstream origin = nullptr;
  bool invalid = false;
  bool ended = false;
};
using Ends = std::vector<CUgraphNode>;
struct Member {
  std::shared_ptr<Capture> capture;
  Ends ends;
  std::vector<CUgraphEdgeData> edges;  // all zero; as long as `ends` when it was asked for
};

struct State {
  std::mutex mutex;  // taken before graph_mutex
  std::map<CUstream, Member> streams;
  std::map<CUevent, Member> events;
  std::set<std::shared_ptr<Capture>> active;
  uint64_t next_id = 0;

  Member* member(CUstream stream) {
    auto it = streams.find(stream);
    return it == streams.end() ? nullptr : &it->second;
  }
};
State& g_state = *new State;  // leaked on purpose, as all state that detached threads may use
// Members of both maps: 0 means that no hook has anything to do.
std::atomic<int> g_members{0};
thread_local int t_mode = kGlobal;

bool idle() { return g_members.load(std::memory_order_acquire) == 0; }
void settle() {
  g_members.store(static_cast<int>(g_state.streams.size() + g_state.events.size()),
                  std::memory_order_release);
}

[[noreturn]] void invalidate(Capture& capture, CUresult code, const std::string& why) {
  capture.invalid = true;
  refuse(code, why + "; the capture is invalidated");
}

void need_valid(const Capture& capture) {
  need(!capture.invalid, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
       "the capture was invalidated before");
}

// The handle under which a stream is kept: CU_STREAM_PER_THREAD names the calling thread's own.
CUstream own_handle(CUstream handle) {
  if (handle != kPerThread) return handle;
  return static_cast<CUstream>(find_stream(handle)->handle);
}

bool is_legacy(CUstream stream) { return reinterpret_cast<uint64_t>(stream) <= 1; }

// Whether the legacy stream waits for the stream, which must then not capture beside its use.
bool blocks(CUstream handle) {
  const auto stream = streams.get(handle);
  return stream && (stream->flags & CU_STREAM_NON_BLOCKING) == 0;
}

void forbid_legacy() {
  bool forbidden = false;
  for (auto& item : g_state.streams) {
    if (blocks(item.first)) item.second.capture->invalid = forbidden = true;
  }
  need(!forbidden, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
       "the legacy stream would wait for a capturing stream; the capture is invalidated");
}

void join(Ends* ends, const Ends& more) {
  for (CUgraphNode node : more) {
    if (std::find(ends->begin(), ends->end(), node) == ends->end()) ends->push_back(node);
  }
}

// Dependencies given by the caller, which must be nodes of the graph.
Ends ends_of(const CUgraphNode* nodes, size_t count, const Graph* graph) {
  need(count == 0 || nodes != nullptr);
  for (size_t i = 0; i < count; ++i) {
    const auto node = graph_nodes.get(nodes[i]);
    need(node && node->graph == graph, CUDA_ERROR_INVALID_VALUE,
         "a dependency is not a node of the graph");
  }
  return Ends(nodes, nodes + count);
}

// Makes the node with `make` when the stream captures.
template <class Make>
bool put(CUstream stream, const Make& make) {
  if (idle()) return false;
  stream = own_handle(stream);
  std::lock_guard<std::mutex> lock(g_state.mutex);
  if (is_legacy(stream)) return forbid_legacy(), false;
  Member* const member = g_state.member(stream);
  if (member == nullptr) return false;
  need_valid(*member->capture);
  auto node = std::make_shared<Node>();
  make(*node);
  CUgraphNode added = nullptr;
  add_node(&added, static_cast<CUgraph>(member->capture->graph->handle), member->ends.data(),
           member->ends.size(), node);
  if (node->child) node->child->handle = graphs.add(node->child);
  member->ends.assign(1, added);
  return true;
}

void begin(CUstream handle, int mode) {
  need(mode >= kGlobal && mode <= kRelaxed);
  need(!is_legacy(handle), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
       "the legacy stream cannot be captured");
  handle = static_cast<CUstream>(find_stream(handle)->handle);
  std::lock_guard<std::mutex> lock(g_state.mutex);
  need(g_state.member(handle) == nullptr, CUDA_ERROR_ILLEGAL_STATE,
       "the stream is capturing already");
  auto capture = std::make_shared<Capture>();
  capture->id = ++g_state.next_id;
  capture->graph = std::make_shared<Graph>();
  capture->graph->handle = graphs.add(capture->graph);
  capture->graph->captures.fetch_add(1);
  capture->mode = mode;
  capture->thread = pthread_self();
  capture->origin = handle;
  g_state.active.insert(capture);
  g_state.streams[handle] = Member{std::move(capture), {}, {}};
  settle();
}

// Whether every node that the capture's streams, or one of them, stand at leads to the origin.
bool joined(const std::shared_ptr<Capture>& capture, CUstream only = nullptr) {
  std::lock_guard<std::mutex> lock(graph_mutex);
  std::set<const void*> seen;
  std::vector<Node*> todo;
  const auto visit = [&](Node* node) {
    if (node != nullptr && seen.insert(node->handle).second) todo.push_back(node);
  };
  for (CUgraphNode end : g_state.streams[capture->origin].ends) visit(graph_nodes.get(end).get());
  while (!todo.empty()) {
    Node* node = todo.back();
    todo.pop_back();
    for (Node* before : node->dependencies) visit(before);
  }
  for (auto& item : g_state.streams) {
    if (item.second.capture != capture || (only != nullptr && item.first != only)) continue;
    for (CUgraphNode end : item.second.ends) {
      if (seen.count(end) == 0) return false;
    }
  }
  return true;
}

// Takes the capture's streams out of it (T4); events keep naming the ended capture. Returns the
// graph that nobody gets, to be destroyed without the mutex.
std::shared_ptr<Graph> leave(const std::shared_ptr<Capture>& capture, bool keep_graph) {
  for (auto it = g_state.streams.begin(); it != g_state.streams.end();) {
    it = it->second.capture == capture ? g_state.streams.erase(it) : std::next(it);
  }
  for (auto& item : g_state.events) {
    if (item.second.capture == capture) item.second.ends.clear();
  }
  capture->ended = true;
  capture->graph->captures.fetch_sub(1);
  std::shared_ptr<Graph> graph = std::move(capture->graph);
  g_state.active.erase(capture);
  settle();
  if (keep_graph) return nullptr;
  return take_graph(static_cast<CUgraph>(graph->handle));
}

void info(CUstream handle, int* status, uint64_t* id, CUgraph* graph,
          const CUgraphNode** dependencies, size_t* count, const CUgraphEdgeData** edges) {
  find_stream(handle);
  need(status != nullptr && (edges == nullptr || dependencies != nullptr));
  *status = kNone;
  if (id != nullptr) *id = 0;
  if (graph != nullptr) *graph = nullptr;
  if (dependencies != nullptr) *dependencies = nullptr;
  if (edges != nullptr) *edges = nullptr;
  if (count != nullptr) *count = 0;
  if (idle()) return;
  handle = own_handle(handle);
  std::lock_guard<std::mutex> lock(g_state.mutex);
  if (is_legacy(handle)) {
    for (auto& item : g_state.streams)
      need(!blocks(item.first), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  }
  Member* const member = g_state.member(handle);
  if (member == nullptr) return;
  const Capture& capture = *member->capture;
  *status = capture.invalid ? kInvalidated : kActive;
  if (capture.invalid) return;
  if (id != nullptr) *id = capture.id;
  if (graph != nullptr) *graph = static_cast<CUgraph>(capture.graph->handle);
  if (dependencies != nullptr) *dependencies = member->ends.data();
  if (count != nullptr) *count = member->ends.size();
  member->edges.resize(member->ends.size());
  if (edges != nullptr) *edges = member->edges.data();
}

}  // namespace

bool capture_work(CUstream stream, const Work& work) {
  return put(stream, [&](Node& node) {
    node.type = type_of(work.kind);
    node.work = work;
  });
}

// A graph launched on a capturing stream becomes a child graph, with the executable's parameters.
bool capture_launch(CUstream stream, const Exec& exec) {
  return put(stream, [&](Node& node) {
    for (const FlatNode& flat : exec.flat) {
      need(!flat.condition, CUDA_ERROR_NOT_SUPPORTED,
           "a graph with conditional nodes cannot become a child of the captured one");
    }
    node.type = CU_GRAPH_NODE_TYPE_GRAPH;
    std::lock_guard<std::mutex> lock(graph_mutex);
    node.child = graph_of(exec);
  });
}

bool capture_record(CUstream stream, CUevent event) {
  if (idle()) return false;
  stream = own_handle(stream);
  std::lock_guard<std::mutex> lock(g_state.mutex);
  if (is_legacy(stream)) return forbid_legacy(), false;
  Member* const member = g_state.member(stream);
  if (member == nullptr) {
    g_state.events.erase(event);  // recorded outside of any capture from now on
  } else {
    need_valid(*member->capture);
    g_state.events[event] = *member;
  }
  settle();
  return member != nullptr;
}

bool capture_wait(CUstream stream, CUevent event) {
  if (idle()) return false;
  stream = own_handle(stream);
  std::lock_guard<std::mutex> lock(g_state.mutex);
  auto of_event = g_state.events.find(event);
  Member* const mine = g_state.member(stream);
  if (of_event == g_state.events.end()) {
    if (is_legacy(stream)) return forbid_legacy(), false;
    if (mine == nullptr) return false;
    need_valid(*mine->capture);
    invalidate(*mine->capture, CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
               "a captured stream waits for an event recorded outside of the capture");
  }
  const std::shared_ptr<Capture>& theirs = of_event->second.capture;
  if (theirs->ended) {
    if (mine != nullptr) mine->capture->invalid = true;
    refuse(CUDA_ERROR_CAPTURED_EVENT, "the event was last recorded in an ended capture");
  }
  need_valid(*theirs);
  if (is_legacy(stream)) {
    invalidate(*theirs, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "the legacy stream cannot be captured");
  }
  if (mine == nullptr) {
    g_state.streams[stream] = of_event->second;  // a fork
    settle();
    return true;
  }
  need_valid(*mine->capture);
  if (mine->capture != theirs) {
    theirs->invalid = true;
    invalidate(*mine->capture, CUDA_ERROR_STREAM_CAPTURE_MERGE,
               "the event belongs to another capture");
  }
  join(&mine->ends, of_event->second.ends);
  return true;
}

void capture_forget_event(CUevent event) {
  if (idle()) return;
  std::lock_guard<std::mutex> lock(g_state.mutex);
  g_state.events.erase(event);
  settle();
}

void capture_forget_stream(CUstream stream) {
  if (idle()) return;
  std::shared_ptr<Graph> dead;
  std::lock_guard<std::mutex> lock(g_state.mutex);
  Member* const member = g_state.member(stream);
  if (member == nullptr) return;
  const std::shared_ptr<Capture> capture = member->capture;
  // A stream whose work the origin has joined may go (T2).
  if (capture->origin == stream || !joined(capture, stream)) capture->invalid = true;
  if (capture->origin == stream) {
    dead = leave(capture, false);
  } else {
    g_state.streams.erase(stream);
    settle();
  }
}

void capture_forbids_stream(CUstream stream) {
  if (idle()) return;
  stream = own_handle(stream);
  std::lock_guard<std::mutex> lock(g_state.mutex);
  if (is_legacy(stream)) return forbid_legacy();
  Member* const member = g_state.member(stream);
  if (member == nullptr) return;
  need_valid(*member->capture);
  invalidate(*member->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
             "a capturing stream cannot be waited for or queried");
}

void capture_forbids_event(CUevent event) {
  if (idle()) return;
  std::lock_guard<std::mutex> lock(g_state.mutex);
  auto it = g_state.events.find(event);
  if (it == g_state.events.end()) return;
  it->second.capture->invalid = true;
  refuse(CUDA_ERROR_CAPTURED_EVENT, "the event was last recorded in a capturing stream");
}

void capture_forbids_device() {
  if (idle()) return;
  std::lock_guard<std::mutex> lock(g_state.mutex);
  for (auto& capture : g_state.active) capture->invalid = true;
  need(g_state.active.empty(), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
       "waiting for the device while a stream captures; the capture is invalidated");
}

// Potentially unsafe calls, by the thread's mode and the modes of the captures there are.
void capture_forbids_unsafe(const char* api) {
  if (idle() || t_mode == kRelaxed) return;
  std::lock_guard<std::mutex> lock(g_state.mutex);
  bool forbidden = false;
  for (auto& capture : g_state.active) {
    const bool own = pthread_equal(capture->thread, pthread_self()) != 0;
    if (capture->mode == kRelaxed) continue;
    if (!own && (t_mode != kGlobal || capture->mode != kGlobal)) continue;
    capture->invalid = forbidden = true;
  }
  if (!forbidden) return;
  refuse(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
         std::string(api) +
             " is not allowed while a stream captures in this mode; the capture is invalidated");
}

}  // namespace softcuda

using namespace softcuda;

SC_API(cuStreamBeginCapture_v2, 10010, kNoLock, CUstream, stream, int, mode) {
  begin(stream, mode);
}

SC_API(cuStreamEndCapture, 10000, kNoLock, CUstream, stream, CUgraph*, out) {
  ApiThread here;
  need(out != nullptr);
  *out = nullptr;
  stream = own_handle(stream);
  std::shared_ptr<Graph> dead;
  std::lock_guard<std::mutex> lock(g_state.mutex);
  Member* const member = g_state.member(stream);
  need(member != nullptr, CUDA_ERROR_ILLEGAL_STATE, "the stream is not capturing");
  const std::shared_ptr<Capture> capture = member->capture;
  if (capture->origin != stream) {
    invalidate(*capture, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED,
               "the capture began on another stream");
  }
  need(capture->mode == kRelaxed || pthread_equal(capture->thread, pthread_self()) != 0,
       CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, "the capture began on another thread");
  const bool whole = !capture->invalid && joined(capture);
  const auto graph = static_cast<CUgraph>(capture->graph->handle);
  dead = leave(capture, whole);
  need_valid(*capture);
  need(whole, CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "a forked stream was not joined again");
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
  need(flags <= 1);
  stream = own_handle(stream);
  std::lock_guard<std::mutex> lock(g_state.mutex);
  Member* const member = g_state.member(stream);
  need(member != nullptr, CUDA_ERROR_ILLEGAL_STATE, "the stream is not capturing");
  need_valid(*member->capture);
  const Ends given = ends_of(dependencies, count, member->capture->graph.get());
  if (flags == 1) member->ends.clear();
  join(&member->ends, given);
}

SC_API(cuThreadExchangeStreamCaptureMode, 10010, kNoLock, int*, mode) {
  need(mode != nullptr && *mode >= kGlobal && *mode <= kRelaxed);
  std::swap(*mode, t_mode);
}
