// Stream capture (invariants T1-T6 in capture.h and below).
//
// T1 A stream belongs to at most one capture; its next node depends on the nodes in `ends`.
// T2 A captured event carries a capture and nodes; waiting for it brings a stream into the capture.
// T3 An error that capture forbids invalidates the captures concerned: until cuStreamEndCapture
//    every call on their streams answers STREAM_CAPTURE_INVALIDATED.
// T4 cuStreamEndCapture takes all streams of the capture out of it, whatever it answers.
// T5 Dependencies never cross the border between captured and enqueued work.
// T6 The graph belongs to the capture until it ends well; then to the caller.
#include <algorithm>

#include "capture_state.h"

namespace softcuda {
namespace capturing {

State& state() {
  static State& s = *new State;  // leaked on purpose, as all state that detached threads may use
  return s;
}
// Members of both maps: 0 means that no hook has anything to do.
static std::atomic<int> g_members{0};
thread_local int t_mode = kGlobal;

static bool idle() { return g_members.load(std::memory_order_acquire) == 0; }
static void settle(State& s) {
  g_members.store(static_cast<int>(s.streams.size() + s.events.size()), std::memory_order_release);
}

CUresult invalidate(Capture& capture, CUresult code, const std::string& why) {
  capture.invalid = true;
  return refuse(code, why + "; the capture is invalidated");
}

CUstream own_handle(CUstream handle) {
  if (handle != kPerThread) return handle;
  return static_cast<CUstream>(find_stream(handle)->handle);
}

static bool is_legacy(CUstream stream) { return reinterpret_cast<uint64_t>(stream) <= 1; }

// Captures on streams that synchronise with the legacy stream.
static std::vector<std::shared_ptr<Capture>> blocking_captures(State& s) {
  std::vector<std::shared_ptr<Capture>> out;
  for (auto& item : s.streams) {
    std::shared_ptr<Stream> stream = find_stream(item.first);
    if (stream && (stream->flags & CU_STREAM_NON_BLOCKING) == 0) out.push_back(item.second.capture);
  }
  return out;
}

static std::optional<CUresult> forbid_legacy(State& s) {
  const auto blocking = blocking_captures(s);
  if (blocking.empty()) return std::nullopt;
  for (auto& capture : blocking) capture->invalid = true;
  return refuse(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
                "the legacy stream would wait for a capturing stream; the capture is invalidated");
}

void join(Ends* ends, const Ends& more) {
  for (CUgraphNode node : more) {
    if (std::find(ends->begin(), ends->end(), node) == ends->end()) ends->push_back(node);
  }
}

// Makes the node with `make` when the stream captures.
template <class Make>
static std::optional<CUresult> put(CUstream stream, const Make& make) {
  if (idle()) return std::nullopt;
  State& s = state();
  stream = own_handle(stream);
  std::lock_guard<std::mutex> lock(s.mutex);
  if (is_legacy(stream)) return forbid_legacy(s);
  auto it = s.streams.find(stream);
  if (it == s.streams.end()) return std::nullopt;
  Member& member = it->second;
  if (member.capture->invalid) {
    return refuse(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "the capture was invalidated before");
  }
  auto node = std::make_shared<Node>();
  make(*node);
  CUgraphNode added = nullptr;
  const CUresult r = add_node(&added, static_cast<CUgraph>(member.capture->graph->handle),
                              member.ends.data(), member.ends.size(), node);
  if (r != CUDA_SUCCESS) return r;
  if (node->child) node->child->handle = graphs().add(node->child);
  member.ends.assign(1, added);
  return CUDA_SUCCESS;
}

CUresult begin(CUstream handle, std::shared_ptr<Graph> graph, Ends ends, int mode) {
  if (mode < kGlobal || mode > kRelaxed) return CUDA_ERROR_INVALID_VALUE;
  if (is_legacy(handle)) {
    return refuse(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "the legacy stream cannot be captured");
  }
  if (!find_stream(handle)) return refuse(CUDA_ERROR_INVALID_HANDLE, "not a stream");
  handle = own_handle(handle);
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  if (s.streams.count(handle) != 0) {
    return refuse(CUDA_ERROR_ILLEGAL_STATE, "the stream is capturing already");
  }
  auto capture = std::make_shared<Capture>();
  capture->id = ++s.next_id;
  capture->given = graph != nullptr;
  capture->graph = graph ? std::move(graph) : std::make_shared<Graph>();
  if (!capture->given) capture->graph->handle = graphs().add(capture->graph);
  capture->graph->captures.fetch_add(1);
  capture->mode = mode;
  capture->thread = pthread_self();
  capture->origin = handle;
  s.active.insert(capture);
  s.streams[handle] = Member{std::move(capture), std::move(ends), {}};
  settle(s);
  return CUDA_SUCCESS;
}

bool joined(State& s, const std::shared_ptr<Capture>& capture, CUstream only) {
  std::lock_guard<std::mutex> lock(graph_mutex());
  std::set<const void*> seen;
  std::vector<Node*> todo;
  const auto visit = [&](Node* node) {
    if (node != nullptr && seen.insert(node->handle).second) todo.push_back(node);
  };
  for (CUgraphNode end : s.streams[capture->origin].ends) visit(graph_nodes().get(end).get());
  while (!todo.empty()) {
    Node* node = todo.back();
    todo.pop_back();
    for (Node* before : node->dependencies) visit(before);
  }
  for (auto& item : s.streams) {
    if (item.second.capture != capture || (only != nullptr && item.first != only)) continue;
    for (CUgraphNode end : item.second.ends) {
      if (seen.count(end) == 0) return false;
    }
  }
  return true;
}

// Takes the capture's streams out of it (T4); events keep naming the ended capture.
// Returns the graph that nobody gets, to be destroyed without the mutex.
std::shared_ptr<Graph> leave(State& s, const std::shared_ptr<Capture>& capture, bool keep_graph) {
  for (auto it = s.streams.begin(); it != s.streams.end();) {
    it = it->second.capture == capture ? s.streams.erase(it) : std::next(it);
  }
  for (auto& item : s.events) {
    if (item.second.capture == capture) item.second.ends.clear();
  }
  capture->ended = true;
  capture->graph->captures.fetch_sub(1);
  std::shared_ptr<Graph> graph = std::move(capture->graph);
  s.active.erase(capture);
  settle(s);
  if (keep_graph || capture->given) return nullptr;
  return take_graph(static_cast<CUgraph>(graph->handle));
}

CUresult info(CUstream handle, int* status, uint64_t* id, CUgraph* graph,
              const CUgraphNode** dependencies, size_t* count, const CUgraphEdgeData** edges) {
  if (!find_stream(handle)) return CUDA_ERROR_INVALID_HANDLE;
  if (status == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *status = kNone;
  if (idle()) return CUDA_SUCCESS;
  State& s = state();
  handle = own_handle(handle);
  std::lock_guard<std::mutex> lock(s.mutex);
  if (is_legacy(handle)) {
    return blocking_captures(s).empty() ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  }
  auto it = s.streams.find(handle);
  if (it == s.streams.end()) return CUDA_SUCCESS;
  const Capture& capture = *it->second.capture;
  *status = capture.invalid ? kInvalidated : kActive;
  if (capture.invalid) return CUDA_SUCCESS;
  if (id != nullptr) *id = capture.id;
  if (graph != nullptr) *graph = static_cast<CUgraph>(capture.graph->handle);
  if (dependencies != nullptr) *dependencies = it->second.ends.data();
  if (count != nullptr) *count = it->second.ends.size();
  if (edges != nullptr) {
    it->second.edges.resize(it->second.ends.size());
    *edges = it->second.edges.data();
  }
  return CUDA_SUCCESS;
}

}  // namespace capturing

using namespace capturing;

bool capture_possible() { return !idle(); }

std::optional<CUresult> capture_work(CUstream stream, CUgraphNodeType type, const Work& work) {
  return put(stream, [&](Node& node) {
    node.type = type;
    node.work = work;
  });
}

std::optional<CUresult> capture_copy(CUstream stream, const Work& work, const CUDA_MEMCPY3D& p) {
  return put(stream, [&](Node& node) {
    node.type = CU_GRAPH_NODE_TYPE_MEMCPY;
    node.work = work;
    node.copy_params = p;
  });
}

std::optional<CUresult> capture_fill(CUstream stream, const Work& work,
                                     const CUDA_MEMSET_NODE_PARAMS& p) {
  return put(stream, [&](Node& node) {
    node.type = CU_GRAPH_NODE_TYPE_MEMSET;
    node.work = work;
    node.fill_params = p;
  });
}

// A graph launched on a capturing stream becomes a child graph, with the executable's parameters.
std::optional<CUresult> capture_launch(CUstream stream, const Exec& exec) {
  if (idle()) return std::nullopt;
  bool capturing = false;
  stream = own_handle(stream);
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    capturing = state().streams.count(stream) != 0;
  }
  for (const FlatNode& node : exec.flat) {
    if (!capturing || !node.condition) continue;
    return refuse(CUDA_ERROR_NOT_SUPPORTED,
                  "a graph with conditional nodes cannot become a child of the captured one");
  }
  return put(stream, [&](Node& node) {
    node.type = CU_GRAPH_NODE_TYPE_GRAPH;
    std::lock_guard<std::mutex> lock(graph_mutex());
    node.child = graph_of(exec);
  });
}

std::optional<CUresult> capture_record(CUstream stream, CUevent event) {
  if (idle()) return std::nullopt;
  State& s = state();
  stream = own_handle(stream);
  std::lock_guard<std::mutex> lock(s.mutex);
  if (is_legacy(stream)) return forbid_legacy(s);
  auto it = s.streams.find(stream);
  if (it == s.streams.end()) {
    s.events.erase(event);  // recorded outside of any capture from now on
    settle(s);
    return std::nullopt;
  }
  if (it->second.capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  s.events[event] = it->second;
  settle(s);
  return CUDA_SUCCESS;
}

std::optional<CUresult> capture_wait(CUstream stream, CUevent event) {
  if (idle()) return std::nullopt;
  State& s = state();
  stream = own_handle(stream);
  std::lock_guard<std::mutex> lock(s.mutex);
  auto of_event = s.events.find(event);
  auto of_stream = s.streams.find(stream);
  if (of_event == s.events.end()) {
    if (is_legacy(stream)) return forbid_legacy(s);
    if (of_stream == s.streams.end()) return std::nullopt;
    if (of_stream->second.capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    return invalidate(*of_stream->second.capture, CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
                      "a captured stream waits for an event recorded outside of the capture");
  }
  const std::shared_ptr<Capture>& theirs = of_event->second.capture;
  if (theirs->ended) {
    if (of_stream != s.streams.end()) of_stream->second.capture->invalid = true;
    return refuse(CUDA_ERROR_CAPTURED_EVENT, "the event was last recorded in an ended capture");
  }
  if (theirs->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (is_legacy(stream)) {
    return invalidate(*theirs, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
                      "the legacy stream cannot be captured");
  }
  if (of_stream == s.streams.end()) {
    s.streams[stream] = of_event->second;  // a fork
    settle(s);
    return CUDA_SUCCESS;
  }
  Member& mine = of_stream->second;
  if (mine.capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (mine.capture != theirs) {
    theirs->invalid = true;
    return invalidate(*mine.capture, CUDA_ERROR_STREAM_CAPTURE_MERGE,
                      "the event belongs to another capture");
  }
  join(&mine.ends, of_event->second.ends);
  return CUDA_SUCCESS;
}

void capture_forget_event(CUevent event) {
  if (idle()) return;
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.events.erase(event);
  settle(s);
}

void capture_forget_stream(CUstream stream) {
  if (idle()) return;
  State& s = state();
  std::shared_ptr<Graph> dead;
  std::lock_guard<std::mutex> lock(s.mutex);
  auto it = s.streams.find(stream);
  if (it == s.streams.end()) return;
  const std::shared_ptr<Capture> capture = it->second.capture;
  // A stream whose work the origin has joined may go (T2).
  if (capture->origin == stream || !joined(s, capture, stream)) capture->invalid = true;
  if (capture->origin == stream) {
    dead = leave(s, capture, false);
  } else {
    s.streams.erase(it);
    settle(s);
  }
}

CUresult capture_forbids_stream(CUstream stream) {
  if (idle()) return CUDA_SUCCESS;
  State& s = state();
  stream = own_handle(stream);
  std::lock_guard<std::mutex> lock(s.mutex);
  if (is_legacy(stream)) return forbid_legacy(s).value_or(CUDA_SUCCESS);
  auto it = s.streams.find(stream);
  if (it == s.streams.end()) return CUDA_SUCCESS;
  if (it->second.capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  return invalidate(*it->second.capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                    "a capturing stream cannot be waited for or queried");
}

CUresult capture_forbids_event(CUevent event) {
  if (idle()) return CUDA_SUCCESS;
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  auto it = s.events.find(event);
  if (it == s.events.end()) return CUDA_SUCCESS;
  it->second.capture->invalid = true;
  return refuse(CUDA_ERROR_CAPTURED_EVENT, "the event was last recorded in a capturing stream");
}

CUresult capture_forbids_device() {
  if (idle()) return CUDA_SUCCESS;
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  if (s.active.empty()) return CUDA_SUCCESS;
  for (auto& capture : s.active) capture->invalid = true;
  return refuse(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                "waiting for the device while a stream captures; the capture is invalidated");
}

// Potentially unsafe calls, by the thread's mode and the modes of the captures there are.
CUresult capture_forbids_unsafe(const char* api) {
  if (idle() || t_mode == kRelaxed) return CUDA_SUCCESS;
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  bool forbidden = false;
  for (auto& capture : s.active) {
    const bool own = pthread_equal(capture->thread, pthread_self()) != 0;
    if (capture->mode == kRelaxed) continue;
    if (!own && (t_mode != kGlobal || capture->mode != kGlobal)) continue;
    capture->invalid = true;
    forbidden = true;
  }
  if (!forbidden) return CUDA_SUCCESS;
  return refuse(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                std::string(api) +
                    " is not allowed while a stream captures in this mode; the "
                    "capture is invalidated");
}

}  // namespace softcuda
