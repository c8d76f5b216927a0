// Adding graph nodes: conversion of parameters, creation of the nodes' work, and entry points.
#include "graph_nodes.h"

#include "memops.h"
#include "modules.h"

namespace softcuda {

Params of_type(CUgraphNodeType type) {
  Params p{};
  p.type = type;
  return p;
}
Params of(const CUDA_KERNEL_NODE_PARAMS& params) {
  Params p = of_type(kKernel);
  p.kernel = params;
  return p;
}
Params of(const CUDA_MEMCPY3D& params) {
  Params p = of_type(kCopy);
  p.memcpy.copyParams = params;
  return p;
}
Params of(const CUDA_MEMSET_NODE_PARAMS& params) {
  Params p = of_type(kFill);
  p.memset = params;
  return p;
}
Params of(const CUDA_HOST_NODE_PARAMS& params) {
  Params p = of_type(kHost);
  p.host = {params.fn, params.userData, 0, nullptr};
  return p;
}
Params of(const CUDA_BATCH_MEM_OP_NODE_PARAMS& params) {
  Params p = of_type(kMemops);
  p.memOp = params;
  return p;
}
Params of(const Params& params) { return params; }
Params of(CUgraphNodeType type, CUevent event) {
  Params p = of_type(type);
  p.event = event;
  return p;
}

Work build_work(const Params& p) {
  switch (p.type) {
    case kEmpty:
      return Work();
    case kKernel:
      return Work(make_kernel(p.kernel));
    case kCopy:
      require(p.memcpy.copyParams.WidthInBytes > 0, CUDA_ERROR_INVALID_VALUE,
              "a memcpy node must copy at least 1 byte");
      return Work(make_copy(p.memcpy.copyParams));
    case kFill:
      require(p.memset.width > 0, CUDA_ERROR_INVALID_VALUE,
              "a memset node must set at least 1 element");
      return Work(make_fill(p.memset));
    case kHost:
      require(p.host.fn != nullptr && p.host.syncMode <= 1);
      return Work(HostWork{p.host.fn, p.host.userData});
    case kWait:
      return Work(WorkKind::event_wait, events.find(p.event));
    case kRecord:
      return Work(WorkKind::event_record, events.find(p.event));
    case kMemops:
      return Work(make_memops(p.memOp));
    default:
      refuse(CUDA_ERROR_NOT_SUPPORTED, "graph nodes of type " + std::to_string(p.type) + " (" +
                                           type_name(p.type) + ") are not implemented");
  }
}

std::shared_ptr<Node> find_node(CUgraphNode handle, CUgraphNodeType type) {
  auto node = graph_nodes.find(handle);
  if (node->type == type) return node;
  refuse(CUDA_ERROR_INVALID_VALUE, std::string("expected a node of type ") + type_name(type) +
                                       ", but its type is " + type_name(node->type));
}

const char* type_name(CUgraphNodeType type) {
  static const char* const names[] = {"kernel", "memcpy", "memset",     "host",
                                      "graph",  "empty",  "event wait", "event record"};
  if (type == kMemops) return "memory operation";
  if (type == kAlloc) return "memory allocation";
  if (type == kFree) return "memory free";
  return type >= 0 && type <= kRecord ? names[type] : "other";
}

CUgraphNodeType type_of(WorkKind kind) {
  // The node type for each WorkKind. A graph launch is captured as a child graph node. Conditional
  // work is never enqueued on a stream, so its entry is not used.
  static constexpr CUgraphNodeType types[] = {kEmpty,  kKernel, kCopy,  kFill, kHost,   kGraph,
                                              kMemops, kEmpty,  kAlloc, kFree, kRecord, kWait};
  return types[static_cast<size_t>(kind)];
}

void add_params(CUgraphNode* out, CUgraph graph, const CUgraphNode* deps, size_t n,
                const Params& params) {
  auto node = std::make_shared<Node>();
  node->type = params.type;
  node->work = build_work(params);
  add_node(out, graph, deps, n, std::move(node));
}

}  // namespace softcuda

using namespace softcuda;

#define ADD(symbol, from, ...)                                                                    \
  SC_API(symbol, from, 0, CUgraphNode*, out, CUgraph, graph, const CUgraphNode*, deps, size_t, n, \
         __VA_ARGS__) {                                                                           \
    require(p != nullptr);                                                                        \
    add_params(out, graph, deps, n, of(*p));                                                      \
  }
ADD(cuGraphAddKernelNode_v2, 12000, const CUDA_KERNEL_NODE_PARAMS*, p)
ADD(cuGraphAddHostNode, 10000, const CUDA_HOST_NODE_PARAMS*, p)
ADD(cuGraphAddMemcpyNode, 10000, const CUDA_MEMCPY3D*, p, CUcontext, context)
ADD(cuGraphAddMemsetNode, 10000, const CUDA_MEMSET_NODE_PARAMS*, p, CUcontext, context)
ADD(cuGraphAddBatchMemOpNode, 11070, const CUDA_BATCH_MEM_OP_NODE_PARAMS*, p)

SC_API(cuGraphAddEmptyNode, 10000, 0, CUgraphNode*, out, CUgraph, graph, const CUgraphNode*, deps,
       size_t, n) {
  add_params(out, graph, deps, n, of_type(kEmpty));
}

#define ADD_EVENT(symbol, TYPE)                                                                    \
  SC_API(symbol, 11010, 0, CUgraphNode*, out, CUgraph, graph, const CUgraphNode*, deps, size_t, n, \
         CUevent, event) {                                                                         \
    add_params(out, graph, deps, n, of(TYPE, event));                                              \
  }
ADD_EVENT(cuGraphAddEventRecordNode, kRecord)
ADD_EVENT(cuGraphAddEventWaitNode, kWait)
