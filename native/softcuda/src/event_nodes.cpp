// Event nodes of graphs: record and wait (invariants V1-V3).
#include "graphs.h"

using namespace softcuda;

namespace {

CUresult event_work(CUevent handle, WorkKind kind, Work* out) {
  std::shared_ptr<Event> event = find_event(handle);
  if (!event) return refuse(CUDA_ERROR_INVALID_HANDLE, "not an event");
  out->kind = kind;
  out->event = std::move(event);
  return CUDA_SUCCESS;
}

WorkKind kind_of(CUgraphNodeType type) {
  return type == CU_GRAPH_NODE_TYPE_EVENT_RECORD ? WorkKind::event_record : WorkKind::event_wait;
}

CUresult add(CUgraphNode* out, CUgraph graph, const CUgraphNode* deps, size_t n, CUevent event,
             CUgraphNodeType type) {
  auto node = std::make_shared<Node>();
  node->type = type;
  if (CUresult r = event_work(event, kind_of(type), &node->work); r != CUDA_SUCCESS) return r;
  return add_node(out, graph, deps, n, std::move(node));
}

CUresult find(CUgraphNode handle, CUgraphNodeType type, std::shared_ptr<Node>* out) {
  *out = graph_nodes().get(handle);
  if (!*out) return refuse(CUDA_ERROR_INVALID_HANDLE, "not a graph node");
  if ((*out)->type == type) return CUDA_SUCCESS;
  return refuse(CUDA_ERROR_INVALID_VALUE, "the node is no event node of that kind");
}

CUresult get(CUgraphNode handle, CUevent* out, CUgraphNodeType type) {
  std::shared_ptr<Node> node;
  if (CUresult r = find(handle, type, &node); r != CUDA_SUCCESS) return r;
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard<std::mutex> lock(graph_mutex());
  *out = static_cast<CUevent>(node->work.event->handle);
  return CUDA_SUCCESS;
}

CUresult set(CUgraphNode handle, CUevent event, CUgraphNodeType type) {
  std::shared_ptr<Node> node;
  if (CUresult r = find(handle, type, &node); r != CUDA_SUCCESS) return r;
  Work work;
  if (CUresult r = event_work(event, kind_of(type), &work); r != CUDA_SUCCESS) return r;
  std::lock_guard<std::mutex> lock(graph_mutex());
  node->work = std::move(work);
  return CUDA_SUCCESS;
}

CUresult set_executable(CUgraphExec exec, CUgraphNode node, CUevent event, CUgraphNodeType type) {
  Work work;
  if (CUresult r = event_work(event, kind_of(type), &work); r != CUDA_SUCCESS) return r;
  return set_exec_work(exec, node, type, std::move(work),
                       [](const Work&, const Work&) -> CUresult { return CUDA_SUCCESS; });
}

}  // namespace

SC_EXPORT CUresult cuGraphAddEventRecordNode(CUgraphNode* out, CUgraph graph,
                                             const CUgraphNode* deps, size_t n, CUevent event) {
  SC_API(cuGraphAddEventRecordNode, 0);
  return add(out, graph, deps, n, event, CU_GRAPH_NODE_TYPE_EVENT_RECORD);
}

SC_EXPORT CUresult cuGraphAddEventWaitNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* deps,
                                           size_t n, CUevent event) {
  SC_API(cuGraphAddEventWaitNode, 0);
  return add(out, graph, deps, n, event, CU_GRAPH_NODE_TYPE_WAIT_EVENT);
}

SC_EXPORT CUresult cuGraphEventRecordNodeGetEvent(CUgraphNode node, CUevent* out) {
  SC_API(cuGraphEventRecordNodeGetEvent, 0);
  return get(node, out, CU_GRAPH_NODE_TYPE_EVENT_RECORD);
}

SC_EXPORT CUresult cuGraphEventWaitNodeGetEvent(CUgraphNode node, CUevent* out) {
  SC_API(cuGraphEventWaitNodeGetEvent, 0);
  return get(node, out, CU_GRAPH_NODE_TYPE_WAIT_EVENT);
}

SC_EXPORT CUresult cuGraphEventRecordNodeSetEvent(CUgraphNode node, CUevent event) {
  SC_API(cuGraphEventRecordNodeSetEvent, 0);
  return set(node, event, CU_GRAPH_NODE_TYPE_EVENT_RECORD);
}

SC_EXPORT CUresult cuGraphEventWaitNodeSetEvent(CUgraphNode node, CUevent event) {
  SC_API(cuGraphEventWaitNodeSetEvent, 0);
  return set(node, event, CU_GRAPH_NODE_TYPE_WAIT_EVENT);
}

SC_EXPORT CUresult cuGraphExecEventRecordNodeSetEvent(CUgraphExec exec, CUgraphNode node,
                                                      CUevent event) {
  SC_API(cuGraphExecEventRecordNodeSetEvent, 0);
  return set_executable(exec, node, event, CU_GRAPH_NODE_TYPE_EVENT_RECORD);
}

SC_EXPORT CUresult cuGraphExecEventWaitNodeSetEvent(CUgraphExec exec, CUgraphNode node,
                                                    CUevent event) {
  SC_API(cuGraphExecEventWaitNodeSetEvent, 0);
  return set_executable(exec, node, event, CU_GRAPH_NODE_TYPE_WAIT_EVENT);
}
