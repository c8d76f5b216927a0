// Reading and changing the parameters of graph nodes, in definitions and in executable graphs.
#include "conditionals.h"
#include "graph_nodes.h"
#include "memops.h"
#include "memory_pools.h"
#include "modules.h"

namespace softcuda {
namespace {

// Returns the parameters of a node. Pointers in them are valid until the node is destroyed or its
// parameters change. The caller holds graph_mutex.
Params read_params(Node& node) {
  Params p = of_type(node.type);
  const Work& work = node.work;
  switch (node.type) {
    case kKernel: {
      const KernelWork& k = *work.kernel;
      const softcuda_entry& entry = k.function->entry();
      node.param_pointers.clear();
      for (unsigned i = 0; i < entry.nparams; ++i) {
        node.param_pointers.push_back(const_cast<char*>(k.original.data()) + entry.offsets[i]);
      }
      p.kernel = k.params;
      p.kernel.kernelParams = node.param_pointers.data();
      break;
    }
    case kCopy:
      p.memcpy.copyCtx = primary_context();
      p.memcpy.copyParams = work.copy->params;
      break;
    case kFill:
      p.memset = work.fill->params;
      break;
    case kHost:
      p.host = {work.host.fn, work.host.data, 0, nullptr};
      break;
    case kWait:
    case kRecord:
      p.event = static_cast<CUevent>(work.event->handle);
      break;
    case kMemops: {
      const auto& operations = work.memop->params;
      p.memOp = {primary_context(), static_cast<unsigned>(operations.size()),
                 const_cast<CUstreamBatchMemOpParams*>(operations.data()), 0};
      break;
    }
    case kAlloc:
      p.alloc = work.memory->params;
      break;
    case kFree:
      p.free = work.memory->allocation->device_address();
      break;
    case kGraph:
      p.graph = {static_cast<CUgraph>(node.child->handle),
                 node.child->moved ? CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE
                                   : CU_GRAPH_CHILD_GRAPH_OWNERSHIP_CLONE};
      break;
    case kConditional:
      p.conditional = {reinterpret_cast<uint64_t>(node.condition->cell), node.condition_type,
                       static_cast<unsigned>(node.bodies.size()), node.body_handles.data(),
                       primary_context()};
      break;
    default:
      break;
  }
  return p;
}

Params params_of(CUgraphNode handle, CUgraphNodeType type) {
  const auto node = find_node(handle, type);
  std::lock_guard<std::mutex> lock(graph_mutex);
  return read_params(*node);
}

// Replaces the parameters of a node of a definition. Executable graphs that were instantiated
// before keep the old parameters (INVARIANTS.md G3).
void set_params(CUgraphNode handle, const Params& params) {
  const auto node = find_node(handle, params.type);
  if (params.type == kGraph) {
    replace_child(*node, params.graph.graph);
    return;
  }
  Node changed = *node;
  changed.work = build_work(params);
  std::lock_guard<std::mutex> lock(graph_mutex);
  node->work = std::move(changed.work);
}

}  // namespace
}  // namespace softcuda

using namespace softcuda;

#define GET(symbol, since, T, TYPE, value)               \
  SC_API(symbol, since, 0, CUgraphNode, node, T*, out) { \
    const Params p = params_of(node, TYPE);              \
    require(out != nullptr);                             \
    *out = value;                                        \
  }
GET(cuGraphKernelNodeGetParams_v2, 12000, CUDA_KERNEL_NODE_PARAMS, kKernel, p.kernel)
GET(cuGraphMemcpyNodeGetParams, 10000, CUDA_MEMCPY3D, kCopy, p.memcpy.copyParams)
GET(cuGraphMemsetNodeGetParams, 10000, CUDA_MEMSET_NODE_PARAMS, kFill, p.memset)
GET(cuGraphHostNodeGetParams, 10000, CUDA_HOST_NODE_PARAMS, kHost,
    (CUDA_HOST_NODE_PARAMS{p.host.fn, p.host.userData}))
GET(cuGraphBatchMemOpNodeGetParams, 11070, CUDA_BATCH_MEM_OP_NODE_PARAMS, kMemops, p.memOp)
GET(cuGraphMemAllocNodeGetParams, 11040, CUDA_MEM_ALLOC_NODE_PARAMS, kAlloc, p.alloc)
GET(cuGraphMemFreeNodeGetParams, 11040, CUdeviceptr, kFree, p.free)
GET(cuGraphChildGraphNodeGetGraph, 10000, CUgraph, kGraph, p.graph.graph)
GET(cuGraphEventRecordNodeGetEvent, 11010, CUevent, kRecord, p.event)
GET(cuGraphEventWaitNodeGetEvent, 11010, CUevent, kWait, p.event)

SC_API(cuGraphNodeGetParams, 13020, 0, CUgraphNode, handle, CUgraphNodeParams*, out) {
  const auto node = graph_nodes.find(handle);
  require(out != nullptr);
  std::lock_guard<std::mutex> lock(graph_mutex);
  *out = read_params(*node);
}

#define SET(symbol, since, T)                                \
  SC_API(symbol, since, 0, CUgraphNode, node, const T*, p) { \
    require(p != nullptr);                                   \
    set_params(node, of(*p));                                \
  }
SET(cuGraphKernelNodeSetParams_v2, 12000, CUDA_KERNEL_NODE_PARAMS)
SET(cuGraphMemcpyNodeSetParams, 10000, CUDA_MEMCPY3D)
SET(cuGraphMemsetNodeSetParams, 10000, CUDA_MEMSET_NODE_PARAMS)
SET(cuGraphHostNodeSetParams, 10000, CUDA_HOST_NODE_PARAMS)
SET(cuGraphBatchMemOpNodeSetParams, 11070, CUDA_BATCH_MEM_OP_NODE_PARAMS)
SET(cuGraphNodeSetParams, 12020, CUgraphNodeParams)

#define EXEC_SET(symbol, since, ...)                                            \
  SC_API(symbol, since, 0, CUgraphExec, exec, CUgraphNode, node, __VA_ARGS__) { \
    require(p != nullptr);                                                      \
    set_exec_params(exec, node, of(*p));                                        \
  }
EXEC_SET(cuGraphExecKernelNodeSetParams_v2, 12000, const CUDA_KERNEL_NODE_PARAMS*, p)
EXEC_SET(cuGraphExecMemcpyNodeSetParams, 10020, const CUDA_MEMCPY3D*, p, CUcontext, context)
EXEC_SET(cuGraphExecMemsetNodeSetParams, 10020, const CUDA_MEMSET_NODE_PARAMS*, p, CUcontext,
         context)
EXEC_SET(cuGraphExecHostNodeSetParams, 10020, const CUDA_HOST_NODE_PARAMS*, p)
EXEC_SET(cuGraphExecBatchMemOpNodeSetParams, 11070, const CUDA_BATCH_MEM_OP_NODE_PARAMS*, p)
EXEC_SET(cuGraphExecNodeSetParams, 12020, const CUgraphNodeParams*, p)

SC_API(cuGraphExecChildGraphNodeSetParams, 11010, 0, CUgraphExec, exec, CUgraphNode, node, CUgraph,
       child) {
  Params p = of_type(kGraph);
  p.graph.graph = child;
  set_exec_params(exec, node, p);
}

#define SET_EVENT(kind, TYPE)                                                                      \
  SC_API(cuGraph##kind##NodeSetEvent, 11010, 0, CUgraphNode, node, CUevent, event) {               \
    set_params(node, of(TYPE, event));                                                             \
  }                                                                                                \
  SC_API(cuGraphExec##kind##NodeSetEvent, 11010, 0, CUgraphExec, exec, CUgraphNode, node, CUevent, \
         event) {                                                                                  \
    set_exec_params(exec, node, of(TYPE, event));                                                  \
  }
SET_EVENT(EventRecord, kRecord)
SET_EVENT(EventWait, kWait)
