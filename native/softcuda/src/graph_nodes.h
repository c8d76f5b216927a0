// Parameters of graph nodes. All functions that add or change a node convert its parameters to
// CUgraphNodeParams and create its work with build_work() (INVARIANTS.md G1).
#pragma once

#include "graphs.h"

namespace softcuda {

using Params = CUgraphNodeParams;

constexpr auto kEmpty = CU_GRAPH_NODE_TYPE_EMPTY, kKernel = CU_GRAPH_NODE_TYPE_KERNEL,
               kCopy = CU_GRAPH_NODE_TYPE_MEMCPY, kFill = CU_GRAPH_NODE_TYPE_MEMSET,
               kHost = CU_GRAPH_NODE_TYPE_HOST, kGraph = CU_GRAPH_NODE_TYPE_GRAPH,
               kWait = CU_GRAPH_NODE_TYPE_WAIT_EVENT, kRecord = CU_GRAPH_NODE_TYPE_EVENT_RECORD,
               kAlloc = CU_GRAPH_NODE_TYPE_MEM_ALLOC, kFree = CU_GRAPH_NODE_TYPE_MEM_FREE,
               kMemops = CU_GRAPH_NODE_TYPE_BATCH_MEM_OP,
               kConditional = CU_GRAPH_NODE_TYPE_CONDITIONAL;

// of_type() returns empty parameters of one node type. The of() functions convert the parameter
// structure of one node type to CUgraphNodeParams.
Params of_type(CUgraphNodeType type);
Params of(const CUDA_KERNEL_NODE_PARAMS& params);
Params of(const CUDA_MEMCPY3D& params);
Params of(const CUDA_MEMSET_NODE_PARAMS& params);
Params of(const CUDA_HOST_NODE_PARAMS& params);
Params of(const CUDA_BATCH_MEM_OP_NODE_PARAMS& params);
Params of(const Params& params);
Params of(CUgraphNodeType type, CUevent event);

// Checks the parameters of a node and returns the work that they describe. Child graph nodes and
// conditional nodes have no work of this kind; the call is refused for them.
Work build_work(const Params& params);
// Returns the node with this handle. If the node has a type other than `type`, the call ends with
// INVALID_VALUE.
std::shared_ptr<Node> find_node(CUgraphNode handle, CUgraphNodeType type);
// Replaces the parameters of a node of an executable graph. The definition and the launches that
// are already queued keep the old parameters.
void set_exec_params(CUgraphExec exec, CUgraphNode node, const Params& params);

}  // namespace softcuda
