// Conditional nodes: a body graph that runs once, repeatedly or not at all (invariants N1-N4).
//
// N1 A condition belongs to one graph and steers one node, in that graph or in a body below it.
// N2 Its value is read when the node is reached and, for WHILE, after each run of the body.
// N3 A default is stored when a launch of the whole graph begins.
// N4 Bodies hold kernel, copy, fill, empty, child and conditional nodes only, at any depth.
#pragma once

#include "graphs.h"
#include "softcuda_conditional.h"

namespace softcuda {

struct Condition {
  softcuda_condition* cell = nullptr;
  unsigned initial = 0;
  bool assign = false;  // store `initial` at each launch
  bool used = false;
};

struct ConditionalWork {
  int type = CU_GRAPH_COND_TYPE_IF;
  bool endless = false;  // a WHILE whose body holds no kernel that could end it
  softcuda_condition* cell = nullptr;
  std::vector<std::shared_ptr<Program>> bodies;
};

// Whether the graph holds a conditional node, at any depth: the driver copies no such graph.
bool has_conditional(const Graph& graph);
// Refuses a node that may not stand in a body; `where` is its graph.
void check_body(const Graph& where, const Node& node);
// Refuses conditions that steer nothing, and host work that reached a body through a child graph.
void check_conditions(const Graph& graph, bool in_body);
void add_conditional(CUgraphNode* out, CUgraph graph, const CUgraphNode* deps, size_t n,
                     CUDA_CONDITIONAL_NODE_PARAMS* params);
// The body that runs next, or null when the node is finished.
Program* next_body(const ConditionalWork& work, bool first);

}  // namespace softcuda
