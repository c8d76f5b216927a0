// What capture.cpp and capture_api.cpp share; nobody else needs it.
#pragma once

#include <pthread.h>

#include <set>

#include "capture.h"

namespace softcuda::capturing {

enum Mode : int { kGlobal = 0, kThreadLocal = 1, kRelaxed = 2 };
enum Status : int { kNone = 0, kActive = 1, kInvalidated = 2 };

struct Capture {
  uint64_t id = 0;
  std::shared_ptr<Graph> graph;
  bool given = false;  // into a graph of the caller
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
  std::mutex mutex;  // taken before graph_mutex()
  std::map<CUstream, Member> streams;
  std::map<CUevent, Member> events;
  std::set<std::shared_ptr<Capture>> active;
  uint64_t next_id = 0;
};

State& state();
extern thread_local int t_mode;
CUresult invalidate(Capture& capture, CUresult code, const std::string& why);
void join(Ends* ends, const Ends& more);
CUresult begin(CUstream handle, std::shared_ptr<Graph> graph, Ends ends, int mode);
// Whether every node that the capture's streams, or one of them, stand at leads to the origin.
bool joined(State& s, const std::shared_ptr<Capture>& capture, CUstream only = nullptr);
// The handle under which a stream is kept: CU_STREAM_PER_THREAD names the calling thread's own.
CUstream own_handle(CUstream handle);
// Takes the capture's streams out of it (T4); events keep naming the ended capture. Returns the
// graph that nobody gets, to be destroyed without the mutex.
std::shared_ptr<Graph> leave(State& s, const std::shared_ptr<Capture>& capture, bool keep_graph);
CUresult info(CUstream handle, int* status, uint64_t* id, CUgraph* graph,
              const CUgraphNode** dependencies, size_t* count, const CUgraphEdgeData** edges);

}  // namespace softcuda::capturing
