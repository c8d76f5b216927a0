// Conditional nodes: IF and WHILE nodes with body graphs (invariants N1-N4).
#pragma once

#include "graphs.h"
#include "softcuda_conditional.h"

namespace softcuda {

// A conditional handle. Kernels set its value in `cell`, whose address is the handle's number.
struct Condition {
  softcuda_condition* cell = nullptr;
  unsigned initial = 0;
  bool assign = false;  // CU_GRAPH_COND_ASSIGN_DEFAULT: store `initial` at each launch
  bool used = false;    // a node uses the handle
};

struct ConditionalWork {
  int type = CU_GRAPH_COND_TYPE_IF;
  // A WHILE node whose body contains no kernel, so that nothing can clear the condition.
  bool endless = false;
  softcuda_condition* cell = nullptr;
  std::vector<std::shared_ptr<Program>> bodies;
};

// Whether the graph contains a conditional node at any depth. Such a graph cannot be cloned.
bool has_conditional(const Graph& graph);
// If `graph` is a conditional body, rejects a node that is not allowed in bodies (N4).
void check_body(const Graph& graph, const Node& node);
// Checks a graph before it is instantiated: rejects conditional handles that no node uses (N1), and
// nodes that are not allowed in a body but were added to it through a child graph (N4). `in_body`
// says whether `graph` is inside a body.
void check_conditions(const Graph& graph, bool in_body);
// Adds a conditional node with empty bodies, whose handles are returned in `params`.
void add_conditional(CUgraphNode* out, CUgraph graph, const CUgraphNode* deps, size_t n,
                     CUDA_CONDITIONAL_NODE_PARAMS* params);
// Returns the body that runs next, or null if the node is complete (N2). `first` is true when the
// node becomes ready and false after a run of a body.
Program* next_body(const ConditionalWork& work, bool first);

}  // namespace softcuda
