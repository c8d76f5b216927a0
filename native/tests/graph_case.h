// One random graph on the device, driven through random operations beside its sequential model.
#pragma once

#include <memory>

#include "driver_calls.h"
#include "hostwork/current.h"
#include "hostwork/exec.h"
#include "hostwork/record.h"
#include "model.h"

namespace stress {

struct Kernels {
  CUmodule module = nullptr;
  CUfunction plain = nullptr, barrier = nullptr, warp = nullptr, stray = nullptr;
  bool barriers = true;
};

// A host step. Its data dies with its record: a record that dies early is a use after free.
class HostStep : public graft::hostwork::HostRecord {
 public:
  struct Data {
    unsigned* cells;
    NodeSpec node;
    int out;
    int runs = 0;  // one run at a time
  };
  HostStep(const std::string& name, Data* data)
      : HostRecord(name, run, data, nullptr), data_(data) {}

 private:
  static void run(void* raw) {
    Data& data = *static_cast<Data*>(raw);
    if (graft::hostwork::current_replay() <= 0) std::abort();
    if (++data.runs == data.node.fails_in_run) {
      graft::hostwork::fail_current("told to fail");
      return;
    }
    unsigned now[kWords];
    for (int w = 0; w < kWords; ++w) {
      now[w] = gather_word(data.cells, data.out, data.node.salt, data.node.reads(0),
                           data.node.reads(1), data.node.reads(2), w);
    }
    std::memcpy(data.cells + data.out * kWords, now, sizeof now);
  }
  std::unique_ptr<Data> data_;
};

// A definition: the driver's graph, its nodes and the state that its host steps share.
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

class GraphCase {
 public:
  GraphCase(Random& random, const Kernels& kernels) : random_(random), kernels_(kernels) {
    CALL(cuStreamCreate(&streams_[0], CU_STREAM_NON_BLOCKING));
    CALL(cuStreamCreate(&streams_[1], CU_STREAM_NON_BLOCKING));
  }

  void run() {
    const bool chain = below(random_, 3) == 0;
    spec_ = random_graph(random_, chain, kernels_.barriers);
    if (chain) choose_failure();
    Model model(spec_.nodes.size());
    const size_t bytes = model.words().size() * sizeof(unsigned);
    void* memory = nullptr;
    CALL(cuMemHostAlloc(&memory, bytes, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
    cells_ = static_cast<unsigned*>(memory);
    CALL(cuMemHostGetDevicePointer_v2(&alias_, memory, 0));
    std::memset(memory, 0, bytes);

    Definition definition = build();
    CUgraphExec handle = nullptr;
    CUevent event = nullptr;
    CALL(cuGraphInstantiateWithFlags(&handle, definition.graph, 0));
    CALL(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    graft::hostwork::Exec exec(reinterpret_cast<uint64_t>(handle),
                               reinterpret_cast<uint64_t>(event), definition.state);
    for (unsigned step = 3 + below(random_, 8); step > 0; --step) {
      switch (below(random_, 6)) {
        case 0:
          update(exec, &definition, &model);
          break;
        case 1:
          change_kernel(handle, definition);
          break;
        case 2:
          toggle(handle, definition);
          break;
        case 3:
          compare(definition, &model);
          break;
        default:
          launch(exec, &model);
      }
    }
    launch(exec, &model);
    // Dropped while it runs: the launch keeps everything it needs.
    if (below(random_, 2) == 0) {
      definition.drop();
      exec.close();
    }
    compare(definition, &model);
    exec.close();
    definition.drop();
    CALL(cuMemFreeHost(memory));
    CALL(cuStreamDestroy_v2(streams_[0]));
    CALL(cuStreamDestroy_v2(streams_[1]));
  }

 private:
  void choose_failure() {
    for (NodeSpec& node : spec_.nodes) {
      if (node.kind != Kind::host || below(random_, 3) != 0) continue;
      node.fails_in_run = 1 + static_cast<int>(below(random_, 3));
      return;
    }
  }

  void launch(graft::hostwork::Exec& exec, Model* model) {
    const auto stream = reinterpret_cast<uint64_t>(streams_[below(random_, 2)]);
    for (unsigned times = 1 + below(random_, 3); times > 0; --times) {
      CALL(exec.launch(stream).result);
      model->replay(spec_);
    }
  }

  void settle() {
    CALL(cuStreamSynchronize(streams_[0]));
    CALL(cuStreamSynchronize(streams_[1]));
  }

  // Waits, and holds cells and failure against the model's.
  void compare(Definition& definition, Model* model) {
    settle();
    const std::vector<unsigned>& wanted = model->words();
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (cells_[i] == wanted[i]) continue;
      std::fprintf(stderr, "cell %zu word %zu is %08x, not %08x\n", i / kWords, i % kWords,
                   cells_[i], wanted[i]);
      WANT(cells_[i] == wanted[i]);
    }
    graft::hostwork::Failure failure;
    WANT(definition.state->pending(&failure) == model->failed());
    if (!model->failed()) return;
    WANT(failure.node == model->failed_node() && failure.message == "told to fail");
    definition.state->clear();
    model->clear_failure();
  }

  // Another definition of the same shape; a failed one is settled first, as its state goes away.
  void update(graft::hostwork::Exec& exec, Definition* definition, Model* model) {
    if (spec_.has_host() || below(random_, 2) == 0) compare(*definition, model);
    for (NodeSpec& node : spec_.nodes) {
      node.salt = static_cast<unsigned>(random_());
      node.fails_in_run = 0;
    }
    Definition next = build();
    graft::hostwork::UpdateInfo info{};
    CALL(exec.update(reinterpret_cast<uint64_t>(next.graph), &info));
    exec.adopt(next.state);
    model->new_definition();
    definition->drop();
    *definition = next;
    updated_ = true;
  }

  // Only nodes of the definition that the executable was made from name its nodes.
  void change_kernel(CUgraphExec exec, const Definition& definition) {
    const size_t i = below(random_, static_cast<unsigned>(spec_.nodes.size()));
    if (updated_ || spec_.nodes[i].kind > Kind::warp) return;
    spec_.nodes[i].salt = static_cast<unsigned>(random_());
    Launch launch(*this, i);
    CALL(cuGraphExecKernelNodeSetParams_v2(exec, definition.nodes[i], &launch.params));
  }

  void toggle(CUgraphExec exec, const Definition& definition) {
    const size_t i = below(random_, static_cast<unsigned>(spec_.nodes.size()));
    NodeSpec& node = spec_.nodes[i];
    if (updated_ || !node.can_be_disabled()) return;
    node.enabled = !node.enabled;
    CALL(cuGraphNodeSetEnabled(exec, definition.nodes[i], node.enabled));
  }

  // Parameters of the kernel that writes cell i.
  struct Launch {
    Launch(GraphCase& of, size_t i) : cells(of.alias_), out(static_cast<int>(i)) {
      const NodeSpec& node = of.spec_.nodes[i];
      salt = node.salt;
      for (size_t k = 0; k < 3; ++k) reads[k] = node.reads(k);
      params.func = node.kind == Kind::barrier ? of.kernels_.barrier
                    : node.kind == Kind::warp  ? of.kernels_.warp
                                               : of.kernels_.plain;
      params.gridDimX = kWords / kBlock;
      params.blockDimX = kBlock;
      params.gridDimY = params.gridDimZ = params.blockDimY = params.blockDimZ = 1;
      params.kernelParams = pointers;
    }
    CUdeviceptr cells;
    int out;
    unsigned salt;
    int reads[3];
    void* pointers[6] = {&cells, &out, &salt, &reads[0], &reads[1], &reads[2]};
    CUDA_KERNEL_NODE_PARAMS params{};
  };

  Definition build() {
    Definition made;
    CALL(cuGraphCreate(&made.graph, 0));
    for (size_t i = 0; i < spec_.nodes.size(); ++i) {
      std::vector<CUgraphNode> after;
      for (int from : spec_.nodes[i].after) after.push_back(made.nodes[static_cast<size_t>(from)]);
      made.nodes.push_back(add(made, i, after));
    }
    return made;
  }

  CUgraphNode add(Definition& made, size_t i, const std::vector<CUgraphNode>& after) {
    const NodeSpec& node = spec_.nodes[i];
    const CUdeviceptr cell = alias_ + i * kWords * sizeof(unsigned);
    CUgraphNode out = nullptr;
    if (node.kind == Kind::host) {
      auto* data = new HostStep::Data{cells_, node, static_cast<int>(i)};
      auto* record = new HostStep("host " + std::to_string(i), data);
      record->set_state(made.state);
      CALL(graft::hostwork::attach(made.graph, record).result);
      const CUDA_HOST_NODE_PARAMS params{graft::hostwork::run_host_record,
                                         static_cast<graft::hostwork::HostRecord*>(record)};
      CALL(cuGraphAddHostNode(&out, made.graph, after.data(), after.size(), &params));
    } else if (node.kind == Kind::copy) {
      CUDA_MEMCPY3D params{};
      params.srcMemoryType = params.dstMemoryType = CU_MEMORYTYPE_DEVICE;
      params.dstDevice = cell;
      params.srcDevice = alias_ + static_cast<size_t>(node.reads(0)) * kWords * sizeof(unsigned);
      params.WidthInBytes = kWords * sizeof(unsigned);
      params.Height = params.Depth = 1;
      CALL(cuGraphAddMemcpyNode(&out, made.graph, after.data(), after.size(), &params, nullptr));
    } else if (node.kind == Kind::fill) {
      const CUDA_MEMSET_NODE_PARAMS params{cell, 0, node.salt & 255, 1, kWords * sizeof(unsigned),
                                           1};
      CALL(cuGraphAddMemsetNode(&out, made.graph, after.data(), after.size(), &params, nullptr));
    } else if (node.kind == Kind::empty) {
      CALL(cuGraphAddEmptyNode(&out, made.graph, after.data(), after.size()));
    } else if (node.kind == Kind::child) {
      CUgraph child = nullptr;
      CUgraphNode inner = nullptr;
      Launch launch(*this, i);
      CALL(cuGraphCreate(&child, 0));
      CALL(cuGraphAddKernelNode_v2(&inner, child, nullptr, 0, &launch.params));
      CALL(cuGraphAddChildGraphNode(&out, made.graph, after.data(), after.size(), child));
      CALL(cuGraphDestroy(child));
    } else {
      Launch launch(*this, i);
      CALL(cuGraphAddKernelNode_v2(&out, made.graph, after.data(), after.size(), &launch.params));
    }
    return out;
  }

  Random& random_;
  const Kernels& kernels_;
  GraphSpec spec_;
  bool updated_ = false;
  unsigned* cells_ = nullptr;
  CUdeviceptr alias_ = 0;
  CUstream streams_[2] = {};
};

}  // namespace stress
