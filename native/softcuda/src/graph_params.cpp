// The calls that take a node's parameters whatever its type: each hands them to the call of the
// type.
#include "conditionals.h"
#include "graphs.h"

using namespace softcuda;

extern "C" {
CUresult cuGraphKernelNodeGetParams_v2(CUgraphNode, CUDA_KERNEL_NODE_PARAMS*);
CUresult cuGraphMemcpyNodeGetParams(CUgraphNode, CUDA_MEMCPY3D*);
CUresult cuGraphMemsetNodeGetParams(CUgraphNode, CUDA_MEMSET_NODE_PARAMS*);
CUresult cuGraphBatchMemOpNodeGetParams(CUgraphNode, CUDA_BATCH_MEM_OP_NODE_PARAMS*);
CUresult cuGraphKernelNodeSetParams_v2(CUgraphNode, const CUDA_KERNEL_NODE_PARAMS*);
CUresult cuGraphMemcpyNodeSetParams(CUgraphNode, const CUDA_MEMCPY3D*);
CUresult cuGraphMemsetNodeSetParams(CUgraphNode, const CUDA_MEMSET_NODE_PARAMS*);
CUresult cuGraphHostNodeSetParams(CUgraphNode, const CUDA_HOST_NODE_PARAMS*);
CUresult cuGraphBatchMemOpNodeSetParams(CUgraphNode, const CUDA_BATCH_MEM_OP_NODE_PARAMS*);
CUresult cuGraphEventRecordNodeSetEvent(CUgraphNode, CUevent);
CUresult cuGraphEventWaitNodeSetEvent(CUgraphNode, CUevent);
CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec, CUgraphNode,
                                           const CUDA_KERNEL_NODE_PARAMS*);
CUresult cuGraphExecMemcpyNodeSetParams(CUgraphExec, CUgraphNode, const CUDA_MEMCPY3D*, CUcontext);
CUresult cuGraphExecMemsetNodeSetParams(CUgraphExec, CUgraphNode, const CUDA_MEMSET_NODE_PARAMS*,
                                        CUcontext);
CUresult cuGraphExecHostNodeSetParams(CUgraphExec, CUgraphNode, const CUDA_HOST_NODE_PARAMS*);
CUresult cuGraphExecBatchMemOpNodeSetParams(CUgraphExec, CUgraphNode,
                                            const CUDA_BATCH_MEM_OP_NODE_PARAMS*);
CUresult cuGraphExecEventRecordNodeSetEvent(CUgraphExec, CUgraphNode, CUevent);
CUresult cuGraphExecEventWaitNodeSetEvent(CUgraphExec, CUgraphNode, CUevent);
}

static CUresult no_type(int type) {
  return refuse(CUDA_ERROR_NOT_SUPPORTED,
                "parameters of graph nodes of type " + std::to_string(type) + " cannot be set");
}

SC_EXPORT CUresult cuGraphNodeGetParams(CUgraphNode handle, CUgraphNodeParams* out) {
  SC_API(cuGraphNodeGetParams, 0);
  std::shared_ptr<Node> node = graph_nodes().get(handle);
  if (!node) return refuse(CUDA_ERROR_INVALID_HANDLE, "not a graph node");
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *out = CUgraphNodeParams{};
  out->type = node->type;
  switch (node->type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
      return cuGraphKernelNodeGetParams_v2(handle, &out->kernel);
    case CU_GRAPH_NODE_TYPE_MEMCPY:
      return cuGraphMemcpyNodeGetParams(handle, &out->memcpy.copyParams);
    case CU_GRAPH_NODE_TYPE_MEMSET:
      return cuGraphMemsetNodeGetParams(handle, &out->memset);
    case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
      return cuGraphBatchMemOpNodeGetParams(handle, &out->memOp);
    default:
      break;
  }
  std::lock_guard<std::mutex> lock(graph_mutex());
  switch (node->type) {
    case CU_GRAPH_NODE_TYPE_HOST:
      out->host.fn = node->work.host.fn;
      out->host.userData = node->work.host.data;
      break;
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
      out->event = static_cast<CUevent>(node->work.event->handle);
      break;
    case CU_GRAPH_NODE_TYPE_GRAPH:
      out->graph = {static_cast<CUgraph>(node->child->handle), node->child->moved};
      break;
    case CU_GRAPH_NODE_TYPE_CONDITIONAL:
      out->conditional = {reinterpret_cast<uint64_t>(node->condition->cell), node->condition_type,
                          static_cast<unsigned>(node->bodies.size()), node->body_handles.data(),
                          primary_context()};
      break;
    default:
      break;
  }
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuGraphNodeSetParams(CUgraphNode node, CUgraphNodeParams* p) {
  SC_API(cuGraphNodeSetParams, 0);
  if (p == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const CUDA_HOST_NODE_PARAMS host{p->host.fn, p->host.userData};
  switch (p->type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
      return cuGraphKernelNodeSetParams_v2(node, &p->kernel);
    case CU_GRAPH_NODE_TYPE_MEMCPY:
      return cuGraphMemcpyNodeSetParams(node, &p->memcpy.copyParams);
    case CU_GRAPH_NODE_TYPE_MEMSET:
      return cuGraphMemsetNodeSetParams(node, &p->memset);
    case CU_GRAPH_NODE_TYPE_HOST:
      return cuGraphHostNodeSetParams(node, &host);
    case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
      return cuGraphBatchMemOpNodeSetParams(node, &p->memOp);
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
      return cuGraphEventRecordNodeSetEvent(node, p->event);
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
      return cuGraphEventWaitNodeSetEvent(node, p->event);
    default:
      return no_type(p->type);
  }
}

SC_EXPORT CUresult cuGraphExecNodeSetParams(CUgraphExec exec, CUgraphNode node,
                                            CUgraphNodeParams* p) {
  SC_API(cuGraphExecNodeSetParams, 0);
  if (p == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const CUDA_HOST_NODE_PARAMS host{p->host.fn, p->host.userData};
  switch (p->type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
      return cuGraphExecKernelNodeSetParams_v2(exec, node, &p->kernel);
    case CU_GRAPH_NODE_TYPE_MEMCPY:
      return cuGraphExecMemcpyNodeSetParams(exec, node, &p->memcpy.copyParams, nullptr);
    case CU_GRAPH_NODE_TYPE_MEMSET:
      return cuGraphExecMemsetNodeSetParams(exec, node, &p->memset, nullptr);
    case CU_GRAPH_NODE_TYPE_HOST:
      return cuGraphExecHostNodeSetParams(exec, node, &host);
    case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
      return cuGraphExecBatchMemOpNodeSetParams(exec, node, &p->memOp);
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
      return cuGraphExecEventRecordNodeSetEvent(exec, node, p->event);
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
      return cuGraphExecEventWaitNodeSetEvent(exec, node, p->event);
    default:
      return no_type(p->type);
  }
}
