// Conditional nodes: IF and WHILE nodes with body graphs (invariants N1-N4).
#pragma once

#include "graphs.h"
#include "softcuda_conditional.h"

namespace softcuda {

// A conditional handle. Kernels set its value in `cell`.
struct Condition {
  softcuda_condition* cell = nullptr;
  unsigned initial = 0;
  bool assign = false;  // CU_GRAPH_COND_ASSIGN_DEFAULT: store `initial` at each launch
  bool used = false;    // a node uses the handle
};

struct ConditionalWork {
  int type = CU_GRAPH_COND_TYPE_IF;
  bool endless = false;  // WHILE whose body contains no kernel, so nothing can clear the condition
  softcuda_condition* cell = nullptr;
  std::vector<std::shared_ptr<Program>> bodies;
};

// Whether the graph contains a conditional node at any depth. The driver does not clone such
// graphs.
bool has_conditional(const Graph& graph);
// Rejects a node that is not allowed in `graph` because `graph` is a conditional body (N4).
void check_body(const Graph& graph, const Node& node);
// Rejects handles without a node, and nodes in bodies that were added through a child graph (N1,
// N4).
void check_conditions(const Graph& graph, bool in_body);
void add_conditional(CUgraphNode* out, CUgraph graph, const CUgraphNode* deps, size_t n,
                     CUDA_CONDITIONAL_NODE_PARAMS* params);
// Returns the body that runs next, or null if the node is complete (N2).
Program* next_body(const ConditionalWork& work, bool first);

}  // namespace softcuda
