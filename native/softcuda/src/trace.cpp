// The trace buffer and its exported functions (INVARIANTS.md T1 to T3).
#include "trace.h"

#include "graphs.h"

namespace softcuda {

std::atomic<bool> g_tracing{false};

namespace {

struct Span {
  const Program* program;
  unsigned node, worker;
  WorkKind kind;
  uint64_t begin_ns, end_ns;
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
  g_buffer.spans.push_back(Span{program_, node_, worker, kind_, begin_ns_, end_ns});
}

}  // namespace softcuda

using namespace softcuda;

extern "C" {
struct softcuda_span {
  // The CUgraphExec; 0 for a stream operation, or if the executable graph may have been changed
  // since then: an update, and some changes of a node, give it a new `Program`.
  uint64_t exec;
  // The CUgraphNode of the definition; 0 if `exec` is 0.
  uint64_t node;
  // Index of the worker; 0xffffffff for the host-function thread.
  uint32_t worker;
  // Kind of the operation: 1 kernel, 2 copy, 3 memset, 4 host function.
  uint32_t kind;
  // Start and end in nanoseconds of CLOCK_MONOTONIC, which %globaltimer returns on this device.
  uint64_t begin_ns, end_ns;
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
  std::lock_guard<std::mutex> lock(g_buffer.mutex);
  for (size_t i = 0; i < g_buffer.spans.size() && i < n; ++i) {
    const Span& span = g_buffer.spans[i];
    out[i] = softcuda_span{
        0, 0, span.worker, static_cast<uint32_t>(span.kind), span.begin_ns, span.end_ns};
    for (auto& exec : execs) {
      if (span.program == nullptr || exec->program.get() != span.program) continue;
      out[i].exec = reinterpret_cast<uint64_t>(exec->handle);
      if (span.node < exec->flat.size()) {
        out[i].node = reinterpret_cast<uint64_t>(exec->flat[span.node].source);
      }
    }
  }
  return g_buffer.spans.size();
}

// Returns the number of spans that were dropped because the buffer was full.
SC_EXPORT int64_t softcuda_trace_lost() {
  std::lock_guard<std::mutex> lock(g_buffer.mutex);
  return g_buffer.lost;
}
