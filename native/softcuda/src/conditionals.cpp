// Conditional handles and conditional nodes: creation, checks, and the choice of the body that runs
// next (INVARIANTS.md N1 to N5).
#include "conditionals.h"

#include <deque>
#include <unordered_set>

namespace softcuda {
namespace {

// Returns the condition of a handle if a node of `graph` may use it: the handle must have been
// created for `graph` or for a graph that contains `graph` as a body (INVARIANTS.md N1). Returns
// null otherwise.
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

void check_node_in_body(const Node& node) {
  require(allowed_in_body(node.type), CUDA_ERROR_NOT_SUPPORTED,
          "a conditional body may contain only kernel, memcpy, memset, empty, child graph and "
          "conditional nodes");
  check_in_body(node.work);
  if (!node.child) return;
  for (auto& inner : node.child->nodes) check_node_in_body(*inner);
}

}  // namespace

void check_in_body(const Work& work) {
  require(
      work.kind != WorkKind::copy || (work.copy->src.target.owner && work.copy->dst.target.owner),
      CUDA_ERROR_NOT_SUPPORTED,
      "a memcpy node in a conditional body may not access pageable host memory");
}

namespace {

// The addresses of all cells (Condition::cell). A conditional handle is the address of a cell. A
// handle that a launch passes as a kernel parameter is looked up here before it is used.
struct Cells {
  std::mutex mutex;
  std::unordered_set<const softcuda_condition*> addresses;
};
Cells& g_cells = *new Cells;

}  // namespace

bool is_condition(const softcuda_condition* cell) {
  std::lock_guard<std::mutex> lock(g_cells.mutex);
  return g_cells.addresses.count(cell) != 0;
}

bool has_conditional(const Graph& graph) {
  for (auto& node : graph.nodes) {
    if (node->type == CU_GRAPH_NODE_TYPE_CONDITIONAL) return true;
    if (node->child && has_conditional(*node->child)) return true;
  }
  return false;
}

void check_conditions(const Graph& graph, bool in_body) {
  for (auto& condition : graph.conditions) {
    require(condition->used, CUDA_ERROR_INVALID_VALUE,
            "a conditional handle of the graph is not used by any node");
  }
  for (auto& node : graph.nodes) {
    if (in_body) check_node_in_body(*node);
    if (node->child) {
      require(!has_conditional(*node->child), CUDA_ERROR_NOT_SUPPORTED,
              "a conditional node was added to a child graph");
      check_conditions(*node->child, in_body);
    }
    for (auto& body : node->bodies) check_conditions(*body, true);
  }
}

void add_conditional(CUgraphNode* out, CUgraph handle, const CUgraphNode* deps, size_t n,
                     CUDA_CONDITIONAL_NODE_PARAMS* p) {
  const auto graph = graphs.find(handle);
  const auto condition = find_condition(graph.get(), p->handle);
  require(
      condition && !condition->used, CUDA_ERROR_INVALID_VALUE,
      "the conditional handle is unknown, belongs to another graph, or is already used by a node");
  require(p->type >= CU_GRAPH_COND_TYPE_IF && p->type <= CU_GRAPH_COND_TYPE_SWITCH,
          CUDA_ERROR_INVALID_VALUE, "the type of the conditional node is not IF, WHILE or SWITCH");
  require(p->size == 1 || (p->size == 2 && p->type == CU_GRAPH_COND_TYPE_IF) ||
              (p->size > 1 && p->type == CU_GRAPH_COND_TYPE_SWITCH),
          CUDA_ERROR_INVALID_VALUE,
          "a WHILE node needs 1 body, an IF node 1 or 2, a SWITCH node at least 1");
  require(p->ctx == nullptr || is_context(p->ctx), CUDA_ERROR_INVALID_CONTEXT,
          "the context of the conditional node is unknown or was destroyed");
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
  if (loops && value == 0) return nullptr;
  // An IF node runs body 0 if the value is not 0. Otherwise it runs body 1, the else branch, if it
  // has one. A SWITCH node runs the body whose index is the value, if there is one.
  size_t index = value != 0 ? 0 : 1;
  if (work.type == CU_GRAPH_COND_TYPE_SWITCH) index = value;
  if (index >= work.bodies.size()) return nullptr;
  if (loops && work.endless) {
    fault(CUDA_ERROR_LAUNCH_FAILED,
          "infinite loop: the body of a WHILE node contains no kernel, so nothing can clear its "
          "condition");
    return nullptr;
  }
  Program* body = work.bodies[index].get();
  return body->nodes.empty() ? nullptr : body;
}

}  // namespace softcuda

using namespace softcuda;

SC_API(cuGraphConditionalHandleCreate, 12030, 0, uint64_t*, out, CUgraph, handle, CUcontext,
       context, unsigned, initial, unsigned, flags) {
  const auto graph = graphs.find(handle);
  require(out != nullptr && flags <= 1);
  require(context == nullptr || is_context(context), CUDA_ERROR_INVALID_CONTEXT);
  // The cells are never freed. A kernel that uses the handle of a destroyed graph therefore writes
  // to valid memory.
  static auto& cells = *new std::deque<softcuda_condition>;
  auto condition = std::make_shared<Condition>();
  condition->initial = initial;
  condition->assign = flags == 1;
  std::lock_guard<std::mutex> lock(graph_mutex);
  condition->cell = &cells.emplace_back(softcuda_condition{SOFTCUDA_CONDITION_MAGIC, initial});
  {
    std::lock_guard<std::mutex> cells_lock(g_cells.mutex);
    g_cells.addresses.insert(condition->cell);
  }
  *out = reinterpret_cast<uint64_t>(condition->cell);
  graph->conditions.push_back(std::move(condition));
}
