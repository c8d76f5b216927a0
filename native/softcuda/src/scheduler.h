// Operations, streams, events, and the scheduler that runs operations when their dependencies are
// complete (invariants S1-S9).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "memory.h"
#include "runtime.h"

namespace softcuda {

struct Function;
struct Program;
struct Event;
struct Op;
struct MemopWork;
struct ConditionalWork;

size_t total_memory();
CUcontext primary_context();

// A kernel launch with translated parameters. Immutable; shared by graph definitions and
// executables.
struct KernelWork {
  std::shared_ptr<Function> function;
  CUDA_KERNEL_NODE_PARAMS params;  // the caller's values; kernelParams is not valid
  softcuda_dim3 grid{1, 1, 1}, block{1, 1, 1};
  unsigned shared_bytes = 0;
  std::vector<char> given;       // the caller's parameter bytes
  std::vector<char> translated;  // same with storage addresses instead of aliases
  std::vector<void*> arguments;  // address of each parameter in `translated`
  // (index of a pointer parameter, allocation that it points into).
  std::vector<std::pair<unsigned, std::shared_ptr<Allocation>>> pointers;
};

struct CopyWork {
  Target dst, src;
  size_t bytes = 0;
  std::vector<char> staged;  // contents of a pageable source at the time of the call
};

struct FillWork {
  Target dst;
  unsigned value = 0, element = 1;
  size_t bytes = 0;
};

struct HostWork {
  CUhostFn fn = nullptr;
  void* data = nullptr;
};

enum class WorkKind : uint8_t {
  none,
  kernel,
  copy,
  fill,
  host,
  graph,
  memop,
  conditional,
  event_record,
  event_wait
};

class OpRef;
// Operations of one launch's event nodes, in the order of Program::event_nodes (V1). For a record
// node: the operation that the event refers to after the launch. For a wait node: the operation
// that it waits for.
using LaunchEvents = std::vector<OpRef>;

// The work of one operation. That of a graph node is built when the node is added or updated, and
// shared by all launches.
struct Work {
  Work() = default;
  explicit Work(std::shared_ptr<const KernelWork> w)
      : kind(WorkKind::kernel), kernel(std::move(w)) {}
  explicit Work(std::shared_ptr<const CopyWork> w) : kind(WorkKind::copy), copy(std::move(w)) {}
  explicit Work(std::shared_ptr<const FillWork> w) : kind(WorkKind::fill), fill(std::move(w)) {}
  explicit Work(std::shared_ptr<const MemopWork> w) : kind(WorkKind::memop), memop(std::move(w)) {}
  explicit Work(std::shared_ptr<const ConditionalWork> w)
      : kind(WorkKind::conditional), conditional(std::move(w)) {}
  explicit Work(HostWork w) : kind(WorkKind::host), host(w) {}
  Work(WorkKind k, std::shared_ptr<Event> e) : kind(k), event(std::move(e)) {}

  WorkKind kind = WorkKind::none;
  std::shared_ptr<const KernelWork> kernel;
  std::shared_ptr<const CopyWork> copy;
  std::shared_ptr<const FillWork> fill;
  std::shared_ptr<const MemopWork> memop;
  std::shared_ptr<const ConditionalWork> conditional;
  HostWork host;
  std::shared_ptr<Program> program;
  std::shared_ptr<Event> event;                // for an event node
  std::shared_ptr<const LaunchEvents> events;  // for a graph launch
};

// One operation: either a stream operation or a node of a Program.
struct Op {
  Work work;
  std::atomic<int> pending{1};
  std::atomic<int> refs{1};
  // For stream operations; guarded by the scheduler's mutex.
  std::vector<Op*> successors;
  bool done = false;
  uint64_t finished_ns = 0;
  // For nodes of a program.
  Program* program = nullptr;
  std::vector<unsigned> next;  // indices of dependent nodes
  int indegree = 0;
  unsigned event_slot = 0;  // index of an event node in LaunchEvents
  // For kernels: the next block to run, and the number of workers that run blocks.
  std::atomic<uint64_t> next_block{0};
  std::atomic<int> users{0};
};

// A counted reference to an operation.
class OpRef {
 public:
  OpRef() = default;
  explicit OpRef(Op* op) : op_(op) {
    if (op_) op_->refs.fetch_add(1, std::memory_order_relaxed);
  }
  OpRef(const OpRef& other) : OpRef(other.op_) {}
  OpRef(OpRef&& other) noexcept : op_(other.op_) { other.op_ = nullptr; }
  OpRef& operator=(OpRef other) noexcept {
    std::swap(op_, other.op_);
    return *this;
  }
  ~OpRef();
  Op* get() const { return op_; }
  explicit operator bool() const { return op_ != nullptr; }

 private:
  Op* op_ = nullptr;
};

struct Stream {
  void* handle = nullptr;
  unsigned flags = 0;
  int priority = 0;
  uint64_t id = 0;
  // Both are guarded by the scheduler's mutex.
  OpRef tail;  // the last operation
  OpRef host;  // the last operation that contains host functions
};

struct Event {
  void* handle = nullptr;
  unsigned flags = 0;
  std::atomic<bool> destroyed{false};
  OpRef op;  // the operation last recorded; guarded by the scheduler's mutex
};

// The operations of an executable graph, with the counters of its one running launch (S6).
struct Program {
  std::vector<std::unique_ptr<Op>> nodes;
  std::vector<unsigned> roots;
  std::atomic<int> remaining{0};
  std::atomic<int> launches_in_flight{0};  // launches that hold a reference to this program (G8)
  Op* launch = nullptr;  // the stream operation, or the conditional node whose body this is
  // (condition, default value) of conditional handles with a default, stored when a launch begins.
  std::vector<std::pair<unsigned*, unsigned>> defaults;
  std::vector<Op*> event_nodes;
  std::shared_ptr<void> references;  // references to user objects
};

// Returns a launch's reference to a program (G8). The caller holds graph_mutex.
std::shared_ptr<Program> launch_reference(const std::shared_ptr<Program>& program);

const CUstream kPerThread = reinterpret_cast<CUstream>(2);  // CU_STREAM_PER_THREAD
// Returns the stream of a handle: for NULL and CU_STREAM_LEGACY the legacy stream, and for
// CU_STREAM_PER_THREAD the calling thread's default stream.
std::shared_ptr<Stream> find_stream(CUstream handle);
inline Handles<Stream>& streams =
    *new Handles<Stream>(0x51000000000000, "the stream handle is unknown or was destroyed");
inline Handles<Event>& events =
    *new Handles<Event>(0x54000000000000, "the event handle is unknown or was destroyed");
// Check and resolve parameters of stream calls and graph nodes.
std::shared_ptr<CopyWork> make_copy(const CUDA_MEMCPY3D& params);
std::shared_ptr<FillWork> make_fill(const CUDA_MEMSET_NODE_PARAMS& params);

// Range of stream priorities. They are stored but have no effect.
constexpr int kLeastPriority = 0;
constexpr int kGreatestPriority = -5;
std::shared_ptr<Stream> new_stream(unsigned flags, int priority);
// Appends an operation to the stream. `after` is one more operation that it depends on. `serial`
// orders the launches of one executable: the operation depends on the previous value and becomes
// the new one.
OpRef enqueue(Stream& stream, Work work, const OpRef& after = OpRef(), OpRef* serial = nullptr);
// Read and write an OpRef that the scheduler's mutex guards.
OpRef load(const OpRef& slot);
void store(OpRef& slot, OpRef op);
// Call when a stream is destroyed. Its queued work still runs and is waited for by wait_idle().
void detach(Stream& stream);
bool is_done(const OpRef& op);
uint64_t finished_ns(const OpRef& op);
// Resolves the event nodes of a launch (V1): wait nodes refer to the operations recorded before the
// launch, then the events of record nodes refer to this launch. Null without event nodes.
std::shared_ptr<const LaunchEvents> launch_events(const Program& program);
// Block until the operation, or all work, is complete. Return the sticky error.
CUresult wait_op(const OpRef& op, const char* description);
CUresult wait_idle(const char* description);

// ---- workers ----------------------------------------------------------------------------------
void start_workers();
// Starts a ready operation and those that become ready as a result. With `keep_one` returns one
// device operation, which the caller then runs.
Op* dispatch(Op* first, bool keep_one);
// Marks `op` as complete and dispatches the operations that become ready.
Op* complete(Op* op, bool keep_one);
uint64_t now_ns();

// ---- running device work (executor) -----------------------------------------------------------
class Executor;
Executor* make_executor(unsigned worker);
// Runs blocks [first, last) of a kernel. Returns false after a fault, which has been reported.
bool run_blocks(Executor* executor, const KernelWork& work, uint64_t first, uint64_t last);
bool run_copy(Executor* executor, const CopyWork& work);
bool run_fill(Executor* executor, const FillWork& work);
// Installs the signal handlers. A handler that another library (such as faulthandler) installed
// becomes the one that ours chains to (E4).
void install_fault_handlers();
// Installs them again if another library replaced them. Called at each launch; one system call.
void restore_fault_handlers();

}  // namespace softcuda
