// Builds a CUgraph from a random graph specification (GraphSpec). The nodes are added explicitly or
// captured from a stream.
#pragma once

#include <cstring>
#include <memory>

#include "hostwork/exec.h"
#include "hostwork/hostfunc.h"
#include "hostwork/mailbox.h"
#include "model.h"
#include "softcuda/tests/driver_calls.h"

namespace stress {

// Memory of one mailbox: its pinned words, one cache line each, and the scratch buffer for the
// results of its work.
class Box {
 public:
  enum Line { kRequest, kAck, kTimedOut, kCounter, kLines };
  explicit Box(size_t results) {
    CALL(cuMemHostAlloc(&memory_, kLines * kLine + results, 3));
    CALL(cuMemHostGetDevicePointer_v2(&alias_, memory_, 0));
    std::memset(memory_, 0, kLines * kLine + results);
  }
  ~Box() { CALL(cuMemFreeHost(memory_)); }
  Box(const Box&) = delete;
  uint32_t* word(Line line) const {
    return reinterpret_cast<uint32_t*>(static_cast<char*>(memory_) + line * kLine);
  }
  CUdeviceptr alias(Line line) const { return alias_ + line * kLine; }
  void* scratch() const { return static_cast<char*>(memory_) + kLines * kLine; }

 private:
  static constexpr size_t kLine = 64;
  void* memory_ = nullptr;
  CUdeviceptr alias_ = 0;
};

// A record that owns the data of its host step. If the record is released too early, the sanitizer
// reports a use after free.
class HostStep : public graft::hostwork::HostRecord {
 public:
  struct Data {
    unsigned* cells;
    NodeSpec node;
    int out;
    int runs;                  // number of runs; not atomic, because runs never overlap
    std::unique_ptr<Box> box;  // memory of the mailbox; null in a host node
  };
  HostStep(const std::string& name, Data* data)
      : HostRecord(name, {nullptr, nullptr, run, data}, nullptr), data_(data) {}

 private:
  static void run(void* raw) {
    Data& data = *static_cast<Data*>(raw);
    if (graft::hostwork::current_replay() <= 0) std::abort();
    if (++data.runs == data.node.fails_in_run) {
      graft::hostwork::fail_current("planned failure");
      return;
    }
    unsigned* cell = data.cells + data.out * kWords;
    void* const output = graft::hostwork::current_output();
    unsigned* to = output != nullptr ? static_cast<unsigned*>(output) : cell;
    for (int w = 0; w < kWords; ++w) {
      to[w] = gather_word(data.cells, data.out, data.node.salt, data.node.reads(0),
                          data.node.reads(1), data.node.reads(2), w);
    }
  }
  std::unique_ptr<Data> data_;
};

struct Kernels {
  CUmodule module = nullptr;
  CUfunction plain = nullptr, barrier = nullptr, warp = nullptr, stray = nullptr;
  CUfunction decide = nullptr, loop = nullptr;
  CUfunction request = nullptr, wait = nullptr;
  // Addresses of the host functions store_word() and load_word(), which the kernels `request` and
  // `wait` call to access the words of the mailbox. Kernels of the soft device can call host
  // functions. 0: the kernels access the words directly.
  uint64_t store = 0, load = 0;
  std::shared_ptr<graft::hostwork::Worker> worker;
};

// A graph definition: CUgraph, its nodes, and the state of its host steps.
struct Definition {
  CUgraph graph = nullptr;
  std::vector<CUgraphNode> nodes;
  std::shared_ptr<graft::hostwork::GraphState> state =
      std::make_shared<graft::hostwork::GraphState>(nullptr);
  void drop() {
    if (graph != nullptr) CALL(cuGraphDestroy(graph));
    graph = nullptr;
  }
};

// Parameters of a one-dimensional launch and the values of its arguments.
struct Launch {
  CUDA_KERNEL_NODE_PARAMS params{};
  std::vector<uint64_t> values;
  std::vector<void*> pointers;

  Launch(CUfunction function, unsigned grid, unsigned block, std::vector<uint64_t> arguments)
      : values(std::move(arguments)) {
    // An int argument is read from the low half of its 64-bit value (little endian).
    for (uint64_t& value : values) pointers.push_back(&value);
    params.func = function;
    params.gridDimX = grid;
    params.blockDimX = block;
    params.gridDimY = params.gridDimZ = params.blockDimY = params.blockDimZ = 1;
    params.kernelParams = pointers.data();
  }
  Launch(const Launch&) = delete;
};

// Owns the memory, events and stream of one test case, and builds its graph, possibly several
// times.
class Builder {
 public:
  using After = std::vector<CUgraphNode>;  // nodes that a node depends on
  static constexpr size_t kBytes = kWords * sizeof(unsigned);

  Builder(const Kernels& kernels, const GraphSpec& spec, bool captured)
      : kernels_(kernels), spec_(spec), captured_(captured) {
    const size_t count = spec.nodes.size();
    void* memory = nullptr;
    CALL(cuMemHostAlloc(&memory, count * (kBytes + sizeof(unsigned)), 3));
    cells = static_cast<unsigned*>(memory);
    CALL(cuMemHostGetDevicePointer_v2(&alias_, memory, 0));
    std::memset(memory, 0, count * (kBytes + sizeof(unsigned)));
    for (auto& node : spec.nodes) {
      if (node.kind != Kind::record_event) continue;
      recorded_events.emplace_back();
      CALL(cuEventCreate(&recorded_events.back(), CU_EVENT_DISABLE_TIMING));
    }
    CALL(cuEventCreate(&waited_event, CU_EVENT_DISABLE_TIMING));
    CALL(cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING));
  }
  ~Builder() {
    CALL(cuMemFreeHost(cells));
    for (CUevent event : recorded_events) CALL(cuEventDestroy_v2(event));
    CALL(cuEventDestroy_v2(waited_event));
    CALL(cuStreamDestroy_v2(stream_));
  }
  Builder(const Builder&) = delete;

  Definition build() {
    Definition made;
    next_event_ = 0;
    graft::hostwork::CaptureInfo info;
    if (captured_) {
      CALL(cuStreamBeginCapture_v2(stream_, 2));  // relaxed: memory is allocated during the capture
      CALL(graft::hostwork::capture_info(reinterpret_cast<uint64_t>(stream_), &info));
      made.graph = static_cast<CUgraph>(info.graph);
      made.state = graft::hostwork::capture_state(info);
    } else {
      CALL(cuGraphCreate(&made.graph, 0));
    }
    for (size_t i = 0; i < spec_.nodes.size(); ++i) {
      After after;
      for (int from : spec_.nodes[i].after) after.push_back(made.nodes[static_cast<size_t>(from)]);
      CUgraphNode added = captured_ ? capture(made, i, after, info) : nullptr;
      made.nodes.push_back(added != nullptr ? added : add(made, i, after));
    }
    if (captured_) CALL(cuStreamEndCapture(stream_, &made.graph));
    return made;
  }

  // Returns the launch of the kernel that writes cell i. `more` is added to the node's salt, a
  // kernel argument on which the written words depend.
  std::unique_ptr<Launch> cell_kernel(size_t i, unsigned more = 0) const {
    const NodeSpec& node = spec_.nodes[i];
    const CUfunction function = node.kind == Kind::barrier ? kernels_.barrier
                                : node.kind == Kind::warp  ? kernels_.warp
                                                           : kernels_.plain;
    return std::make_unique<Launch>(
        function, kWords / kBlock, kBlock,
        std::vector<uint64_t>{alias_, i, node.salt + more, number(node.reads(0)),
                              number(node.reads(1)), number(node.reads(2))});
  }

  unsigned* cells = nullptr;
  std::vector<CUevent> recorded_events;  // one per event record node, in the order of the nodes
  CUevent waited_event = nullptr;        // event that all event wait nodes wait for

 private:
  static uint64_t number(int value) { return static_cast<uint64_t>(value); }
  CUdeviceptr cell(size_t i) const { return alias_ + i * kBytes; }

  CUgraphNode kernel(CUgraph graph, const After& after, const Launch& launch) const {
    CUgraphNode out = nullptr;
    CALL(cuGraphAddKernelNode_v2(&out, graph, after.data(), after.size(), &launch.params));
    return out;
  }

  CUgraphNode generic(CUgraph graph, const After& after, CUgraphNodeParams* params) const {
    CUgraphNode out = nullptr;
    CALL(cuGraphAddNode_v2(&out, graph, after.data(), nullptr, after.size(), params));
    return out;
  }

  HostStep* host_step(const Definition& made, size_t i, std::unique_ptr<Box> box) const {
    auto* data = new HostStep::Data{cells, spec_.nodes[i], static_cast<int>(i), 0, std::move(box)};
    auto* step = new HostStep("host " + std::to_string(i), data);
    step->set_state(made.state);
    return step;
  }

  // Creates the host side of the mailbox of node i and retains it on the graph.
  const Box& port(const Definition& made, size_t i, bool spinkernel) const {
    auto own = std::make_unique<Box>(kBytes);
    const Box& box = *own;
    HostStep* const step = host_step(made, i, std::move(own));
    graft::hostwork::MailboxWords words{box.word(Box::kRequest), box.word(Box::kAck)};
    if (spinkernel) words.timed_out = box.word(Box::kTimedOut);
    const graft::hostwork::MailboxOutput output{box.scratch(), cells + i * kWords, kBytes};
    auto port =
        std::make_shared<graft::hostwork::Port>(step, made.state, kernels_.worker, words, output,
                                                graft::hostwork::MailboxLimits{kNever, 0});
    kernels_.worker->add(port);
    made.state->add_listener(port);
    graft::hostwork::watch(port);
    CALL(graft::hostwork::attach(made.graph, new graft::hostwork::PortKeeper(port)).result);
    return box;
  }

  CUgraphNode mailbox(const Definition& made, size_t i, const After& after, bool spinkernel) const {
    const Box& box = port(made, i, spinkernel);
    const auto address = [&](Box::Line line) { return box.alias(line); };
    const CUgraphNode asked = kernel(made.graph, after,
                                     Launch(kernels_.request, 1, 1,
                                            {address(Box::kCounter), address(Box::kRequest),
                                             address(Box::kAck), kernels_.store}));
    if (spinkernel) {
      const uint64_t last = kernels_.load != 0 ? kernels_.load : address(Box::kTimedOut);
      return kernel(made.graph, {asked},
                    Launch(kernels_.wait, 1, 1,
                           {address(Box::kCounter), address(Box::kAck), last, kNeverNs}));
    }
    CUstreamBatchMemOpParams wait{};
    wait.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
    wait.waitValue.address = address(Box::kAck);
    wait.waitValue.value = 1;
    wait.waitValue.flags = CU_STREAM_WAIT_VALUE_EQ;
    const CUDA_BATCH_MEM_OP_NODE_PARAMS params{nullptr, 1, &wait, 0};
    CUgraphNode out = nullptr;
    CALL(cuGraphAddBatchMemOpNode(&out, made.graph, &asked, 1, &params));
    return out;
  }

  uint64_t condition(CUgraph graph, bool begins_true) const {
    uint64_t handle = 0;
    CALL(cuGraphConditionalHandleCreate(&handle, graph, nullptr, begins_true, begins_true));
    return handle;
  }

  // Adds a conditional node. Each of its bodies runs the kernel that writes cell i. The number of
  // the body is added to the salt (see cell_kernel), so that different bodies write different
  // words.
  CUgraphNode conditional(CUgraph graph, size_t i, const After& after, int type, unsigned bodies,
                          uint64_t handle) const {
    CUgraphNodeParams params{};
    params.type = CU_GRAPH_NODE_TYPE_CONDITIONAL;
    params.conditional = {handle, type, bodies, nullptr, nullptr};
    const CUgraphNode out = generic(graph, after, &params);
    for (unsigned b = 0; b < bodies; ++b) {
      const CUgraph body = params.conditional.phGraph_out[b];
      const CUgraphNode inner = kernel(body, {}, *cell_kernel(i, b));
      if (type != CU_GRAPH_COND_TYPE_WHILE) continue;
      const CUdeviceptr iterations = alias_ + spec_.nodes.size() * kBytes;
      kernel(body, {inner},
             Launch(kernels_.loop, 1, 1, {handle, iterations, i, spec_.nodes[i].iterations()}));
    }
    return out;
  }

  CUgraphNode decided(CUgraph graph, size_t i, const After& after) const {
    const uint64_t handle = condition(graph, false);
    const uint64_t by = number(spec_.nodes[i].decider(static_cast<int>(i)));
    const CUgraphNode first =
        kernel(graph, after, Launch(kernels_.decide, 1, 1, {handle, alias_, by, 2}));
    return conditional(graph, i, {first}, CU_GRAPH_COND_TYPE_IF, 2, handle);
  }

  CUgraphNode child(CUgraph graph, size_t i, const After& after, bool move) const {
    CUgraph inner = nullptr;
    CALL(cuGraphCreate(&inner, 0));
    kernel(inner, {}, *cell_kernel(i));
    if (move) {
      CUgraphNodeParams params{};
      params.type = CU_GRAPH_NODE_TYPE_GRAPH;
      params.graph = {inner, CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE};
      return generic(graph, after, &params);
    }
    CUgraphNode out = nullptr;
    CALL(cuGraphAddChildGraphNode(&out, graph, after.data(), after.size(), inner));
    CALL(cuGraphDestroy(inner));
    return out;
  }

  CUgraphNode add(const Definition& made, size_t i, const After& after) {
    const NodeSpec& node = spec_.nodes[i];
    const CUgraph graph = made.graph;
    CUgraphNode out = nullptr;
    switch (node.kind) {
      case Kind::host: {
        HostStep* const step = host_step(made, i, nullptr);
        CALL(graft::hostwork::attach(graph, step).result);
        const CUDA_HOST_NODE_PARAMS params{graft::hostwork::run_host_record,
                                           static_cast<graft::hostwork::HostRecord*>(step)};
        CALL(cuGraphAddHostNode(&out, graph, after.data(), after.size(), &params));
        return out;
      }
      case Kind::copy: {
        CUDA_MEMCPY3D params{};
        params.src.type = params.dst.type = CU_MEMORYTYPE_DEVICE;
        params.dst.device = cell(i);
        params.src.device = cell(static_cast<size_t>(node.reads(0)));
        params.WidthInBytes = kBytes;
        params.Height = params.Depth = 1;
        CALL(cuGraphAddMemcpyNode(&out, graph, after.data(), after.size(), &params, nullptr));
        return out;
      }
      case Kind::fill: {
        const CUDA_MEMSET_NODE_PARAMS params{cell(i), 0, node.salt & 255, 1, kBytes, 1};
        CALL(cuGraphAddMemsetNode(&out, graph, after.data(), after.size(), &params, nullptr));
        return out;
      }
      case Kind::empty:
        CALL(cuGraphAddEmptyNode(&out, graph, after.data(), after.size()));
        return out;
      case Kind::record_event:
        CALL(cuGraphAddEventRecordNode(&out, graph, after.data(), after.size(),
                                       recorded_events[next_event_++]));
        return out;
      case Kind::wait_event:
        CALL(cuGraphAddEventWaitNode(&out, graph, after.data(), after.size(), waited_event));
        return out;
      case Kind::mailbox:
      case Kind::spinkernel:
        return mailbox(made, i, after, node.kind == Kind::spinkernel);
      case Kind::child:
      case Kind::moved:
        return child(graph, i, after, node.kind == Kind::moved);
      case Kind::choice:
        return decided(graph, i, after);
      case Kind::loop:
        return conditional(graph, i, after, CU_GRAPH_COND_TYPE_WHILE, 1, condition(graph, true));
      default:
        return kernel(graph, after, *cell_kernel(i));
    }
  }

  // Captures node i with the dependencies `after`. Returns null for kinds of nodes that cannot be
  // captured and are added explicitly.
  CUgraphNode capture(const Definition& made, size_t i, const After& after,
                      const graft::hostwork::CaptureInfo& info) {
    const NodeSpec& node = spec_.nodes[i];
    CALL(cuStreamUpdateCaptureDependencies_v2(stream_, after.data(), nullptr, after.size(), 1));
    const auto run = [&](const Launch& launch) {
      const CUDA_KERNEL_NODE_PARAMS& p = launch.params;
      CALL(cuLaunchKernel(p.func, p.gridDimX, 1, 1, p.blockDimX, 1, 1, 0, stream_, p.kernelParams,
                          nullptr));
    };
    switch (node.kind) {
      case Kind::plain:
      case Kind::barrier:
      case Kind::warp:
        run(*cell_kernel(i));
        break;
      case Kind::host:
        CALL(graft::hostwork::launch_captured(reinterpret_cast<uint64_t>(stream_), info,
                                              host_step(made, i, nullptr), false)
                 .result);
        break;
      case Kind::copy:
        CALL(cuMemcpyDtoDAsync_v2(cell(i), cell(static_cast<size_t>(node.reads(0))), kBytes,
                                  stream_));
        break;
      case Kind::fill:
        CALL(cuMemsetD8Async(cell(i), node.salt & 255, kBytes, stream_));
        break;
      case Kind::record_event:
        CALL(cuEventRecordWithFlags(recorded_events[next_event_++], stream_, 1));
        break;
      case Kind::wait_event:
        CALL(cuStreamWaitEvent(stream_, waited_event, 1));
        break;
      default:
        return nullptr;
    }
    int status = 0;
    size_t count = 0;
    const CUgraphNode* ends = nullptr;
    CALL(cuStreamGetCaptureInfo_v3(stream_, &status, nullptr, nullptr, &ends, nullptr, &count));
    WANT(status == 1 && count == 1);
    return ends[0];
  }

  static constexpr double kNever = 600;
  static constexpr uint64_t kNeverNs = 600'000'000'000;
  const Kernels& kernels_;
  const GraphSpec& spec_;
  const bool captured_;
  CUdeviceptr alias_ = 0;
  CUstream stream_ = nullptr;  // for captures
  size_t next_event_ = 0;
};

}  // namespace stress
