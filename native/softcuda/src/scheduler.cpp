// Dependencies between operations: streams, events and graph launches (INVARIANTS.md S1 to S6, V1
// to V3).
#include "scheduler.h"

#include <time.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>

#include "conditionals.h"
#include "memops.h"
#include "memory_pools.h"
#include "ptx_library.h"

namespace softcuda {
namespace {

// Never destroyed, because exit() hangs if it destroys a condition variable on which a detached
// worker waits.
std::mutex& g_mutex = *new std::mutex;
std::condition_variable& g_done = *new std::condition_variable;
int g_waiters = 0;
uint64_t g_last_number = 0;
Stream& g_legacy = *new Stream;
std::shared_ptr<Stream>& g_legacy_ref = *new std::shared_ptr<Stream>(&g_legacy, [](Stream*) {});

// The last operations of destroyed streams. The work that was queued on these streams still runs,
// so wait_idle() must wait for it.
std::vector<OpRef>& g_detached_tails = *new std::vector<OpRef>;

void unref(Op* op) {
  if (op->refs.fetch_sub(1, std::memory_order_acq_rel) == 1) delete op;
}

// Makes `op` depend on an operation, unless that operation is done. The caller holds the
// scheduler's mutex.
void add_dependency(Op* op, const OpRef& dependency) {
  Op* before = dependency.get();
  if (before == nullptr || before->done || before == op) return;
  before->successors.push_back(op);
  op->pending.fetch_add(1, std::memory_order_relaxed);
}

// Records that the host has seen the completion of an operation. All later launches then see the
// operation's writes, so their accesses need no check against its log.
void know_complete(const Op& op) {
  if (op.log) op.log->known.store(true, std::memory_order_relaxed);
  if (op.event_log) op.event_log->known.store(true, std::memory_order_relaxed);
}

}  // namespace

OpRef::~OpRef() {
  if (op_ != nullptr) unref(op_);
}

uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
}

std::shared_ptr<Stream> new_stream(unsigned flags, int priority) {
  static std::atomic<uint64_t> ids{1};
  auto stream = std::make_shared<Stream>();
  stream->flags = flags;
  stream->priority = priority;
  stream->id = ++ids;
  stream->handle = streams.add(stream);
  return stream;
}

namespace {
// A thread's default stream: a blocking stream that is destroyed with the thread.
struct ThreadStream {
  ThreadStream() : stream(new_stream(0, 0)) {}
  ~ThreadStream() {
    streams.take(stream->handle);
    detach(*stream);
  }
  std::shared_ptr<Stream> stream;
};
}  // namespace

std::shared_ptr<Stream> find_stream(CUstream handle) {
  const auto value = reinterpret_cast<uint64_t>(handle);
  if (value <= 1) return g_legacy_ref;  // NULL and CU_STREAM_LEGACY
  if (handle == kPerThread) {
    thread_local ThreadStream thread_stream;
    return thread_stream.stream;
  }
  return streams.find(handle);
}

// If `op` is a kernel, creates its access log, and adds to `op->unordered` the log of the kernel
// that may still run until `op` executes griddepcontrol.wait (INVARIANTS.md P13). That kernel is
// the preceding kernel of the stream, if the launch is programmatic, or the kernel whose
// programmatic event the stream waits for. The caller holds the scheduler's mutex.
//
// `tail` is the previous operation of the stream, and `after` another operation on which `op`
// depends; each may be null. Operations of the legacy stream and of other streams wait for each
// other (INVARIANTS.md S4). `between` is the number of the last operation for which `op` waits for
// this reason; 0 if there is none. If that operation was enqueued after `tail`, nothing is added to
// `op->unordered`: the operation waits for `tail`, so `tail` is complete before `op` starts.
static void note_programmatic_order(Op* op, const OpRef& tail, const OpRef& after,
                                    uint64_t between) {
  if (after) op->event_log = after.get()->log;
  if (op->work.kind != WorkKind::kernel) return;
  op->log = ptx::make_access_log(*op->work.kernel);
  if (!tail || between > tail.get()->number) return;
  const bool direct = op->work.programmatic && tail.get()->log != nullptr;
  const auto& preceding = direct ? tail.get()->log : tail.get()->event_log;
  const bool known = !preceding || preceding->known.load(std::memory_order_relaxed);
  if (!known) op->unordered.push_back(preceding);
}

OpRef enqueue(Stream& stream, Work work, const OpRef& after, OpRef* serial) {
  auto* op = new Op;  // its first reference belongs to the scheduler (INVARIANTS.md S3)
  op->work = std::move(work);
  OpRef ref(op);
  const bool legacy = &stream == &g_legacy;
  std::vector<std::shared_ptr<Stream>> others;
  if (legacy) others = streams.all();
  {
    std::lock_guard<std::mutex> lock(g_mutex);
    op->number = ++g_last_number;
    add_dependency(op, stream.tail);
    // The legacy stream and every blocking stream wait for each other (INVARIANTS.md S4).
    uint64_t between = 0;
    const auto wait_for = [&](const OpRef& other) {
      add_dependency(op, other);
      if (other) between = std::max(between, other.get()->number);
    };
    if (legacy) {
      for (auto& other : others) {
        if ((other->flags & CU_STREAM_NON_BLOCKING) == 0) wait_for(other->tail);
      }
    } else if ((stream.flags & CU_STREAM_NON_BLOCKING) == 0) {
      wait_for(g_legacy.tail);
    }
    note_programmatic_order(op, stream.tail, after, between);
    add_dependency(op, after);
    if (serial != nullptr) {
      add_dependency(op, *serial);
      *serial = ref;
    }
    stream.tail = ref;
  }
  if (op->pending.fetch_sub(1, std::memory_order_acq_rel) == 1) dispatch(op, false);
  return ref;
}

OpRef load(const OpRef& slot) {
  std::lock_guard<std::mutex> lock(g_mutex);
  return slot;
}

void store(OpRef& slot, OpRef op) {
  std::lock_guard<std::mutex> lock(g_mutex);
  slot = std::move(op);
}

bool is_done(const OpRef& op) {
  std::lock_guard<std::mutex> lock(g_mutex);
  if (!op || !op.get()->done) return !op;
  know_complete(*op.get());
  return true;
}

uint64_t finished_ns(const OpRef& op) {
  std::lock_guard<std::mutex> lock(g_mutex);
  return op ? op.get()->finished_ns : 0;
}

std::shared_ptr<const LaunchEvents> launch_events(const Program& program) {
  if (program.event_nodes.empty()) return nullptr;
  auto resolved = std::make_shared<LaunchEvents>(program.event_nodes.size());
  std::lock_guard<std::mutex> lock(g_mutex);
  for (const Op* node : program.event_nodes) {
    if (node->work.kind != WorkKind::event_wait) continue;
    (*resolved)[node->event_slot] = node->work.event->op;
  }
  for (const Op* node : program.event_nodes) {
    if (node->work.kind != WorkKind::event_record) continue;
    // finish() releases the first reference of this operation when the record node completes it
    // (INVARIANTS.md S3).
    const OpRef signal(new Op);
    node->work.event->op = signal;
    (*resolved)[node->event_slot] = signal;
  }
  return resolved;
}

std::shared_ptr<Program> launch_reference(const std::shared_ptr<Program>& program) {
  program->launches_in_flight.fetch_add(1, std::memory_order_relaxed);
  return {program.get(), [owner = program](Program* p) {
            p->launches_in_flight.fetch_sub(1, std::memory_order_release);
          }};
}

namespace {
CUresult wait_done(const OpRef& op, const char* description) {
  if (!op) return sticky();
  WaitScope waiting(description);
  std::unique_lock<std::mutex> lock(g_mutex);
  ++g_waiters;
  g_done.wait(lock, [&] { return op.get()->done; });
  --g_waiters;
  know_complete(*op.get());
  lock.unlock();
  return sticky();
}
}  // namespace

CUresult wait_op(const OpRef& op, const char* description) {
  may_wait_for_device(description);
  const CUresult r = wait_done(op, description);
  std::fflush(stdout);  // output of printf in kernels
  return r;
}

void finish_launch(const OpRef& op) {
  if (!settings().launch_blocking) return;
  const CUresult r = wait_op(op, "a launch to complete (SOFTCUDA_LAUNCH_BLOCKING)");
  require(r == CUDA_SUCCESS, r);
}

void detach(Stream& stream) {
  std::lock_guard<std::mutex> lock(g_mutex);
  g_detached_tails.erase(std::remove_if(g_detached_tails.begin(), g_detached_tails.end(),
                                        [](const OpRef& op) { return op.get()->done; }),
                         g_detached_tails.end());
  if (stream.tail && !stream.tail.get()->done) g_detached_tails.push_back(stream.tail);
}

CUresult wait_idle(const char* description) {
  may_wait_for_device(description);
  std::vector<OpRef> tails;
  {
    std::lock_guard<std::mutex> lock(g_mutex);
    tails = g_detached_tails;
    tails.push_back(g_legacy.tail);
  }
  for (auto& stream : streams.all()) tails.push_back(load(stream->tail));
  for (auto& tail : tails) wait_done(tail, description);
  std::fflush(stdout);
  return sticky();
}

namespace {

// Starts a launch of a program (the operations of an executable graph or of a conditional body):
// resets the counters of the program and appends its root nodes to `ready`. When all nodes are
// complete, finish() continues with `op`, the graph launch or the conditional node.
void begin_program(Program& program, Op* op, std::vector<Op*>* ready) {
  program.launch = op;
  ++program.runs;
  program.launch_number = op->program != nullptr ? op->program->launch_number : program.runs;
  program.remaining.store(static_cast<int>(program.nodes.size()), std::memory_order_relaxed);
  for (auto& node : program.nodes) node->pending.store(node->indegree, std::memory_order_relaxed);
  for (unsigned root : program.roots) ready->push_back(program.nodes[root].get());
}

// Starts the next body of a conditional node. Returns false if no body runs, so that the node is
// complete.
bool begin_body(Op* op, std::vector<Op*>* ready, bool first) {
  Program* body = next_body(*op->work.conditional, first);
  if (body == nullptr) return false;
  begin_program(*body, op, ready);
  return true;
}

// Completes an operation and appends the operations that become ready to `ready`.
void finish(Op* op, std::vector<Op*>* ready) {
  while (op->program != nullptr) {
    Program* program = op->program;
    for (unsigned index : op->next) {
      Op* successor = program->nodes[index].get();
      if (successor->pending.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        ready->push_back(successor);
      }
    }
    count_add(Counter::node);
    Op* launch = program->launch;
    // The worker that decrements the counter to zero completes the launch. A worker whose decrement
    // leaves another value must not access the program afterwards, because the program may already
    // be freed.
    if (program->remaining.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    op = launch;
    if (op->work.kind == WorkKind::conditional && begin_body(op, ready, false)) return;
  }
  // Release the operands before `done` is set, so that a thread that synchronizes with the
  // operation and then reads the resource counters sees their final values (INVARIANTS.md S5).
  op->work = Work();
  std::vector<Op*> successors;
  {
    std::lock_guard<std::mutex> lock(g_mutex);
    op->done = true;
    op->finished_ns = now_ns();
    successors.swap(op->successors);
    if (g_waiters > 0) g_done.notify_all();
  }
  unref(op);
  for (Op* successor : successors) {
    if (successor->pending.fetch_sub(1, std::memory_order_acq_rel) == 1)
      ready->push_back(successor);
  }
}

// Returns the operation of an event node in the current launch: the operation for which a wait node
// waits, or the operation that a record node completes.
const OpRef& event_of(const Op& node) {
  return (*node.program->launch->work.events)[node.event_slot];
}

// Starts an event wait node. Returns true if the operation for which the node waits is complete.
// Otherwise returns false, and the node becomes ready when that operation completes
// (INVARIANTS.md V2).
bool begin_wait(Op* op) {
  Op* before = event_of(*op).get();
  if (before == nullptr) return true;
  std::lock_guard<std::mutex> lock(g_mutex);
  if (before->done) return true;
  op->pending.store(1, std::memory_order_relaxed);
  before->successors.push_back(op);
  return false;
}

// Returns a pseudorandom value for a condition without a default value. About half of the returned
// values are 0.
unsigned undefined_value() {
  static std::atomic<uint64_t> calls{0};
  uint64_t x = calls.fetch_add(1, std::memory_order_relaxed) * 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return (x >> 63) != 0 ? static_cast<unsigned>(x) | 1u : 0u;
}

// Starts a graph launch. The launch completes immediately if the graph is empty or if a fault has
// occurred.
void begin_launch(Op* op, std::vector<Op*>* ready) {
  Program& program = *op->work.program;
  if (program.nodes.empty() || sticky() != CUDA_SUCCESS) {
    // Complete the operations of the record nodes, so that operations that wait for the events
    // proceed (INVARIANTS.md V3).
    for (const Op* node : program.event_nodes) {
      if (node->work.kind != WorkKind::event_record) continue;
      const OpRef signal = (*op->work.events)[node->event_slot];
      finish(signal.get(), ready);
    }
    finish(op, ready);
    return;
  }
  for (auto& item : program.defaults) {
    __atomic_store_n(item.first, item.second, __ATOMIC_RELEASE);
  }
  for (unsigned* cell : program.undefined_conditions) {
    __atomic_store_n(cell, undefined_value(), __ATOMIC_RELEASE);
  }
  begin_program(program, op, ready);
}

}  // namespace

void push_host(Op* op);
void push_device(Op* op);

// Starts all operations in `ready`, and the operations that become ready as a result. With
// `keep_one`, one operation is not queued but returned, and the calling worker runs it.
static Op* dispatch_all(std::vector<Op*>* ready, bool keep_one) {
  Op* kept = nullptr;
  for (size_t i = 0; i < ready->size(); ++i) {
    Op* op = (*ready)[i];
    const bool event = op->work.kind >= WorkKind::event_record;
    if (op->work.kind != WorkKind::none && !event && hold_behind_wait(op)) continue;
    switch (op->work.kind) {
      case WorkKind::none:
        finish(op, ready);
        break;
      case WorkKind::graph:
        begin_launch(op, ready);
        break;
      case WorkKind::conditional:
        if (!begin_body(op, ready, true)) finish(op, ready);
        break;
      case WorkKind::host:
        push_host(op);
        break;
      case WorkKind::mem_alloc:
      case WorkKind::mem_free:
        // After a fault no memory is freed, because its users did not run (INVARIANTS.md E2).
        if (sticky() == CUDA_SUCCESS && op->work.memory->allocation) run_memory(op->work);
        finish(op, ready);
        break;
      case WorkKind::event_record:
        finish(event_of(*op).get(), ready);
        finish(op, ready);
        break;
      case WorkKind::event_wait:
        if (begin_wait(op)) finish(op, ready);
        break;
      case WorkKind::memop:
        if (start_memops(op)) finish(op, ready);
        break;
      default:
        if (keep_one && kept == nullptr) {
          kept = op;
        } else {
          push_device(op);
        }
    }
  }
  ready->clear();
  return kept;
}

// Dispatches the operations that begin(&ready) appends to `ready`. `keep_one` and the return value
// have the same meaning as for dispatch_all().
template <class Begin>
static Op* dispatch_from(const Begin& begin, bool keep_one) {
  // The vector is reused, so that dispatching allocates nothing in the steady state.
  thread_local std::vector<Op*> scratch;
  std::vector<Op*> ready = std::move(scratch);
  ready.clear();
  begin(&ready);
  Op* kept = dispatch_all(&ready, keep_one);
  scratch = std::move(ready);
  return kept;
}

Op* dispatch(Op* first, bool keep_one) {
  return dispatch_from([&](std::vector<Op*>* ready) { ready->push_back(first); }, keep_one);
}

Op* complete(Op* op, bool keep_one) {
  return dispatch_from([&](std::vector<Op*>* ready) { finish(op, ready); }, keep_one);
}

}  // namespace softcuda
