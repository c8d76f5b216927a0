// Graph definitions: nodes, dependencies and child graphs (INVARIANTS.md G1, G2, G7, G9).
#include "graphs.h"

#include <algorithm>

#include "conditionals.h"
#include "memory_pools.h"

namespace softcuda {

Graph::Graph() { live_add(Resource::graph, 1); }
Graph::~Graph() {
  for (auto& node : nodes) graph_nodes.take(node->handle);
  live_add(Resource::graph, -1);
}

std::shared_ptr<Graph> clone_graph(const Graph& graph) {
  auto clone = std::make_shared<Graph>();
  clone->references = std::make_shared<References>(*graph.references);
  std::map<const Node*, Node*> copies;
  for (auto& node : graph.nodes) {
    auto copy = std::make_shared<Node>(*node);
    copy->graph = clone.get();
    copy->original = node->handle;
    copy->param_pointers.clear();
    if (node->child) {
      copy->child = clone_graph(*node->child);
      copy->child->handle = graphs.add(copy->child);
    }
    copy->handle = graph_nodes.add(copy);
    copies[node.get()] = copy.get();
    clone->nodes.push_back(std::move(copy));
  }
  for (auto& node : clone->nodes) {
    for (Node*& dependency : node->dependencies) dependency = copies[dependency];
    std::map<const Node*, unsigned char> ports;
    for (auto& item : node->ports) ports[copies[item.first]] = item.second;
    node->ports = std::move(ports);
  }
  return clone;
}

// Removes the handles of a node's child graph and conditional bodies.
static void remove_child_handles(Node& node) {
  for (auto& body : node.bodies) {
    for (auto& inner : body->nodes) remove_child_handles(*inner);
    graphs.take(body->handle);
  }
  if (!node.child) return;
  for (auto& inner : node.child->nodes) remove_child_handles(*inner);
  graphs.take(node.child->handle);
}

std::shared_ptr<Graph> remove_graph(CUgraph handle) {
  std::shared_ptr<Graph> graph = graphs.take(handle);
  if (!graph) return graph;
  for (auto& node : graph->nodes) remove_child_handles(*node);
  return graph;
}

void add_node(CUgraphNode* out, CUgraph handle, const CUgraphNode* dependencies, size_t n,
              std::shared_ptr<Node> node) {
  const auto graph = graphs.find(handle);
  require(out != nullptr && (dependencies != nullptr || n == 0));
  std::lock_guard<std::mutex> lock(graph_mutex);
  for (size_t i = 0; i < n; ++i) {
    std::shared_ptr<Node> dependency = graph_nodes.get(dependencies[i]);
    auto& list = node->dependencies;
    const bool foreign = !dependency || dependency->graph != graph.get();
    if (foreign || std::find(list.begin(), list.end(), dependency.get()) != list.end()) {
      refuse(CUDA_ERROR_INVALID_VALUE,
             "dependency " + std::to_string(i) +
                 (foreign ? " is not a node of this graph" : " is a duplicate"));
    }
    list.push_back(dependency.get());
  }
  if (node->work.memory) attach_memory(graph.get(), node->work);
  node->graph = graph.get();
  node->handle = graph_nodes.add(node);
  *out = static_cast<CUgraphNode>(node->handle);
  graph->nodes.push_back(std::move(node));
}

bool has_memory_node(const Graph& graph) {
  return std::any_of(graph.nodes.begin(), graph.nodes.end(), [](const auto& node) {
    return node->work.memory != nullptr || (node->child && has_memory_node(*node->child));
  });
}

void require_no_memory_node(const Graph& graph, const char* text) {
  require(!has_memory_node(graph), CUDA_ERROR_NOT_SUPPORTED, text);
}

void require_not_capturing(const Graph& graph) {
  require(graph.captures.load() == 0, CUDA_ERROR_ILLEGAL_STATE,
          "a stream is capturing into this graph");
}

void require_standalone(const Graph& graph) {
  require(!graph.moved && graph.body_of == nullptr, CUDA_ERROR_INVALID_VALUE,
          "the graph is a child or a conditional body of another graph");
}

}  // namespace softcuda

using namespace softcuda;

SC_API(cuGraphCreate, 10000, 0, CUgraph*, out, unsigned, flags) {
  require(out != nullptr && flags == 0);
  auto graph = std::make_shared<Graph>();
  graph->handle = graphs.add(graph);
  *out = static_cast<CUgraph>(graph->handle);
}

SC_API(cuGraphDestroy, 10000, 0, CUgraph, handle) {
  InlineDestructorScope inline_destructors;
  const auto graph = graphs.find(handle);
  require_not_capturing(*graph);
  require_standalone(*graph);
  remove_graph(handle);
}

// Returns a clone for a child graph node. The clone has the nodes and the user-object references
// that `child` has now, but no handle yet.
static std::shared_ptr<Graph> clone_child(CUgraph child) {
  const auto original = graphs.find(child);
  require(!original->moved, CUDA_ERROR_INVALID_VALUE,
          "the child graph was moved into another graph");
  std::lock_guard<std::mutex> lock(graph_mutex);
  require(!has_conditional(*original), CUDA_ERROR_NOT_SUPPORTED,
          "a graph with conditional nodes cannot be a child graph");
  require_no_memory_node(*original,
                         "a graph with memory nodes cannot be cloned as a child graph; move it "
                         "instead");
  return clone_graph(*original);
}

// Adds a child graph node with a clone of `child`. Returns the handle of the clone.
static CUgraph add_clone(CUgraphNode* out, CUgraph graph, const CUgraphNode* deps, size_t n,
                         CUgraph child) {
  auto node = std::make_shared<Node>();
  node->type = CU_GRAPH_NODE_TYPE_GRAPH;
  std::shared_ptr<Graph> clone = clone_child(child);
  node->child = clone;
  add_node(out, graph, deps, n, std::move(node));
  clone->handle = graphs.add(clone);
  return static_cast<CUgraph>(clone->handle);
}

SC_API(cuGraphAddChildGraphNode, 10000, 0, CUgraphNode*, out, CUgraph, graph, const CUgraphNode*,
       deps, size_t, n, CUgraph, child) {
  add_clone(out, graph, deps, n, child);
}

// Whether the graph `wanted` is `top` itself, or a child graph or conditional body inside `top` at
// any depth.
static bool contains(const Graph& top, const Graph* wanted) {
  if (&top == wanted) return true;
  for (auto& node : top.nodes) {
    if (node->child && contains(*node->child, wanted)) return true;
    for (auto& body : node->bodies) {
      if (contains(*body, wanted)) return true;
    }
  }
  return false;
}

// Adds a child graph node that takes ownership of `child`. The child graph keeps its handle and its
// user-object references (INVARIANTS.md G7).
static void move_child(CUgraphNode* out, CUgraph graph, const CUgraphNode* deps, size_t n,
                       CUgraph child) {
  const auto moving = graphs.find(child);
  const auto into = graphs.find(graph);
  require(
      !moving->moved && moving->body_of == nullptr && moving->captures.load() == 0 &&
          !contains(*moving, into.get()),
      CUDA_ERROR_INVALID_VALUE,
      "the child graph cannot be moved: it belongs to or contains the other graph, or a stream is "
      "capturing into it");
  require(!has_conditional(*moving), CUDA_ERROR_NOT_SUPPORTED,
          "a graph with conditional nodes cannot be a child graph");
  auto node = std::make_shared<Node>();
  node->type = CU_GRAPH_NODE_TYPE_GRAPH;
  node->child = moving;
  add_node(out, graph, deps, n, std::move(node));
  moving->moved = true;
}

// Checks an edge and returns its from_port, which is 0 for a full dependency (INVARIANTS.md G9).
static unsigned char port_of(const CUgraphEdgeData& edge, CUgraphNodeType from,
                             CUgraphNodeType to) {
  constexpr auto kernel = CU_GRAPH_NODE_TYPE_KERNEL;
  const bool full = edge.from_port == 0 && edge.type == 0;
  const bool programmatic = (edge.from_port == 1 || edge.from_port == 2) && edge.type == 1;
  require(edge.to_port == 0 && (full || (programmatic && from == kernel && to == kernel)),
          CUDA_ERROR_INVALID_VALUE,
          "a programmatic edge must connect port 1 or 2 of a kernel node to a kernel node");
  return edge.from_port;
}

SC_API(cuGraphAddNode_v2, 12030, 0, CUgraphNode*, out, CUgraph, graph, const CUgraphNode*, deps,
       const CUgraphEdgeData*, edges, size_t, n, CUgraphNodeParams*, params) {
  require(params != nullptr && (deps != nullptr || n == 0));
  std::map<const Node*, unsigned char> ports;
  for (size_t i = 0; edges != nullptr && i < n; ++i) {
    const auto from = graph_nodes.find(deps[i]);
    const unsigned char port = port_of(edges[i], from->type, params->type);
    if (port != 0) ports[from.get()] = port;
  }
  CUDA_CHILD_GRAPH_NODE_PARAMS& child = params->graph;
  if (params->type == CU_GRAPH_NODE_TYPE_CONDITIONAL) {
    add_conditional(out, graph, deps, n, &params->conditional);
  } else if (params->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC) {
    add_alloc_node(out, graph, deps, n, &params->alloc);
  } else if (params->type == CU_GRAPH_NODE_TYPE_MEM_FREE) {
    add_free_node(out, graph, deps, n, params->free);
  } else if (params->type != CU_GRAPH_NODE_TYPE_GRAPH) {
    add_params(out, graph, deps, n, *params);
  } else if (child.ownership == CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE) {
    move_child(out, graph, deps, n, child.graph);
  } else {
    require(child.ownership == CU_GRAPH_CHILD_GRAPH_OWNERSHIP_CLONE, CUDA_ERROR_INVALID_VALUE,
            "unknown ownership of a child graph");
    child.graph = add_clone(out, graph, deps, n, child.graph);
  }
  std::lock_guard<std::mutex> lock(graph_mutex);
  graph_nodes.find(*out)->ports = std::move(ports);
}

void softcuda::replace_child(Node& node, CUgraph child) {
  InlineDestructorScope inline_destructors;
  std::shared_ptr<Graph> clone = clone_child(child);
  Node changed = node;
  changed.child = clone;
  std::shared_ptr<Graph> old;  // destroyed after the mutex is released
  std::lock_guard<std::mutex> lock(graph_mutex);
  require_not_capturing(*node.graph);
  remove_child_handles(node);
  old = std::move(node.child);
  node.child = clone;
  clone->handle = graphs.add(clone);
}

SC_API(cuGraphClone, 10000, 0, CUgraph*, out, CUgraph, handle) {
  const auto graph = graphs.find(handle);
  require(out != nullptr);
  std::lock_guard<std::mutex> lock(graph_mutex);
  require(!has_conditional(*graph), CUDA_ERROR_NOT_SUPPORTED,
          "a graph with conditional nodes cannot be cloned");
  require_no_memory_node(*graph, "a graph with memory nodes cannot be cloned");
  std::shared_ptr<Graph> clone = clone_graph(*graph);
  clone->handle = graphs.add(clone);
  *out = static_cast<CUgraph>(clone->handle);
}

SC_API(cuGraphNodeFindInClone, 10000, 0, CUgraphNode*, out, CUgraphNode, original, CUgraph,
       handle) {
  const auto clone = graphs.get(handle);
  require(clone != nullptr && out != nullptr);
  std::lock_guard<std::mutex> lock(graph_mutex);
  const auto found =
      std::find_if(clone->nodes.begin(), clone->nodes.end(),
                   [&](const std::shared_ptr<Node>& node) { return node->original == original; });
  require(found != clone->nodes.end(), CUDA_ERROR_INVALID_VALUE,
          "the graph has no clone of this node");
  *out = static_cast<CUgraphNode>((*found)->handle);
}

// Adds or removes the edges from[i] -> to[i].
static void change_edges(CUgraph handle, const CUgraphNode* from, const CUgraphNode* to,
                         const CUgraphEdgeData* data, size_t n, bool add) {
  const auto graph = graphs.find(handle);
  require(n == 0 || (from != nullptr && to != nullptr));
  std::lock_guard<std::mutex> lock(graph_mutex);
  require_not_capturing(*graph);
  if (!add) {
    require_no_memory_node(*graph, "edges of a graph with memory nodes cannot be removed");
  }
  for (size_t i = 0; i < n; ++i) {
    const auto source = graph_nodes.get(from[i]);
    const auto target = graph_nodes.get(to[i]);
    require(source && target && source != target && source->graph == graph.get() &&
                target->graph == graph.get(),
            CUDA_ERROR_INVALID_VALUE, "an edge must connect two different nodes of this graph");
    auto& list = target->dependencies;
    const auto found = std::find(list.begin(), list.end(), source.get());
    require(add == (found == list.end()), CUDA_ERROR_INVALID_VALUE,
            add ? "the edge exists already" : "the edge does not exist");
    if (!add) {
      list.erase(found);
      target->ports.erase(source.get());
      continue;
    }
    const unsigned char port = data == nullptr ? 0 : port_of(data[i], source->type, target->type);
    list.push_back(source.get());
    if (port != 0) target->ports[source.get()] = port;
  }
}

SC_API(cuGraphAddDependencies_v2, 12030, 0, CUgraph, graph, const CUgraphNode*, from,
       const CUgraphNode*, to, const CUgraphEdgeData*, data, size_t, n) {
  change_edges(graph, from, to, data, n, true);
}

SC_API(cuGraphRemoveDependencies_v2, 12030, 0, CUgraph, graph, const CUgraphNode*, from,
       const CUgraphNode*, to, const CUgraphEdgeData*, data, size_t, n) {
  change_edges(graph, from, to, data, n, false);
}

SC_API(cuGraphDestroyNode, 10000, 0, CUgraphNode, handle) {
  InlineDestructorScope inline_destructors;
  const auto node = graph_nodes.find(handle);
  std::lock_guard<std::mutex> lock(graph_mutex);
  require_not_capturing(*node->graph);
  require_no_memory_node(*node->graph, "nodes of a graph with memory nodes cannot be destroyed");
  graph_nodes.take(handle);
  remove_child_handles(*node);
  auto& nodes = node->graph->nodes;
  for (auto& other : nodes) {
    auto& list = other->dependencies;
    list.erase(std::remove(list.begin(), list.end(), node.get()), list.end());
    other->ports.erase(node.get());
  }
  nodes.erase(std::find(nodes.begin(), nodes.end(), node));
}
