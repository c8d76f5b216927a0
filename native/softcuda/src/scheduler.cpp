// Dependencies between ops: streams, events, graph launches (invariants S1-S6).
#include "scheduler.h"

#include <time.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>

#include "conditionals.h"
#include "memops.h"

namespace softcuda {
namespace {

// Leaked on purpose: destroying a condition variable that a detached worker waits on hangs exit().
std::mutex& g_mutex = *new std::mutex;
std::condition_variable& g_done = *new std::condition_variable;
int g_waiters = 0;
Stream& g_legacy = *new Stream;
std::shared_ptr<Stream>& g_legacy_ref = *new std::shared_ptr<Stream>(&g_legacy, [](Stream*) {});

// Last work of destroyed streams: still to be waited for by whoever waits for everything.
std::vector<OpRef>& g_orphans = *new std::vector<OpRef>;

void unref(Op* op) {
  if (op->refs.fetch_sub(1, std::memory_order_acq_rel) == 1) delete op;
}

void depend(Op* op, const OpRef& on) {
  Op* before = on.get();
  if (before == nullptr || before->done || before == op) return;
  before->successors.push_back(op);
  op->pending.fetch_add(1, std::memory_order_relaxed);
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
// A thread's default stream: a blocking one that goes with the thread.
struct ThreadStream {
  ThreadStream() : stream(new_stream(0, 0)) {}
  ~ThreadStream() {
    streams.take(stream->handle);
    abandon(*stream);
  }
  std::shared_ptr<Stream> stream;
};
}  // namespace

std::shared_ptr<Stream> find_stream(CUstream handle) {
  const auto value = reinterpret_cast<uint64_t>(handle);
  if (value <= 1) return g_legacy_ref;  // NULL and CU_STREAM_LEGACY
  if (handle == kPerThread) {
    thread_local ThreadStream own;
    return own.stream;
  }
  return streams.find(handle);
}

OpRef enqueue(Stream& stream, Work work, const OpRef& after, OpRef* serial) {
  auto* op = new Op;  // its first reference is the scheduler's, dropped by complete()
  op->work = std::move(work);
  OpRef ref(op);
  const bool legacy = &stream == &g_legacy;
  std::vector<std::shared_ptr<Stream>> others;
  if (legacy) others = streams.all();
  {
    std::lock_guard<std::mutex> lock(g_mutex);
    depend(op, stream.tail);
    // The legacy stream and every blocking stream wait for each other (S4).
    if (legacy) {
      for (auto& other : others) {
        if ((other->flags & CU_STREAM_NON_BLOCKING) == 0) depend(op, other->tail);
      }
    } else if ((stream.flags & CU_STREAM_NON_BLOCKING) == 0) {
      depend(op, g_legacy.tail);
    }
    depend(op, after);
    if (serial != nullptr) {
      depend(op, *serial);
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
  return !op || op.get()->done;
}

uint64_t finished_ns(const OpRef& op) {
  std::lock_guard<std::mutex> lock(g_mutex);
  return op ? op.get()->finished_ns : 0;
}

std::shared_ptr<const LaunchEvents> launch_events(const Program& program) {
  if (program.event_nodes.empty()) return nullptr;
  auto made = std::make_shared<LaunchEvents>(program.event_nodes.size());
  std::lock_guard<std::mutex> lock(g_mutex);
  for (const Op* node : program.event_nodes) {
    if (node->work.kind == WorkKind::event_wait) (*made)[node->event_slot] = node->work.event->op;
  }
  for (const Op* node : program.event_nodes) {
    if (node->work.kind != WorkKind::event_record) continue;
    // Its first reference is dropped by finish(), as that of any operation (S3).
    (*made)[node->event_slot] = node->work.event->op = OpRef(new Op);
  }
  return made;
}

std::shared_ptr<Program> in_flight(const std::shared_ptr<Program>& plan) {
  plan->flights.fetch_add(1, std::memory_order_relaxed);
  return {plan.get(),
          [keep = plan](Program* p) { p->flights.fetch_sub(1, std::memory_order_release); }};
}

namespace {
CUresult wait_done(const OpRef& op, const char* what) {
  if (!op) return sticky();
  Waiting waiting(what);
  std::unique_lock<std::mutex> lock(g_mutex);
  ++g_waiters;
  g_done.wait(lock, [&] { return op.get()->done; });
  --g_waiters;
  lock.unlock();
  return sticky();
}
}  // namespace

CUresult wait_op(const OpRef& op, const char* what) {
  may_wait_for_device(what);
  const CUresult r = wait_done(op, what);
  std::fflush(stdout);  // what kernels printed
  return r;
}

void abandon(Stream& stream) {
  std::lock_guard<std::mutex> lock(g_mutex);
  g_orphans.erase(std::remove_if(g_orphans.begin(), g_orphans.end(),
                                 [](const OpRef& op) { return op.get()->done; }),
                  g_orphans.end());
  if (stream.tail && !stream.tail.get()->done) g_orphans.push_back(stream.tail);
}

CUresult wait_idle(const char* what) {
  may_wait_for_device(what);
  std::vector<OpRef> tails;
  {
    std::lock_guard<std::mutex> lock(g_mutex);
    tails = g_orphans;
    tails.push_back(g_legacy.tail);
  }
  for (auto& stream : streams.all()) tails.push_back(load(stream->tail));
  for (auto& tail : tails) wait_done(tail, what);
  std::fflush(stdout);
  return sticky();
}

namespace {

// Makes the first nodes of a program ready; `op` is finished when all of them are.
void begin_program(Program& program, Op* op, std::vector<Op*>* ready) {
  program.launch = op;
  program.remaining.store(static_cast<int>(program.nodes.size()), std::memory_order_relaxed);
  for (auto& node : program.nodes) node->pending.store(node->indegree, std::memory_order_relaxed);
  for (unsigned root : program.roots) ready->push_back(program.nodes[root].get());
}

// Runs a conditional node's body; false when the node is finished.
bool begin_body(Op* op, std::vector<Op*>* ready, bool first) {
  Program* body = next_body(*op->work.conditional, first);
  if (body == nullptr) return false;
  begin_program(*body, op, ready);
  return true;
}

// Completes one op; what became ready goes to `ready`.
void finish(Op* op, std::vector<Op*>* ready) {
  while (op->program != nullptr) {
    Program* program = op->program;
    for (unsigned index : op->next) {
      Op* successor = program->nodes[index].get();
      if (successor->pending.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        ready->push_back(successor);
      }
    }
    count_add(What::node);
    Op* launch = program->launch;
    // After this decrement another worker may finish the launch and free the program.
    if (program->remaining.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    op = launch;
    if (op->work.kind == WorkKind::conditional && begin_body(op, ready, false)) return;
  }
  // Operands are released before anybody can see the op done, so that counters read after a
  // synchronise are settled (S5).
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

const OpRef& event_of(const Op& node) {
  return (*node.program->launch->work.events)[node.event_slot];
}

// False: what the node waits for is not done yet, and wakes it (V2).
bool begin_wait(Op* op) {
  Op* before = event_of(*op).get();
  if (before == nullptr) return true;
  std::lock_guard<std::mutex> lock(g_mutex);
  if (before->done) return true;
  op->pending.store(1, std::memory_order_relaxed);
  before->successors.push_back(op);
  return false;
}

void begin_launch(Op* op, std::vector<Op*>* ready) {
  Program& program = *op->work.program;
  if (program.nodes.empty() || sticky() != CUDA_SUCCESS) {
    for (const Op* node : program.event_nodes) {  // who waits for them wakes all the same
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
  begin_program(program, op, ready);
}

}  // namespace

void push_host(Op* op);
void push_device(Op* op);

Op* dispatch_all(std::vector<Op*>* ready, bool keep_one) {
  Op* mine = nullptr;
  for (size_t i = 0; i < ready->size(); ++i) {
    Op* op = (*ready)[i];
    const bool event = op->work.kind >= WorkKind::event_record;
    if (op->work.kind != WorkKind::none && !event && queue_blocked(op)) continue;
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
        if (keep_one && mine == nullptr) {
          mine = op;
        } else {
          push_device(op);
        }
    }
  }
  ready->clear();
  return mine;
}

template <class Begin>
static Op* dispatch_from(const Begin& begin, bool keep_one) {
  // Reused between calls: no allocation per op in the steady state.
  thread_local std::vector<Op*> scratch;
  std::vector<Op*> ready = std::move(scratch);
  ready.clear();
  begin(&ready);
  Op* mine = dispatch_all(&ready, keep_one);
  scratch = std::move(ready);
  return mine;
}

Op* dispatch(Op* first, bool keep_one) {
  return dispatch_from([&](std::vector<Op*>* ready) { ready->push_back(first); }, keep_one);
}

Op* complete(Op* op, bool keep_one) {
  return dispatch_from([&](std::vector<Op*>* ready) { finish(op, ready); }, keep_one);
}

}  // namespace softcuda
