// One test case: builds a random graph and applies random operations to it, such as launches,
// updates and changes of nodes. A sequential model (model.h) performs the same operations, and the
// results are compared.
#pragma once

#include "graph_build.h"

namespace stress {

class GraphCase {
 public:
  GraphCase(Random& random, const Kernels& kernels)
      : random_(random),
        chain_(below(random, 3) == 0),
        spec_(random_graph(random, chain_)),
        builder_(kernels, spec_, below(random, 3) == 0) {
    CALL(cuStreamCreate(&streams_[0], CU_STREAM_NON_BLOCKING));
    CALL(cuStreamCreate(&streams_[1], CU_STREAM_NON_BLOCKING));
  }
  ~GraphCase() {
    CALL(cuStreamDestroy_v2(streams_[0]));
    CALL(cuStreamDestroy_v2(streams_[1]));
  }
  GraphCase(const GraphCase&) = delete;

  void run() {
    if (chain_) choose_failure();
    Model model(spec_.nodes.size());
    Definition definition = builder_.build();
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
    // Release definition and executable while the launch is in flight. Everything that the launch
    // needs must stay alive.
    if (below(random_, 2) == 0) {
      definition.drop();
      exec.close();
    }
    compare(definition, &model);
    exec.close();
    definition.drop();
  }

 private:
  void choose_failure() {
    for (NodeSpec& node : spec_.nodes) {
      if (!node.is_host() || below(random_, 3) != 0) continue;
      node.fails_in_run = 1 + static_cast<int>(below(random_, 3));
      return;
    }
  }

  void launch(graft::hostwork::Exec& exec, Model* model) {
    const unsigned which = below(random_, 2);
    const CUstream other = streams_[1 - which];
    for (unsigned times = 1 + below(random_, 3); times > 0; --times) {
      if (below(random_, 2) == 0) CALL(cuEventRecord(builder_.waited_event, other));
      CALL(exec.launch(reinterpret_cast<uint64_t>(streams_[which])).first);
      model->replay(spec_);
      for (CUevent event : builder_.recorded_events) {
        if (below(random_, 2) == 0) CALL(cuStreamWaitEvent(other, event, 0));
      }
    }
  }

  void synchronize() {
    CALL(cuStreamSynchronize(streams_[0]));
    CALL(cuStreamSynchronize(streams_[1]));
  }

  // Waits for all launches. Then compares the memory that the nodes wrote (cells), and the failure
  // of a host step if there is one, with the model's prediction.
  void compare(Definition& definition, Model* model) {
    synchronize();
    const std::vector<unsigned>& wanted = model->words();
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (builder_.cells[i] == wanted[i]) continue;
      std::fprintf(stderr, "cell %zu word %zu is %08x, not %08x\n", i / kWords, i % kWords,
                   builder_.cells[i], wanted[i]);
      WANT(builder_.cells[i] == wanted[i]);
    }
    graft::hostwork::Failure failure;
    WANT(definition.state->pending(&failure) == model->failed());
    if (!model->failed()) return;
    WANT(failure.node == model->failed_node() && failure.message == "planned failure");
    definition.state->clear();
    model->clear_failure();
  }

  // Updates the executable to another definition of the same topology. If the graph has host steps,
  // first compares the results with the model, because the update releases the old state together
  // with a failure that may be stored there.
  void update(graft::hostwork::Exec& exec, Definition* definition, Model* model) {
    if (spec_.has_host() || below(random_, 2) == 0) compare(*definition, model);
    for (NodeSpec& node : spec_.nodes) {
      node.salt = static_cast<unsigned>(random_());
      node.fails_in_run = 0;
    }
    Definition next = builder_.build();
    graft::hostwork::UpdateInfo info{};
    CALL(exec.update(reinterpret_cast<uint64_t>(next.graph), next.state, &info));
    model->new_definition();
    definition->drop();
    *definition = next;
    updated_ = true;
  }

  // Changes a random kernel node of the executable. Not possible after an update: the driver
  // identifies a node of the executable by the node of the definition that was instantiated, which
  // no longer exists.
  void change_kernel(CUgraphExec exec, const Definition& definition) {
    const size_t i = below(random_, static_cast<unsigned>(spec_.nodes.size()));
    if (updated_ || spec_.nodes[i].kind > Kind::warp) return;
    spec_.nodes[i].salt = static_cast<unsigned>(random_());
    const auto launch = builder_.cell_kernel(i);
    CALL(cuGraphExecKernelNodeSetParams_v2(exec, definition.nodes[i], &launch->params));
  }

  void toggle(CUgraphExec exec, const Definition& definition) {
    const size_t i = below(random_, static_cast<unsigned>(spec_.nodes.size()));
    NodeSpec& node = spec_.nodes[i];
    if (updated_ || !node.can_be_disabled()) return;
    node.enabled = !node.enabled;
    CALL(cuGraphNodeSetEnabled(exec, definition.nodes[i], node.enabled));
  }

  Random& random_;
  const bool chain_;
  GraphSpec spec_;
  Builder builder_;
  bool updated_ = false;  // the executable was updated to another definition
  CUstream streams_[2] = {};
};

}  // namespace stress
