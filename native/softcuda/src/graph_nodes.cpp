// Nodes by their parameters: adding, reading and changing them, in definitions and executables.
// Every call builds the one structure for all types, which build() turns into what the node does
// (G1).
#include "conditionals.h"
#include "copies.h"
#include "graphs.h"
#include "memops.h"
#include "modules.h"

namespace softcuda {
namespace {

using Params = CUgraphNodeParams;
constexpr auto kKernel = CU_GRAPH_NODE_TYPE_KERNEL, kCopy = CU_GRAPH_NODE_TYPE_MEMCPY,
               kFill = CU_GRAPH_NODE_TYPE_MEMSET, kHost = CU_GRAPH_NODE_TYPE_HOST,
               kGraph = CU_GRAPH_NODE_TYPE_GRAPH, kWait = CU_GRAPH_NODE_TYPE_WAIT_EVENT,
               kRecord = CU_GRAPH_NODE_TYPE_EVENT_RECORD, kMemops = CU_GRAPH_NODE_TYPE_BATCH_MEM_OP;

Params of_type(CUgraphNodeType type) {
  Params p{};
  p.type = type;
  return p;
}
Params of(const CUDA_KERNEL_NODE_PARAMS& given) {
  Params p = of_type(kKernel);
  p.kernel = given;
  return p;
}
Params of(const CUDA_MEMCPY3D& given) {
  Params p = of_type(kCopy);
  p.memcpy.copyParams = given;
  return p;
}
Params of(const CUDA_MEMSET_NODE_PARAMS& given) {
  Params p = of_type(kFill);
  p.memset = given;
  return p;
}
Params of(const CUDA_HOST_NODE_PARAMS& given) {
  Params p = of_type(kHost);
  p.host.fn = given.fn;
  p.host.userData = given.userData;
  return p;
}
Params of(const CUDA_BATCH_MEM_OP_NODE_PARAMS& given) {
  Params p = of_type(kMemops);
  p.memOp = given;
  return p;
}
Params of(CUgraphNodeType type, CUevent event) {
  Params p = of_type(type);
  p.event = event;
  return p;
}

CUresult build_kernel(const CUDA_KERNEL_NODE_PARAMS& p, Work* out) {
  // A kernel of a library is named by the other field; both hold one handle (library.cpp).
  const CUfunction function = p.func != nullptr ? p.func : static_cast<CUfunction>(p.kern);
  return make_kernel(find_function(function), softcuda_dim3{p.gridDimX, p.gridDimY, p.gridDimZ},
                     softcuda_dim3{p.blockDimX, p.blockDimY, p.blockDimZ}, p.sharedMemBytes,
                     p.kernelParams, p.extra, &out->kernel);
}

CUresult build_copy(const CUDA_MEMCPY3D& p, Work* out) {
  auto copy = std::make_shared<CopyWork>();
  if (CUresult r = make_copy(p, copy.get()); r != CUDA_SUCCESS) return r;
  if (copy->width == 0) return refuse(CUDA_ERROR_INVALID_VALUE, "a copy node of 0 bytes");
  out->copy = std::move(copy);
  return CUDA_SUCCESS;
}

CUresult build_fill(const CUDA_MEMSET_NODE_PARAMS& p, Work* out) {
  auto fill = std::make_shared<FillWork>();
  if (CUresult r = make_fill(p, fill.get()); r != CUDA_SUCCESS) return r;
  if (fill->width == 0) return refuse(CUDA_ERROR_INVALID_VALUE, "a fill node of 0 bytes");
  out->fill = std::move(fill);
  return CUDA_SUCCESS;
}

CUresult build(const Params& p, Node* out) {
  Work& work = out->work;
  out->type = p.type;
  switch (p.type) {
    case CU_GRAPH_NODE_TYPE_EMPTY:
      return CUDA_SUCCESS;
    case kKernel:
      work.kind = WorkKind::kernel;
      return build_kernel(p.kernel, &work);
    case kCopy:
      work.kind = WorkKind::copy;
      out->copy_params = p.memcpy.copyParams;
      return build_copy(out->copy_params, &work);
    case kFill:
      work.kind = WorkKind::fill;
      out->fill_params = p.memset;
      return build_fill(out->fill_params, &work);
    case kHost:
      if (p.host.fn == nullptr || p.host.syncMode > 1) return CUDA_ERROR_INVALID_VALUE;
      work.kind = WorkKind::host;
      work.host = HostWork{p.host.fn, p.host.userData};
      return CUDA_SUCCESS;
    case kWait:
    case kRecord:
      work.kind = p.type == kRecord ? WorkKind::event_record : WorkKind::event_wait;
      work.event = find_event(p.event);
      return work.event ? CUDA_SUCCESS : refuse(CUDA_ERROR_INVALID_HANDLE, "not an event");
    case kMemops:
      return memop_work(&p.memOp, &work);
    default:
      return refuse(CUDA_ERROR_NOT_SUPPORTED,
                    std::string("not implemented for graph nodes of type ") +
                        std::to_string(p.type) + " (" + type_name(p.type) + ")");
  }
}

CUresult typed(CUgraphNode handle, CUgraphNodeType type, std::shared_ptr<Node>* out) {
  *out = graph_nodes().get(handle);
  if (!*out) return refuse(CUDA_ERROR_INVALID_HANDLE, "not a graph node");
  if ((*out)->type == type) return CUDA_SUCCESS;
  return refuse(CUDA_ERROR_INVALID_VALUE, std::string("the node is a ") + type_name((*out)->type) +
                                              " node, not a " + type_name(type) + " node");
}

// New parameters for a definition's node; executables made before keep theirs.
CUresult set(CUgraphNode handle, const Params& p) {
  std::shared_ptr<Node> node;
  if (CUresult r = typed(handle, p.type, &node); r != CUDA_SUCCESS) return r;
  Node made;
  if (CUresult r = build(p, &made); r != CUDA_SUCCESS) return r;
  std::lock_guard<std::mutex> lock(graph_mutex());
  node->work = std::move(made.work);
  node->copy_params = made.copy_params;
  node->fill_params = made.fill_params;
  return CUDA_SUCCESS;
}

CUresult set(CUgraphExec exec, CUgraphNode node, const Params& p) {
  Node made;
  if (CUresult r = build(p, &made); r != CUDA_SUCCESS) return r;
  return set_exec_work(exec, node, p.type, std::move(made.work));
}

// Pointers in what is given stay valid as long as the node and its parameters.
void read(Node& node, Params* out) {
  std::lock_guard<std::mutex> lock(graph_mutex());
  *out = of_type(node.type);
  switch (node.type) {
    case kKernel: {
      const KernelWork& k = *node.work.kernel;
      const softcuda_entry& entry = k.function->entry();
      node.param_pointers.clear();
      for (unsigned i = 0; i < entry.nparams; ++i) {
        node.param_pointers.push_back(const_cast<char*>(k.given.data()) + entry.offsets[i]);
      }
      out->kernel = {static_cast<CUfunction>(k.function->handle),
                     k.grid.x,
                     k.grid.y,
                     k.grid.z,
                     k.block.x,
                     k.block.y,
                     k.block.z,
                     k.shared_bytes,
                     node.param_pointers.data(),
                     nullptr,
                     nullptr,
                     primary_context()};
      break;
    }
    case kCopy:
      out->memcpy.copyParams = node.copy_params;
      break;
    case kFill:
      out->memset = node.fill_params;
      break;
    case kHost:
      out->host.fn = node.work.host.fn;
      out->host.userData = node.work.host.data;
      break;
    case kWait:
    case kRecord:
      out->event = static_cast<CUevent>(node.work.event->handle);
      break;
    case kMemops: {
      const MemopWork& work = *node.work.memop;
      out->memOp = {primary_context(), static_cast<unsigned>(work.given.size()),
                    const_cast<CUstreamBatchMemOpParams*>(work.given.data()), work.flags};
      break;
    }
    case kGraph:
      out->graph = {static_cast<CUgraph>(node.child->handle), node.child->moved};
      break;
    case CU_GRAPH_NODE_TYPE_CONDITIONAL:
      out->conditional = {reinterpret_cast<uint64_t>(node.condition->cell), node.condition_type,
                          static_cast<unsigned>(node.bodies.size()), node.body_handles.data(),
                          primary_context()};
      break;
    default:
      break;
  }
}

template <class T, class Field>
CUresult get(CUgraphNode handle, CUgraphNodeType type, T* out, const Field& field) {
  std::shared_ptr<Node> node;
  if (CUresult r = typed(handle, type, &node); r != CUDA_SUCCESS) return r;
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Params p;
  read(*node, &p);
  *out = field(p);
  return CUDA_SUCCESS;
}

}  // namespace

const char* type_name(CUgraphNodeType type) {
  static const char* const names[] = {"kernel", "memcpy", "memset",     "host",
                                      "graph",  "empty",  "event wait", "event record"};
  if (type == kMemops) return "memory operation";
  return type >= 0 && type <= kRecord ? names[type] : "other";
}

CUresult add_params(CUgraphNode* out, CUgraph graph, const CUgraphNode* deps, size_t n,
                    const Params& params) {
  auto node = std::make_shared<Node>();
  if (CUresult r = build(params, node.get()); r != CUDA_SUCCESS) return r;
  return add_node(out, graph, deps, n, std::move(node));
}

}  // namespace softcuda

using namespace softcuda;

#define ADD(name, symbol, ...)                                                                  \
  SC_EXPORT CUresult symbol(CUgraphNode* out, CUgraph graph, const CUgraphNode* deps, size_t n, \
                            __VA_ARGS__) {                                                      \
    SC_API(name, 0);                                                                            \
    if (p == nullptr) return CUDA_ERROR_INVALID_VALUE;                                          \
    return add_params(out, graph, deps, n, of(*p));                                             \
  }
ADD(cuGraphAddKernelNode, cuGraphAddKernelNode_v2, const CUDA_KERNEL_NODE_PARAMS* p)
ADD(cuGraphAddHostNode, cuGraphAddHostNode, const CUDA_HOST_NODE_PARAMS* p)
ADD(cuGraphAddMemcpyNode, cuGraphAddMemcpyNode, const CUDA_MEMCPY3D* p, CUcontext)
ADD(cuGraphAddMemsetNode, cuGraphAddMemsetNode, const CUDA_MEMSET_NODE_PARAMS* p, CUcontext)
ADD(cuGraphAddBatchMemOpNode, cuGraphAddBatchMemOpNode, const CUDA_BATCH_MEM_OP_NODE_PARAMS* p)

SC_EXPORT CUresult cuGraphAddEmptyNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* deps,
                                       size_t n) {
  SC_API(cuGraphAddEmptyNode, 0);
  return add_params(out, graph, deps, n, of_type(CU_GRAPH_NODE_TYPE_EMPTY));
}

#define SET(name, symbol, Given)                                \
  SC_EXPORT CUresult symbol(CUgraphNode node, const Given* p) { \
    SC_API(name, 0);                                            \
    if (p == nullptr) return CUDA_ERROR_INVALID_VALUE;          \
    return set(node, of(*p));                                   \
  }
SET(cuGraphKernelNodeSetParams, cuGraphKernelNodeSetParams_v2, CUDA_KERNEL_NODE_PARAMS)
SET(cuGraphMemcpyNodeSetParams, cuGraphMemcpyNodeSetParams, CUDA_MEMCPY3D)
SET(cuGraphMemsetNodeSetParams, cuGraphMemsetNodeSetParams, CUDA_MEMSET_NODE_PARAMS)
SET(cuGraphHostNodeSetParams, cuGraphHostNodeSetParams, CUDA_HOST_NODE_PARAMS)
SET(cuGraphBatchMemOpNodeSetParams, cuGraphBatchMemOpNodeSetParams, CUDA_BATCH_MEM_OP_NODE_PARAMS)

#define EXEC_SET(name, symbol, ...)                                            \
  SC_EXPORT CUresult symbol(CUgraphExec exec, CUgraphNode node, __VA_ARGS__) { \
    SC_API(name, 0);                                                           \
    if (p == nullptr) return CUDA_ERROR_INVALID_VALUE;                         \
    return set(exec, node, of(*p));                                            \
  }
EXEC_SET(cuGraphExecKernelNodeSetParams, cuGraphExecKernelNodeSetParams_v2,
         const CUDA_KERNEL_NODE_PARAMS* p)
EXEC_SET(cuGraphExecMemcpyNodeSetParams, cuGraphExecMemcpyNodeSetParams, const CUDA_MEMCPY3D* p,
         CUcontext)
EXEC_SET(cuGraphExecMemsetNodeSetParams, cuGraphExecMemsetNodeSetParams,
         const CUDA_MEMSET_NODE_PARAMS* p, CUcontext)
EXEC_SET(cuGraphExecHostNodeSetParams, cuGraphExecHostNodeSetParams, const CUDA_HOST_NODE_PARAMS* p)
EXEC_SET(cuGraphExecBatchMemOpNodeSetParams, cuGraphExecBatchMemOpNodeSetParams,
         const CUDA_BATCH_MEM_OP_NODE_PARAMS* p)

#define GET(name, symbol, Given, TYPE, field)                                      \
  SC_EXPORT CUresult symbol(CUgraphNode node, Given* out) {                        \
    SC_API(name, 0);                                                               \
    return get(node, TYPE, out, [](const CUgraphNodeParams& p) { return field; }); \
  }
GET(cuGraphKernelNodeGetParams, cuGraphKernelNodeGetParams_v2, CUDA_KERNEL_NODE_PARAMS, kKernel,
    p.kernel)
GET(cuGraphMemcpyNodeGetParams, cuGraphMemcpyNodeGetParams, CUDA_MEMCPY3D, kCopy,
    p.memcpy.copyParams)
GET(cuGraphMemsetNodeGetParams, cuGraphMemsetNodeGetParams, CUDA_MEMSET_NODE_PARAMS, kFill,
    p.memset)
GET(cuGraphHostNodeGetParams, cuGraphHostNodeGetParams, CUDA_HOST_NODE_PARAMS, kHost,
    (CUDA_HOST_NODE_PARAMS{p.host.fn, p.host.userData}))
GET(cuGraphBatchMemOpNodeGetParams, cuGraphBatchMemOpNodeGetParams, CUDA_BATCH_MEM_OP_NODE_PARAMS,
    kMemops, p.memOp)
GET(cuGraphChildGraphNodeGetGraph, cuGraphChildGraphNodeGetGraph, CUgraph, kGraph, p.graph.graph)
GET(cuGraphEventRecordNodeGetEvent, cuGraphEventRecordNodeGetEvent, CUevent, kRecord, p.event)
GET(cuGraphEventWaitNodeGetEvent, cuGraphEventWaitNodeGetEvent, CUevent, kWait, p.event)

#define EVENT(kind, TYPE)                                                                       \
  SC_EXPORT CUresult cuGraphAdd##kind##Node(CUgraphNode* out, CUgraph graph,                    \
                                            const CUgraphNode* deps, size_t n, CUevent event) { \
    SC_API(cuGraphAdd##kind##Node, 0);                                                          \
    return add_params(out, graph, deps, n, of(TYPE, event));                                    \
  }                                                                                             \
  SC_EXPORT CUresult cuGraph##kind##NodeSetEvent(CUgraphNode node, CUevent event) {             \
    SC_API(cuGraph##kind##NodeSetEvent, 0);                                                     \
    return set(node, of(TYPE, event));                                                          \
  }                                                                                             \
  SC_EXPORT CUresult cuGraphExec##kind##NodeSetEvent(CUgraphExec exec, CUgraphNode node,        \
                                                     CUevent event) {                           \
    SC_API(cuGraphExec##kind##NodeSetEvent, 0);                                                 \
    return set(exec, node, of(TYPE, event));                                                    \
  }
EVENT(EventRecord, kRecord)
EVENT(EventWait, kWait)

SC_EXPORT CUresult cuGraphNodeGetParams(CUgraphNode handle, CUgraphNodeParams* out) {
  SC_API(cuGraphNodeGetParams, 0);
  std::shared_ptr<Node> node = graph_nodes().get(handle);
  if (!node) return refuse(CUDA_ERROR_INVALID_HANDLE, "not a graph node");
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  read(*node, out);
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuGraphNodeSetParams(CUgraphNode node, CUgraphNodeParams* p) {
  SC_API(cuGraphNodeSetParams, 0);
  return p == nullptr ? CUDA_ERROR_INVALID_VALUE : set(node, *p);
}

SC_EXPORT CUresult cuGraphExecNodeSetParams(CUgraphExec exec, CUgraphNode node,
                                            CUgraphNodeParams* p) {
  SC_API(cuGraphExecNodeSetParams, 0);
  return p == nullptr ? CUDA_ERROR_INVALID_VALUE : set(exec, node, *p);
}
