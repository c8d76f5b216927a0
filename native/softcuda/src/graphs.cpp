// Graph definitions: nodes, dependencies, clones (invariants G1, G2).
#include "graphs.h"

#include <algorithm>
#include <cstdio>

#include "conditionals.h"

namespace softcuda {

std::mutex& graph_mutex() {
  static std::mutex& m = *new std::mutex;
  return m;
}
Handles<Graph>& graphs() {
  static Handles<Graph>& h = *new Handles<Graph>(0x55000000000000);
  return h;
}
Handles<Node>& graph_nodes() {
  static Handles<Node>& h = *new Handles<Node>(0x56000000000000);
  return h;
}

Graph::Graph() { live_add(Kind::graph, 1); }
Graph::~Graph() {
  for (auto& node : nodes) graph_nodes().take(node->handle);
  live_add(Kind::graph, -1);
}

std::shared_ptr<Graph> clone_graph(const Graph& graph) {
  auto clone = std::make_shared<Graph>();
  clone->references = std::make_shared<References>(*graph.references);
  std::map<const Node*, Node*> made;
  for (auto& node : graph.nodes) {
    auto copy = std::make_shared<Node>(*node);
    copy->graph = clone.get();
    copy->origin = node->handle;
    copy->param_pointers.clear();
    if (node->child) copy->child = clone_graph(*node->child);
    if (copy->child) copy->child->handle = graphs().add(copy->child);
    copy->handle = graph_nodes().add(copy);
    made[node.get()] = copy.get();
    clone->nodes.push_back(std::move(copy));
  }
  for (auto& node : clone->nodes) {
    for (Node*& dependency : node->dependencies) dependency = made[dependency];
  }
  return clone;
}

// Child graphs are reachable through handles of their own; forget those first.
static void forget_children(Node& node) {
  for (auto& body : node.bodies) {
    for (auto& inner : body->nodes) forget_children(*inner);
    graphs().take(body->handle);
  }
  if (!node.child) return;
  for (auto& inner : node.child->nodes) forget_children(*inner);
  graphs().take(node.child->handle);
}

std::shared_ptr<Graph> take_graph(CUgraph handle) {
  std::shared_ptr<Graph> graph = graphs().take(handle);
  if (!graph) return graph;
  for (auto& node : graph->nodes) forget_children(*node);
  return graph;
}

CUresult add_node(CUgraphNode* out, CUgraph handle, const CUgraphNode* dependencies, size_t n,
                  std::shared_ptr<Node> node) {
  std::shared_ptr<Graph> graph = graphs().get(handle);
  if (!graph) return refuse(CUDA_ERROR_INVALID_HANDLE, "not a graph");
  if (out == nullptr || (dependencies == nullptr && n > 0)) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard<std::mutex> lock(graph_mutex());
  for (size_t i = 0; i < n; ++i) {
    std::shared_ptr<Node> dependency = graph_nodes().get(dependencies[i]);
    if (!dependency || dependency->graph != graph.get()) {
      return refuse(CUDA_ERROR_INVALID_VALUE,
                    "dependency " + std::to_string(i) + " is not a node of this graph");
    }
    auto& known = node->dependencies;
    if (std::find(known.begin(), known.end(), dependency.get()) != known.end()) {
      return refuse(CUDA_ERROR_INVALID_VALUE,
                    "dependency " + std::to_string(i) + " is a duplicate");
    }
    known.push_back(dependency.get());
  }
  if (CUresult r = check_body(*graph, *node); r != CUDA_SUCCESS) return r;
  node->graph = graph.get();
  node->handle = graph_nodes().add(node);
  *out = static_cast<CUgraphNode>(node->handle);
  graph->nodes.push_back(std::move(node));
  return CUDA_SUCCESS;
}

}  // namespace softcuda

using namespace softcuda;

SC_EXPORT CUresult cuGraphCreate(CUgraph* out, unsigned flags) {
  SC_API(cuGraphCreate, 0);
  if (out == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  auto graph = std::make_shared<Graph>();
  graph->handle = graphs().add(graph);
  *out = static_cast<CUgraph>(graph->handle);
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuGraphDestroy(CUgraph handle) {
  SC_API(cuGraphDestroy, 0);
  ApiThread here;
  std::shared_ptr<Graph> graph = graphs().get(handle);
  if (!graph) return refuse(CUDA_ERROR_INVALID_HANDLE, "not a graph");
  if (graph->captures.load() > 0) {
    return refuse(CUDA_ERROR_ILLEGAL_STATE, "a stream is capturing into the graph");
  }
  if (graph->moved || graph->body_of != nullptr) {
    return refuse(CUDA_ERROR_INVALID_VALUE, "the graph belongs to a node of another graph");
  }
  take_graph(handle);
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuGraphClone(CUgraph* out, CUgraph handle) {
  SC_API(cuGraphClone, 0);
  std::shared_ptr<Graph> graph = graphs().get(handle);
  if (!graph) return refuse(CUDA_ERROR_INVALID_HANDLE, "not a graph");
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard<std::mutex> lock(graph_mutex());
  if (has_conditional(*graph)) {
    return refuse(CUDA_ERROR_NOT_SUPPORTED, "graphs with conditional nodes cannot be cloned");
  }
  std::shared_ptr<Graph> clone = clone_graph(*graph);
  clone->handle = graphs().add(clone);
  *out = static_cast<CUgraph>(clone->handle);
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuGraphNodeFindInClone(CUgraphNode* out, CUgraphNode original, CUgraph handle) {
  SC_API(cuGraphNodeFindInClone, 0);
  std::shared_ptr<Graph> clone = graphs().get(handle);
  if (!clone || out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard<std::mutex> lock(graph_mutex());
  for (auto& node : clone->nodes) {
    if (node->origin != original) continue;
    *out = static_cast<CUgraphNode>(node->handle);
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}

// The child is cloned into the node, with the references it holds at this moment.
SC_EXPORT CUresult cuGraphAddChildGraphNode(CUgraphNode* out, CUgraph graph,
                                            const CUgraphNode* deps, size_t n, CUgraph child) {
  SC_API(cuGraphAddChildGraphNode, 0);
  std::shared_ptr<Graph> original = graphs().get(child);
  if (!original) return refuse(CUDA_ERROR_INVALID_HANDLE, "the child is not a graph");
  if (original->moved) {
    return refuse(CUDA_ERROR_INVALID_VALUE, "the child was moved into another graph");
  }
  auto node = std::make_shared<Node>();
  node->type = CU_GRAPH_NODE_TYPE_GRAPH;
  {
    std::lock_guard<std::mutex> lock(graph_mutex());
    if (has_conditional(*original)) {
      return refuse(CUDA_ERROR_NOT_SUPPORTED,
                    "a graph with conditional nodes cannot be added as a cloned child");
    }
    node->child = clone_graph(*original);
  }
  std::shared_ptr<Graph> made = node->child;
  CUresult r = add_node(out, graph, deps, n, std::move(node));
  if (r == CUDA_SUCCESS) made->handle = graphs().add(made);
  return r;
}

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

// The child itself becomes the node's, with its references and its handle (G7).
static CUresult move_child(CUgraphNode* out, CUgraph graph, const CUgraphNode* deps, size_t n,
                           CUgraph child) {
  std::shared_ptr<Graph> moving = graphs().get(child);
  std::shared_ptr<Graph> into = graphs().get(graph);
  if (!moving || !into) return refuse(CUDA_ERROR_INVALID_HANDLE, "the child is not a graph");
  if (moving->moved || moving->body_of != nullptr || moving->captures.load() > 0 ||
      contains(*moving, into.get())) {
    return refuse(CUDA_ERROR_INVALID_VALUE, "the child belongs to another graph or is captured to");
  }
  auto node = std::make_shared<Node>();
  node->type = CU_GRAPH_NODE_TYPE_GRAPH;
  node->child = moving;
  if (CUresult r = add_node(out, graph, deps, n, std::move(node)); r != CUDA_SUCCESS) return r;
  moving->moved = true;
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuGraphAddNode_v2(CUgraphNode* out, CUgraph graph, const CUgraphNode* deps,
                                     const CUgraphEdgeData* edges, size_t n,
                                     CUgraphNodeParams* params) {
  SC_API(cuGraphAddNode, 0);
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; edges != nullptr && i < n; ++i) {
    if (edges[i].from_port != 0 || edges[i].to_port != 0 || edges[i].type != 0) {
      return refuse(CUDA_ERROR_NOT_SUPPORTED, "programmatic edges are not implemented");
    }
  }
  switch (params->type) {
    case CU_GRAPH_NODE_TYPE_CONDITIONAL:
      return add_conditional(out, graph, deps, n, &params->conditional);
    case CU_GRAPH_NODE_TYPE_GRAPH: {
      if (params->graph.ownership == CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE) {
        return move_child(out, graph, deps, n, params->graph.graph);
      }
      if (params->graph.ownership != CU_GRAPH_CHILD_GRAPH_OWNERSHIP_CLONE) {
        return refuse(CUDA_ERROR_INVALID_VALUE, "no such ownership of a child graph");
      }
      CUresult r = cuGraphAddChildGraphNode(out, graph, deps, n, params->graph.graph);
      if (r == CUDA_SUCCESS) {
        params->graph.graph = static_cast<CUgraph>(graph_nodes().get(*out)->child->handle);
      }
      return r;
    }
    default:
      return add_params(out, graph, deps, n, *params);
  }
}

static CUresult change_dependencies(CUgraph handle, const CUgraphNode* from, const CUgraphNode* to,
                                    size_t n, bool add) {
  std::shared_ptr<Graph> graph = graphs().get(handle);
  if (!graph) return refuse(CUDA_ERROR_INVALID_HANDLE, "not a graph");
  if (n > 0 && (from == nullptr || to == nullptr)) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard<std::mutex> lock(graph_mutex());
  for (size_t i = 0; i < n; ++i) {
    std::shared_ptr<Node> a = graph_nodes().get(from[i]), b = graph_nodes().get(to[i]);
    if (!a || !b || a->graph != graph.get() || b->graph != graph.get() || a == b) {
      return refuse(CUDA_ERROR_INVALID_VALUE, "an edge does not join two nodes of this graph");
    }
    auto& list = b->dependencies;
    auto it = std::find(list.begin(), list.end(), a.get());
    if (add != (it == list.end())) {
      return refuse(CUDA_ERROR_INVALID_VALUE, add ? "the edge exists" : "there is no such edge");
    }
    if (add) {
      list.push_back(a.get());
    } else {
      list.erase(it);
    }
  }
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuGraphAddDependencies_v2(CUgraph graph, const CUgraphNode* from,
                                             const CUgraphNode* to, const CUgraphEdgeData*,
                                             size_t n) {
  SC_API(cuGraphAddDependencies, 0);
  return change_dependencies(graph, from, to, n, true);
}

SC_EXPORT CUresult cuGraphRemoveDependencies_v2(CUgraph graph, const CUgraphNode* from,
                                                const CUgraphNode* to, const CUgraphEdgeData*,
                                                size_t n) {
  SC_API(cuGraphRemoveDependencies, 0);
  return change_dependencies(graph, from, to, n, false);
}

SC_EXPORT CUresult cuGraphDestroyNode(CUgraphNode handle) {
  SC_API(cuGraphDestroyNode, 0);
  ApiThread here;
  std::shared_ptr<Node> node = graph_nodes().get(handle);
  if (!node) return refuse(CUDA_ERROR_INVALID_HANDLE, "not a graph node");
  std::lock_guard<std::mutex> lock(graph_mutex());
  if (node->graph->captures.load() > 0) {
    return refuse(CUDA_ERROR_ILLEGAL_STATE, "a stream is capturing into the graph");
  }
  graph_nodes().take(handle);
  forget_children(*node);
  auto& nodes = node->graph->nodes;
  for (auto& other : nodes) {
    auto& list = other->dependencies;
    list.erase(std::remove(list.begin(), list.end(), node.get()), list.end());
  }
  nodes.erase(std::find(nodes.begin(), nodes.end(), node));
  return CUDA_SUCCESS;
}
