// Reading graph definitions: nodes, edges, parameters, a DOT picture.
#include <algorithm>
#include <cstdio>

#include "graphs.h"
#include "modules.h"

using namespace softcuda;

namespace {
// The two-call protocol: null asks for the count, an array takes at most *n and the rest is null.
template <class Get>
CUresult give_list(CUgraphNode* out, size_t* n, size_t count, const Get& get) {
  if (n == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (out == nullptr) {
    *n = count;
    return CUDA_SUCCESS;
  }
  for (size_t i = 0; i < *n; ++i) {
    out[i] = i < count ? static_cast<CUgraphNode>(get(i)) : nullptr;
  }
  *n = *n < count ? *n : count;
  return CUDA_SUCCESS;
}
}  // namespace

SC_EXPORT CUresult cuGraphGetNodes(CUgraph handle, CUgraphNode* out, size_t* n) {
  SC_API(cuGraphGetNodes, 0);
  std::shared_ptr<Graph> graph = graphs().get(handle);
  if (!graph) return refuse(CUDA_ERROR_INVALID_HANDLE, "not a graph");
  std::lock_guard<std::mutex> lock(graph_mutex());
  return give_list(out, n, graph->nodes.size(), [&](size_t i) { return graph->nodes[i]->handle; });
}

SC_EXPORT CUresult cuGraphGetRootNodes(CUgraph handle, CUgraphNode* out, size_t* n) {
  SC_API(cuGraphGetRootNodes, 0);
  std::shared_ptr<Graph> graph = graphs().get(handle);
  if (!graph) return refuse(CUDA_ERROR_INVALID_HANDLE, "not a graph");
  std::lock_guard<std::mutex> lock(graph_mutex());
  std::vector<void*> roots;
  for (auto& node : graph->nodes) {
    if (node->dependencies.empty()) roots.push_back(node->handle);
  }
  return give_list(out, n, roots.size(), [&](size_t i) { return roots[i]; });
}

SC_EXPORT CUresult cuGraphGetEdges_v2(CUgraph handle, CUgraphNode* from, CUgraphNode* to,
                                      CUgraphEdgeData* data, size_t* n) {
  SC_API(cuGraphGetEdges, 0);
  std::shared_ptr<Graph> graph = graphs().get(handle);
  if (!graph) return refuse(CUDA_ERROR_INVALID_HANDLE, "not a graph");
  if (n == nullptr || (from == nullptr) != (to == nullptr)) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard<std::mutex> lock(graph_mutex());
  std::vector<std::pair<void*, void*>> edges;
  for (auto& node : graph->nodes) {
    for (Node* dependency : node->dependencies)
      edges.emplace_back(dependency->handle, node->handle);
  }
  size_t limit = *n;
  if (CUresult r = give_list(from, n, edges.size(), [&](size_t i) { return edges[i].first; });
      r != CUDA_SUCCESS || from == nullptr) {
    return r;
  }
  for (size_t i = 0; data != nullptr && i < *n; ++i) data[i] = CUgraphEdgeData{};
  return give_list(to, &limit, edges.size(), [&](size_t i) { return edges[i].second; });
}

static CUresult give_neighbours(CUgraphNode handle, CUgraphNode* out, CUgraphEdgeData* data,
                                size_t* n, bool before) {
  std::shared_ptr<Node> node = graph_nodes().get(handle);
  if (!node) return refuse(CUDA_ERROR_INVALID_HANDLE, "not a graph node");
  std::lock_guard<std::mutex> lock(graph_mutex());
  std::vector<Node*> found = node->dependencies;
  if (!before) {
    found.clear();
    for (auto& other : node->graph->nodes) {
      const auto& list = other->dependencies;
      if (std::find(list.begin(), list.end(), node.get()) != list.end())
        found.push_back(other.get());
    }
  }
  CUresult r = give_list(out, n, found.size(), [&](size_t i) { return found[i]->handle; });
  for (size_t i = 0; r == CUDA_SUCCESS && out != nullptr && data != nullptr && i < *n; ++i) {
    data[i] = CUgraphEdgeData{};
  }
  return r;
}

SC_EXPORT CUresult cuGraphNodeGetDependencies_v2(CUgraphNode handle, CUgraphNode* out,
                                                 CUgraphEdgeData* data, size_t* n) {
  SC_API(cuGraphNodeGetDependencies, 0);
  return give_neighbours(handle, out, data, n, true);
}

SC_EXPORT CUresult cuGraphNodeGetDependentNodes_v2(CUgraphNode handle, CUgraphNode* out,
                                                   CUgraphEdgeData* data, size_t* n) {
  SC_API(cuGraphNodeGetDependentNodes, 0);
  return give_neighbours(handle, out, data, n, false);
}

SC_EXPORT CUresult cuGraphNodeGetType(CUgraphNode handle, int* out) {
  SC_API(cuGraphNodeGetType, 0);
  std::shared_ptr<Node> node = graph_nodes().get(handle);
  if (!node) return refuse(CUDA_ERROR_INVALID_HANDLE, "not a graph node");
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *out = node->type;
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuGraphDebugDotPrint(CUgraph handle, const char* path, unsigned) {
  SC_API(cuGraphDebugDotPrint, 0);
  std::shared_ptr<Graph> graph = graphs().get(handle);
  if (!graph) return refuse(CUDA_ERROR_INVALID_HANDLE, "not a graph");
  if (path == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::FILE* file = std::fopen(path, "w");
  if (file == nullptr) return refuse(CUDA_ERROR_INVALID_VALUE, std::string("cannot write ") + path);
  std::lock_guard<std::mutex> lock(graph_mutex());
  std::fprintf(file, "digraph graph_1 {\n");
  for (size_t i = 0; i < graph->nodes.size(); ++i) {
    const Node& node = *graph->nodes[i];
    const std::string label =
        node.type == CU_GRAPH_NODE_TYPE_KERNEL ? node.work.kernel->function->name : "";
    std::fprintf(file, "  \"%p\" [label=\"%zu %s %s\"];\n", node.handle, i, type_name(node.type),
                 label.c_str());
    for (Node* dependency : node.dependencies) {
      std::fprintf(file, "  \"%p\" -> \"%p\";\n", dependency->handle, node.handle);
    }
  }
  std::fprintf(file, "}\n");
  std::fclose(file);
  return CUDA_SUCCESS;
}
