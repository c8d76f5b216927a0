// The trace buffer and its exported functions (INVARIANTS.md T1 to T3).
#include "trace.h"

#include <map>

#include "conditionals.h"
#include "graphs.h"

namespace softcuda {

std::atomic<bool> g_tracing{false};

namespace {

struct Span {
  const Program* program;
  unsigned node, worker;
  WorkKind kind;
  uint64_t begin_ns, end_ns, launch, run;
};

struct Buffer {
  std::mutex mutex;
  std::vector<Span> spans;
  size_t capacity = 0;
  int64_t lost = 0;
};
Buffer& g_buffer = *new Buffer;

}  // namespace

void TraceSpan::begin(const Op* op) {
  program_ = op->program;
  kind_ = op->work.kind;
  if (program_ != nullptr) {
    while (node_ < program_->nodes.size() && program_->nodes[node_].get() != op) ++node_;
    launch_ = program_->launch_number;
    run_ = program_->runs;
  }
  begin_ns_ = now_ns();
}

void TraceSpan::record(unsigned worker) {
  const uint64_t end_ns = now_ns();
  std::lock_guard<std::mutex> lock(g_buffer.mutex);
  if (!g_tracing.load(std::memory_order_relaxed)) return;
  if (g_buffer.spans.size() == g_buffer.capacity) {
    ++g_buffer.lost;
    return;
  }
  g_buffer.spans.push_back(Span{program_, node_, worker, kind_, begin_ns_, end_ns, launch_, run_});
}

namespace {

// The executable graph that a program belongs to, and the nodes from which it was made.
struct Origin {
  void* exec;
  const std::vector<FlatNode>* flat;
};
using Origins = std::map<const Program*, Origin>;

// Adds a program and the programs of the conditional bodies inside it.
void add_origins(const Program& program, const Origin& origin, Origins* out) {
  out->emplace(&program, origin);
  for (size_t i = 0; i < origin.flat->size(); ++i) {
    const auto& bodies = (*origin.flat)[i].bodies;
    for (size_t b = 0; b < bodies.size(); ++b) {
      const Program& body = *program.nodes[i]->work.conditional->bodies[b];
      add_origins(body, Origin{origin.exec, &bodies[b]}, out);
    }
  }
}

}  // namespace
}  // namespace softcuda

using namespace softcuda;

extern "C" {
struct softcuda_span {
  // The CUgraphExec; 0 for a stream operation, or if the executable graph may have been changed
  // since then: an update, and some changes of a node, give it a new `Program`.
  uint64_t exec;
  // The CUgraphNode of the definition, which may be in a conditional body or a child graph; 0 if
  // `exec` is 0.
  uint64_t node;
  // Index of the worker; 0xffffffff for the host-function thread.
  uint32_t worker;
  // Kind of the operation: 1 kernel, 2 copy, 3 memset, 4 host function.
  uint32_t kind;
  // Start and end in nanoseconds of CLOCK_MONOTONIC, which %globaltimer returns on this device.
  uint64_t begin_ns, end_ns;
  // Number of the launch of the executable graph, and number of the run of the graph or conditional
  // body that contains the node. Both count from 1; 0 for a stream operation.
  uint64_t launch, run;
};
}

// Clears the buffer and starts to record up to `capacity` spans. A capacity of 0 stops recording
// and keeps the buffer.
SC_EXPORT void softcuda_trace(size_t capacity) {
  std::lock_guard<std::mutex> lock(g_buffer.mutex);
  g_tracing.store(capacity > 0, std::memory_order_relaxed);
  if (capacity == 0) return;
  g_buffer.spans.clear();
  g_buffer.spans.reserve(capacity);
  g_buffer.capacity = capacity;
  g_buffer.lost = 0;
}

// Copies up to `n` spans to `out`, in the order of their end times. Returns the number of spans in
// the buffer, which may be greater than `n`.
SC_EXPORT size_t softcuda_trace_read(softcuda_span* out, size_t n) {
  const std::vector<std::shared_ptr<Exec>> execs = graph_execs.all();
  std::lock_guard<std::mutex> graphs_lock(graph_mutex);
  Origins origins;
  for (auto& exec : execs) {
    add_origins(*exec->program, Origin{exec->handle, &exec->flat}, &origins);
  }
  std::lock_guard<std::mutex> lock(g_buffer.mutex);
  for (size_t i = 0; i < g_buffer.spans.size() && i < n; ++i) {
    const Span& span = g_buffer.spans[i];
    out[i] = softcuda_span{
        0,           0,           span.worker, static_cast<uint32_t>(span.kind), span.begin_ns,
        span.end_ns, span.launch, span.run};
    const auto found = origins.find(span.program);
    if (found == origins.end()) continue;
    const Origin& origin = found->second;
    out[i].exec = reinterpret_cast<uint64_t>(origin.exec);
    if (span.node < origin.flat->size()) {
      out[i].node = reinterpret_cast<uint64_t>((*origin.flat)[span.node].source);
    }
  }
  return g_buffer.spans.size();
}

// Returns the number of spans that were dropped because the buffer was full.
SC_EXPORT int64_t softcuda_trace_lost() {
  std::lock_guard<std::mutex> lock(g_buffer.mutex);
  return g_buffer.lost;
}
