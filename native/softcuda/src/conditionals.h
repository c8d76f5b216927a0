// Conditional nodes: IF, WHILE and SWITCH nodes with body graphs (INVARIANTS.md N1 to N5).
#pragma once

#include "graphs.h"
#include "softcuda_conditional.h"

namespace softcuda {

// A conditional handle. The handle's number is the address of `cell`, in which kernels store the
// value of the condition.
struct Condition {
  softcuda_condition* cell = nullptr;
  unsigned initial = 0;
  // Whether each launch stores `initial` in the cell (CU_GRAPH_COND_ASSIGN_DEFAULT).
  bool assign = false;
  // Whether a conditional node uses the handle. Each handle can be used by one node only.
  bool used = false;
};

struct ConditionalWork {
  int type = CU_GRAPH_COND_TYPE_IF;
  // Set for a WHILE node whose body contains no kernel. Its loop would never end, because only a
  // kernel can set the condition to 0.
  bool endless = false;
  softcuda_condition* cell = nullptr;
  std::vector<std::shared_ptr<Program>> bodies;
};

// Whether the graph or a child graph at any depth contains a conditional node. Such a graph cannot
// be cloned.
bool has_conditional(const Graph& graph);
// Rejects work that is not allowed in a conditional body (INVARIANTS.md N4).
void check_in_body(const Work& work);
// Checks the conditional nodes of a graph before the graph is instantiated. Rejects conditional
// handles that no node uses (N1 in INVARIANTS.md), conditional nodes in child graphs (N5), and
// nodes that are not allowed in a conditional body (N4). `in_body` says whether `graph` itself is
// inside a conditional body.
void check_conditions(const Graph& graph, bool in_body);
// Adds a conditional node with empty bodies, whose handles are returned in `params`.
void add_conditional(CUgraphNode* out, CUgraph graph, const CUgraphNode* deps, size_t n,
                     CUDA_CONDITIONAL_NODE_PARAMS* params);
// Whether `cell` is the address of a condition's cell, which makes it a conditional handle.
bool is_condition(const softcuda_condition* cell);
// Returns the body that runs next, or null if the node is complete (INVARIANTS.md N2). `first` is
// true when the node becomes ready and false after a run of a body.
Program* next_body(const ConditionalWork& work, bool first);

}  // namespace softcuda
