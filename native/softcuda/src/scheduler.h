// Operations, streams and events, and the scheduler that starts each operation when its
// dependencies are complete (INVARIANTS.md S1 to S9).
#pragma once

#include <array>
#include <map>
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
struct MemoryWork;
namespace ptx {
struct Launch;
struct AccessLog;
}  // namespace ptx

size_t total_memory();
CUcontext primary_context();
// Whether `context` is the primary context or a context that cuCtxCreate has created.
bool is_context(CUcontext context);

// A kernel launch, with device addresses in its parameters translated to storage addresses.
// Immutable; shared by graph definitions and executables.
struct KernelWork {
  std::shared_ptr<Function> function;
  CUDA_KERNEL_NODE_PARAMS params;  // the caller's values; its pointer kernelParams is dangling
  softcuda_dim3 grid{1, 1, 1}, block{1, 1, 1};
  unsigned shared_bytes = 0;
  std::vector<char> original;    // the caller's parameter bytes
  std::vector<char> translated;  // the same bytes with storage addresses instead of aliases
  std::vector<void*> arguments;  // address of each parameter in `translated`
  // Pairs (index of a pointer parameter, allocation that the pointer refers to).
  std::vector<std::pair<unsigned, std::shared_ptr<Allocation>>> pointers;
};

// The size of a copy. A copy of contiguous bytes has one row and one slice.
struct CopyShape {
  size_t row_bytes = 0;
  size_t rows = 1;    // rows of a slice
  size_t slices = 1;  // slices of the copy; more than one for a three-dimensional copy
  bool empty() const { return row_bytes == 0; }
};

// The source or destination of a copy: its first byte, and the distances in bytes between the
// starts of its rows and of its slices.
struct CopySide {
  Target target;
  size_t row_pitch = 0, slice_pitch = 0;
  size_t offset(size_t slice, size_t row) const { return slice * slice_pitch + row * row_pitch; }
  // Number of bytes from the first to the last byte of the copy.
  size_t extent(const CopyShape& shape) const;
};

struct CopyWork {
  CUDA_MEMCPY3D params;  // the caller's values
  CopySide dst, src;
  CopyShape shape;
  // If the source is pageable: its contents, which were copied during the call (INVARIANTS.md C1).
  std::vector<char> staged;
};

struct FillWork {
  CUDA_MEMSET_NODE_PARAMS params;  // the caller's values
  Target dst;
  size_t row_bytes = 0;
  size_t rows = 1;
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
  mem_alloc,
  mem_free,
  event_record,
  event_wait
};

class OpRef;
// The operations to which the event nodes of one graph launch refer, in the order of
// Program::event_nodes (INVARIANTS.md V1). The entry of a record node is the operation that
// completes when the node runs. The entry of a wait node is the operation for which the node waits.
using LaunchEvents = std::vector<OpRef>;

// The work of one operation: its kind and the data of that kind. The work of a graph node is built
// when the node is added or updated; all launches of the graph share it.
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
  Work(WorkKind k, std::shared_ptr<MemoryWork> m) : kind(k), memory(std::move(m)) {}

  WorkKind kind = WorkKind::none;
  // Kernels only: whether the launch may start before the preceding kernel of its stream ends.
  bool programmatic = false;
  std::shared_ptr<const KernelWork> kernel;
  std::shared_ptr<const CopyWork> copy;
  std::shared_ptr<const FillWork> fill;
  std::shared_ptr<const MemopWork> memop;
  std::shared_ptr<const ConditionalWork> conditional;
  std::shared_ptr<MemoryWork> memory;
  HostWork host;
  std::shared_ptr<Program> program;
  std::shared_ptr<Event> event;                // for an event node
  std::shared_ptr<const LaunchEvents> events;  // for a graph launch
};

// One operation: a stream operation, or a node of a Program (an executable graph, or the body of a
// conditional node).
struct Op {
  Work work;
  std::atomic<int> pending{1};  // incomplete dependencies; the operation is ready at 0
  std::atomic<int> refs{1};
  // The members up to `finished_ns` are guarded by the scheduler's mutex. They are used by stream
  // operations, and by the operations that event record nodes complete (LaunchEvents), but not by
  // the nodes of a Program.
  uint64_t number = 0;  // ascends in the order of the calls of enqueue()
  std::vector<Op*> successors;
  bool done = false;
  uint64_t finished_ns = 0;
  // The members up to `event_slot` are used by the nodes of a Program only.
  Program* program = nullptr;
  std::vector<unsigned> next;  // indices of dependent nodes
  int indegree = 0;            // number of nodes on which this node depends
  // For an event node: the index of its operation in LaunchEvents.
  unsigned event_slot = 0;
  // `next_block` and `users` are used by kernel launches only (INVARIANTS.md S8).
  std::atomic<uint64_t> next_block{0};  // index of the next block to run
  std::atomic<int> users{0};            // number of workers that run blocks of the kernel
  // Kernels loaded from PTX only: the state of the running launch, which its workers share.
  std::shared_ptr<ptx::Launch> launch_state;
  // Kernel nodes from which programmatic edges lead to this one (INVARIANTS.md G9).
  std::vector<const Op*> primaries;
  bool precedes_programmatically = false;  // a programmatic edge leads from this node
  // The access logs are used by stream operations only, for the checks of programmatic edges. `log`
  // contains the accesses of this kernel. If this operation waits for the programmatic event of
  // another kernel, `event_log` contains the accesses of that kernel. `unordered` has one log for
  // each kernel that may still run until this kernel executes griddepcontrol.wait.
  std::shared_ptr<ptx::AccessLog> log, event_log;
  std::vector<std::shared_ptr<const ptx::AccessLog>> unordered;
};

// A counted reference to an operation, or no reference.
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

// The bytes of the union CUstreamAttrValue.
using AttributeValue = std::array<char, 64>;

struct Stream {
  void* handle = nullptr;
  unsigned flags = 0;
  int priority = 0;
  uint64_t id = 0;
  // For a stream of a green context: the context. Null for all other streams.
  CUcontext context = nullptr;
  // Attributes that were set by cuStreamSetAttribute (stream_attributes.cpp).
  std::map<int, AttributeValue> attributes;
  // The scheduler's mutex guards `tail` and `host`.
  OpRef tail;  // the operation that was enqueued last
  // The last enqueued operation that runs a host function. With SOFTCUDA_LOCK_MODEL=2,
  // cuLaunchHostFunc waits for it.
  OpRef host;
};

struct Event {
  void* handle = nullptr;
  unsigned flags = 0;
  std::atomic<bool> destroyed{false};
  // The operation after which the event is complete, set by the last record of the event. Guarded
  // by the scheduler's mutex.
  OpRef op;
};

// The operations of an executable graph or of a conditional body, with the counters of its running
// launch. Launches of one executable are serialized, so that one set of counters is enough
// (INVARIANTS.md S6).
struct Program {
  std::vector<std::unique_ptr<Op>> nodes;
  std::vector<unsigned> roots;    // indices of the nodes without dependencies
  std::atomic<int> remaining{0};  // nodes that are not complete
  // Number of launches that hold a reference to this program (INVARIANTS.md G8).
  std::atomic<int> launches_in_flight{0};
  // The operation that launched this program, while the launch runs: a stream operation, or for a
  // conditional body the conditional node.
  Op* launch = nullptr;
  // Recorded by traces: how often the program was begun and, for a conditional body, the number of
  // the launch that runs it (`runs` of the executable graph's program).
  uint64_t runs = 0;
  uint64_t launch_number = 0;
  // The conditional handles with a default value: the cell that holds the condition's value, and
  // the default. When a launch begins, the defaults are stored in the cells (INVARIANTS.md N3).
  std::vector<std::pair<unsigned*, unsigned>> defaults;
  // The cells of the conditional handles without a default value. When a launch begins, a
  // pseudorandom value is stored in each of them.
  std::vector<unsigned*> undefined_conditions;
  std::vector<Op*> event_nodes;
  std::vector<Op*> memory_nodes;     // allocation and free nodes
  std::shared_ptr<void> references;  // keeps the user objects alive (INVARIANTS.md U2)
};

// Returns a reference to the program for one launch and counts the launch as in flight until the
// reference is released (INVARIANTS.md G8). The caller holds graph_mutex.
std::shared_ptr<Program> launch_reference(const std::shared_ptr<Program>& program);

const CUstream kPerThread = reinterpret_cast<CUstream>(2);  // CU_STREAM_PER_THREAD
// Returns the stream of a handle. NULL and CU_STREAM_LEGACY are the legacy stream;
// CU_STREAM_PER_THREAD is the calling thread's default stream.
std::shared_ptr<Stream> find_stream(CUstream handle);
inline Handles<Stream>& streams =
    *new Handles<Stream>(0x51000000000000, "the stream handle is unknown or was destroyed");
inline Handles<Event>& events =
    *new Handles<Event>(0x54000000000000, "the event handle is unknown or was destroyed");
// Check the parameters of a copy or memset, resolve its addresses and return its work.
std::shared_ptr<CopyWork> make_copy(const CUDA_MEMCPY3D& params);
std::shared_ptr<FillWork> make_fill(const CUDA_MEMSET_NODE_PARAMS& params);
// Enqueue or capture a copy or memset. With `wait`, the call returns after the copy or memset is
// complete. With `read_now`, the source of the copy is read before the call returns.
CUresult enqueue_copy(const std::shared_ptr<CopyWork>& copy, CUstream stream, bool wait,
                      bool read_now = false);
CUresult enqueue_fill(const CUDA_MEMSET_NODE_PARAMS& params, CUstream stream, bool wait);

// Range of stream priorities. Priorities are stored but have no effect.
constexpr int kLeastPriority = 0;
constexpr int kGreatestPriority = -5;
std::shared_ptr<Stream> new_stream(unsigned flags, int priority);
// Appends an operation to the stream and returns a reference to the operation. If `after` is not
// empty, the operation also depends on the operation `after`. If `serial` is not null, it points to
// the last launch of an executable graph. The operation then also depends on this launch and takes
// its place in `*serial`, so that the launches of one executable graph are serialized.
OpRef enqueue(Stream& stream, Work work, const OpRef& after = OpRef(), OpRef* serial = nullptr);
// Read and write an OpRef under the scheduler's mutex.
OpRef load(const OpRef& slot);
void store(OpRef& slot, OpRef op);
// Must be called when a stream is destroyed. The work that was queued on the stream still runs, and
// wait_idle() still waits for it.
void detach(Stream& stream);
bool is_done(const OpRef& op);
// Completion time in nanoseconds of CLOCK_MONOTONIC; 0 for an empty reference.
uint64_t finished_ns(const OpRef& op);
// Returns the operations to which the event nodes of a new launch refer; null if the program has no
// event nodes (INVARIANTS.md V1). A wait node refers to the `Event::op` that its event has before
// the launch. For each record node, the function creates an operation, which completes when the
// node runs, and then stores it in the `Event::op` of the node's event.
std::shared_ptr<const LaunchEvents> launch_events(const Program& program);
// wait_op() blocks until the operation is complete; wait_idle() blocks until all queued work is
// complete. Both functions return the sticky error. `description` names the awaited work in the
// text of softcuda_describe().
CUresult wait_op(const OpRef& op, const char* description);
CUresult wait_idle(const char* description);
// Called by every call that frees memory or unloads a module, before it does so: waits like
// wait_idle(), unless SOFTCUDA_FREE=immediate. With SOFTCUDA_LOCK_MODEL=8, holds the context lock
// meanwhile.
void wait_to_free(const char* description);
// Called by every call that allocates memory: with SOFTCUDA_LOCK_MODEL=16, waits like wait_idle().
void wait_to_allocate();
// Ends the call that has enqueued the launch `op`: with SOFTCUDA_LAUNCH_BLOCKING=1, waits until the
// launch is complete and refuses the call if a fault has occurred.
void finish_launch(const OpRef& op);

// ---- workers ----------------------------------------------------------------------------------
void start_workers();
// Starts a ready operation. An operation that needs no worker completes immediately, and its
// successors are started too. Kernels, copies and memsets are queued for the workers. With
// `keep_one`, one of these operations is not queued but returned, and the calling worker must run
// it. Otherwise, or if there is no such operation, the function returns null.
Op* dispatch(Op* first, bool keep_one);
// Marks `op` as complete and dispatches the operations that become ready. The parameter `keep_one`
// and the return value have the same meaning as for dispatch().
Op* complete(Op* op, bool keep_one);
// Current time of CLOCK_MONOTONIC in nanoseconds.
uint64_t now_ns();

// ---- running device work (executor) -----------------------------------------------------------
class Executor;
Executor* make_executor(unsigned worker);
// Runs the blocks [first, last) of the kernel of an operation. Returns false after a fault, which
// has been recorded.
bool run_blocks(Executor* executor, const Op& op, uint64_t first, uint64_t last);
bool run_copy(Executor* executor, const CopyWork& work);
bool run_fill(Executor* executor, const FillWork& work);
// Installs the signal handlers of device faults. If another library (such as faulthandler) has
// installed a handler, the device's handler calls it for signals that device code did not cause
// (INVARIANTS.md E4).
void install_fault_handlers();
// Installs the signal handlers again if another library has replaced them. Called by each launch;
// costs one system call.
void restore_fault_handlers();

}  // namespace softcuda
