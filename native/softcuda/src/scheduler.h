// The op graph: what is queued, what is ready, and who runs it (invariants S1-S9).
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

// A kernel launch with its parameters translated. Immutable; shared by definitions and executables.
struct KernelWork {
  std::shared_ptr<Function> function;
  CUDA_KERNEL_NODE_PARAMS params;  // as the caller gave them, but for the pointers
  softcuda_dim3 grid{1, 1, 1}, block{1, 1, 1};
  unsigned shared_bytes = 0;
  std::vector<char> given;       // parameter bytes as the caller gave them
  std::vector<char> translated;  // with storage addresses in place of aliases
  std::vector<void*> arguments;  // into `translated`
  std::vector<std::pair<unsigned, std::shared_ptr<Allocation>>> pointers;  // parameter, allocation
};

struct CopyWork {
  Target dst, src;
  size_t bytes = 0;
  std::vector<char> staged;  // pageable source, taken at the call
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
// What the event nodes of one launch stand for, in the order of Program::event_nodes: of a record
// node the operation that the event now names, of a wait node the one that is waited for.
using LaunchEvents = std::vector<OpRef>;

// What one op does. A graph node's Work is built when the node is added or updated and shared.
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
  std::shared_ptr<Event> event;                // of a graph's event node
  std::shared_ptr<const LaunchEvents> events;  // of a graph launch
};

// One unit of the op graph: a stream operation (its own object) or a node of a Program.
struct Op {
  Work work;
  std::atomic<int> pending{1};
  std::atomic<int> refs{1};
  // Stream operations; guarded by the scheduler's mutex.
  std::vector<Op*> successors;
  bool done = false;
  uint64_t finished_ns = 0;
  // Nodes of a program.
  Program* program = nullptr;
  std::vector<unsigned> next;  // indices of dependent nodes
  int indegree = 0;
  unsigned event_slot = 0;  // of an event node: its place in LaunchEvents
  // Progress of a kernel: blocks handed out, workers inside.
  std::atomic<uint64_t> next_block{0};
  std::atomic<int> users{0};
};

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
  OpRef tail;  // guarded by the scheduler's mutex, like the next
  OpRef host;  // the last operation that contains host functions
};

struct Event {
  void* handle = nullptr;
  unsigned flags = 0;
  std::atomic<bool> destroyed{false};
  OpRef op;  // what was last recorded; guarded by the scheduler's mutex
};

// An instantiated graph's immutable plan plus the counters of its one running launch (S6).
struct Program {
  std::vector<std::unique_ptr<Op>> nodes;
  std::vector<unsigned> roots;
  std::atomic<int> remaining{0};
  std::atomic<int> flights{0};  // launches that hold this plan (G8)
  Op* launch = nullptr;         // the stream operation, or the conditional node whose body this is
  std::vector<std::pair<unsigned*, unsigned>> defaults;  // stored when a launch begins
  std::vector<Op*> event_nodes;
  std::shared_ptr<void> keep;  // user-object references held for this plan
};

// A launch's reference to a plan (G8); taken under graph_mutex.
std::shared_ptr<Program> in_flight(const std::shared_ptr<Program>& plan);

const CUstream kPerThread = reinterpret_cast<CUstream>(2);  // CU_STREAM_PER_THREAD
// The legacy stream for NULL and CU_STREAM_LEGACY, and the calling thread's own for
// CU_STREAM_PER_THREAD.
std::shared_ptr<Stream> find_stream(CUstream handle);
inline Handles<Stream>& streams = *new Handles<Stream>(0x51000000000000, "not a stream");
inline Handles<Event>& events = *new Handles<Event>(0x54000000000000, "not an event");
// What the driver's parameters stand for, checked; shared by the stream calls and graph nodes.
std::shared_ptr<CopyWork> make_copy(const CUDA_MEMCPY3D& params);
std::shared_ptr<FillWork> make_fill(const CUDA_MEMSET_NODE_PARAMS& params);

std::shared_ptr<Stream> new_stream(unsigned flags, int priority);
// Appends `work` to the stream; `after` adds one more dependency, `serial` is a slot that orders
// launches of one executable and receives the new op.
OpRef enqueue(Stream& stream, Work work, const OpRef& after = OpRef(), OpRef* serial = nullptr);
// What the scheduler's mutex guards: tails and host operations of streams, events.
OpRef load(const OpRef& slot);
void store(OpRef& slot, OpRef op);
void abandon(Stream& stream);  // destroyed; what is queued still runs
bool is_done(const OpRef& op);
uint64_t finished_ns(const OpRef& op);
// Prepares a launch's event nodes: waits name what was recorded before the launch, then the events
// of record nodes name this launch (V1). Null when there are none.
std::shared_ptr<const LaunchEvents> launch_events(const Program& program);
// Block until done, or until a fault; returns the sticky error if any.
CUresult wait_op(const OpRef& op, const char* what);
CUresult wait_idle(const char* what);

// ---- workers ----------------------------------------------------------------------------------
void start_workers();
// Makes ops runnable; returns one of device kind if `keep_one`, which the caller then runs itself.
Op* dispatch(Op* first, bool keep_one);
// Marks `op` finished and dispatches what becomes ready.
Op* complete(Op* op, bool keep_one);
uint64_t now_ns();

// ---- running device work (executor) -----------------------------------------------------------
class Executor;
Executor* make_executor(unsigned worker);
// Runs blocks [first, last) of a kernel; false after a fault (already reported).
bool run_blocks(Executor* executor, const KernelWork& work, uint64_t first, uint64_t last);
bool run_copy(Executor* executor, const CopyWork& work);
bool run_fill(Executor* executor, const FillWork& work);
// Again at every module load and, by one question to the system, at every launch: a handler that
// was installed since (faulthandler's, or some library's) becomes the one we chain to.
void install_fault_handlers();
void keep_fault_handlers();

}  // namespace softcuda
