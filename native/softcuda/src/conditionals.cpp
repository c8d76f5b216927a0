// Conditional nodes and their handles (invariants N1-N4 of conditionals.h).
#include "conditionals.h"

#include <deque>

namespace softcuda {
namespace {

// A condition steers a node of its own graph or of a body below it.
std::shared_ptr<Condition> find_condition(const Graph* graph, uint64_t handle) {
  std::lock_guard<std::mutex> lock(graph_mutex);
  for (; graph != nullptr; graph = graph->body_of) {
    for (auto& condition : graph->conditions) {
      if (reinterpret_cast<uint64_t>(condition->cell) == handle) return condition;
    }
  }
  return nullptr;
}

bool allowed_in_body(CUgraphNodeType type) {
  return type == CU_GRAPH_NODE_TYPE_KERNEL || type == CU_GRAPH_NODE_TYPE_MEMCPY ||
         type == CU_GRAPH_NODE_TYPE_MEMSET || type == CU_GRAPH_NODE_TYPE_EMPTY ||
         type == CU_GRAPH_NODE_TYPE_GRAPH || type == CU_GRAPH_NODE_TYPE_CONDITIONAL;
}

void check_in_body(const Node& node) {
  need(allowed_in_body(node.type), CUDA_ERROR_NOT_SUPPORTED,
       "a conditional body holds kernel, copy, fill, empty, child and conditional nodes only");
  need(node.work.kind != WorkKind::copy || (node.work.copy->src.owner && node.work.copy->dst.owner),
       CUDA_ERROR_NOT_SUPPORTED, "a copy in a conditional body touches pageable memory");
  if (!node.child) return;
  for (auto& inner : node.child->nodes) check_in_body(*inner);
}

}  // namespace

bool has_conditional(const Graph& graph) {
  for (auto& node : graph.nodes) {
    if (node->type == CU_GRAPH_NODE_TYPE_CONDITIONAL) return true;
    if (node->child && has_conditional(*node->child)) return true;
  }
  return false;
}

void check_body(const Graph& where, const Node& node) {
  if (where.body_of != nullptr) check_in_body(node);
}

void check_conditions(const Graph& graph, bool in_body) {
  for (auto& condition : graph.conditions) {
    need(condition->used, CUDA_ERROR_INVALID_VALUE, "a conditional handle belongs to no node");
  }
  for (auto& node : graph.nodes) {
    if (in_body) check_in_body(*node);
    if (node->child) check_conditions(*node->child, in_body);
    for (auto& body : node->bodies) check_conditions(*body, true);
  }
}

void add_conditional(CUgraphNode* out, CUgraph handle, const CUgraphNode* deps, size_t n,
                     CUDA_CONDITIONAL_NODE_PARAMS* p) {
  const auto graph = graphs.find(handle);
  const auto condition = find_condition(graph.get(), p->handle);
  need(condition && !condition->used, CUDA_ERROR_INVALID_VALUE,
       "the conditional handle is unknown, of another graph, or steers a node already");
  need(p->type == CU_GRAPH_COND_TYPE_IF || p->type == CU_GRAPH_COND_TYPE_WHILE,
       CUDA_ERROR_NOT_SUPPORTED, "conditionals other than IF and WHILE are not implemented");
  need(p->size == 1 || (p->size == 2 && p->type == CU_GRAPH_COND_TYPE_IF), CUDA_ERROR_INVALID_VALUE,
       "the conditional's type and number of bodies disagree");
  need(p->ctx == nullptr || p->ctx == primary_context(), CUDA_ERROR_INVALID_CONTEXT,
       "the conditional is of another context");
  auto node = std::make_shared<Node>();
  node->type = CU_GRAPH_NODE_TYPE_CONDITIONAL;
  node->condition = condition;
  node->condition_type = p->type;
  for (unsigned i = 0; i < p->size; ++i) {
    auto body = std::make_shared<Graph>();
    body->body_of = graph.get();
    node->bodies.push_back(std::move(body));
  }
  add_node(out, handle, deps, n, node);
  for (auto& body : node->bodies) {
    body->handle = graphs.add(body);
    node->body_handles.push_back(static_cast<CUgraph>(body->handle));
  }
  condition->used = true;
  p->phGraph_out = node->body_handles.data();
}

Program* next_body(const ConditionalWork& work, bool first) {
  const unsigned value = __atomic_load_n(&work.cell->value, __ATOMIC_ACQUIRE);
  const bool loops = work.type == CU_GRAPH_COND_TYPE_WHILE;
  if (sticky() != CUDA_SUCCESS || (!first && !loops)) return nullptr;
  const size_t which = value != 0 ? 0 : loops ? work.bodies.size() : 1;
  if (which >= work.bodies.size()) return nullptr;
  if (loops && work.endless) {
    fault(CUDA_ERROR_LAUNCH_FAILED, "a WHILE node whose body holds no kernel never ends");
    return nullptr;
  }
  Program* body = work.bodies[which].get();
  return body->nodes.empty() ? nullptr : body;
}

}  // namespace softcuda

using namespace softcuda;

SC_API(cuGraphConditionalHandleCreate, 12030, 0, uint64_t*, out, CUgraph, handle, CUcontext,
       context, unsigned, initial, unsigned, flags) {
  const auto graph = graphs.find(handle);
  need(out != nullptr && flags <= 1);
  need(context == nullptr || context == primary_context(), CUDA_ERROR_INVALID_CONTEXT);
  // Cells are never freed, so that a stale handle is harmless.
  static auto& cells = *new std::deque<softcuda_condition>;
  auto condition = std::make_shared<Condition>();
  condition->initial = initial;
  condition->assign = flags == 1;
  std::lock_guard<std::mutex> lock(graph_mutex);
  condition->cell = &cells.emplace_back(softcuda_condition{SOFTCUDA_CONDITION_MAGIC, initial});
  *out = reinterpret_cast<uint64_t>(condition->cell);
  graph->conditions.push_back(std::move(condition));
}
