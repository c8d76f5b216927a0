// Reading graph definitions: nodes, edges, parameters, a DOT picture.
#include <algorithm>
#include <cstdio>

#include "graphs.h"
#include "modules.h"

using namespace softcuda;

namespace {
const char* type_name(CUgraphNodeType type) {
  static const char* const names[] = {"kernel", "memcpy", "memset",     "host",
                                      "graph",  "empty",  "event wait", "event record"};
  if (type == CU_GRAPH_NODE_TYPE_BATCH_MEM_OP) return "memory operation";
  return type >= 0 && type <= CU_GRAPH_NODE_TYPE_EVENT_RECORD ? names[type] : "other";
}

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

static CUresult typed(CUgraphNode handle, CUgraphNodeType type, std::shared_ptr<Node>* out) {
  *out = graph_nodes().get(handle);
  if (!*out) return refuse(CUDA_ERROR_INVALID_HANDLE, "not a graph node");
  if ((*out)->type == type) return CUDA_SUCCESS;
  return refuse(CUDA_ERROR_INVALID_VALUE, std::string("the node is a ") + type_name((*out)->type) +
                                              " node, not a " + type_name(type) + " node");
}

// The parameter pointers stay valid as long as the node and its parameters.
SC_EXPORT CUresult cuGraphKernelNodeGetParams_v2(CUgraphNode handle, CUDA_KERNEL_NODE_PARAMS* out) {
  SC_API(cuGraphKernelNodeGetParams, 0);
  std::shared_ptr<Node> node;
  if (CUresult r = typed(handle, CU_GRAPH_NODE_TYPE_KERNEL, &node); r != CUDA_SUCCESS) return r;
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard<std::mutex> lock(graph_mutex());
  const KernelWork& k = *node->work.kernel;
  const softcuda_entry& entry = k.function->entry();
  node->param_pointers.clear();
  for (unsigned i = 0; i < entry.nparams; ++i) {
    node->param_pointers.push_back(const_cast<char*>(k.given.data()) + entry.offsets[i]);
  }
  *out = CUDA_KERNEL_NODE_PARAMS{static_cast<CUfunction>(k.function->handle),
                                 k.grid.x,
                                 k.grid.y,
                                 k.grid.z,
                                 k.block.x,
                                 k.block.y,
                                 k.block.z,
                                 k.shared_bytes,
                                 node->param_pointers.data(),
                                 nullptr,
                                 nullptr,
                                 primary_context()};
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuGraphMemcpyNodeGetParams(CUgraphNode handle, CUDA_MEMCPY3D* out) {
  SC_API(cuGraphMemcpyNodeGetParams, 0);
  std::shared_ptr<Node> node;
  if (CUresult r = typed(handle, CU_GRAPH_NODE_TYPE_MEMCPY, &node); r != CUDA_SUCCESS) return r;
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *out = node->copy_params;
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuGraphMemsetNodeGetParams(CUgraphNode handle, CUDA_MEMSET_NODE_PARAMS* out) {
  SC_API(cuGraphMemsetNodeGetParams, 0);
  std::shared_ptr<Node> node;
  if (CUresult r = typed(handle, CU_GRAPH_NODE_TYPE_MEMSET, &node); r != CUDA_SUCCESS) return r;
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *out = node->fill_params;
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuGraphHostNodeGetParams(CUgraphNode handle, CUDA_HOST_NODE_PARAMS* out) {
  SC_API(cuGraphHostNodeGetParams, 0);
  std::shared_ptr<Node> node;
  if (CUresult r = typed(handle, CU_GRAPH_NODE_TYPE_HOST, &node); r != CUDA_SUCCESS) return r;
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *out = CUDA_HOST_NODE_PARAMS{node->work.host.fn, node->work.host.data};
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode handle, CUgraph* out) {
  SC_API(cuGraphChildGraphNodeGetGraph, 0);
  std::shared_ptr<Node> node;
  if (CUresult r = typed(handle, CU_GRAPH_NODE_TYPE_GRAPH, &node); r != CUDA_SUCCESS) return r;
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *out = static_cast<CUgraph>(node->child->handle);
  return CUDA_SUCCESS;
}

// New parameters for a definition's node; executables made before keep theirs.
template <class Params, class Build, class Keep>
static CUresult set_params(CUgraphNode handle, CUgraphNodeType type, const Params* params,
                           const Build& build, const Keep& keep) {
  std::shared_ptr<Node> node;
  if (CUresult r = typed(handle, type, &node); r != CUDA_SUCCESS) return r;
  Work work;
  if (CUresult r = build(params, &work); r != CUDA_SUCCESS) return r;
  std::lock_guard<std::mutex> lock(graph_mutex());
  node->work = std::move(work);
  keep(*node);
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuGraphKernelNodeSetParams_v2(CUgraphNode h, const CUDA_KERNEL_NODE_PARAMS* p) {
  SC_API(cuGraphKernelNodeSetParams, 0);
  return set_params(h, CU_GRAPH_NODE_TYPE_KERNEL, p, kernel_work, [](Node&) {});
}

SC_EXPORT CUresult cuGraphMemcpyNodeSetParams(CUgraphNode h, const CUDA_MEMCPY3D* p) {
  SC_API(cuGraphMemcpyNodeSetParams, 0);
  return set_params(h, CU_GRAPH_NODE_TYPE_MEMCPY, p, copy_work,
                    [&](Node& node) { node.copy_params = *p; });
}

SC_EXPORT CUresult cuGraphMemsetNodeSetParams(CUgraphNode h, const CUDA_MEMSET_NODE_PARAMS* p) {
  SC_API(cuGraphMemsetNodeSetParams, 0);
  return set_params(h, CU_GRAPH_NODE_TYPE_MEMSET, p, fill_work,
                    [&](Node& node) { node.fill_params = *p; });
}

SC_EXPORT CUresult cuGraphHostNodeSetParams(CUgraphNode h, const CUDA_HOST_NODE_PARAMS* p) {
  SC_API(cuGraphHostNodeSetParams, 0);
  return set_params(h, CU_GRAPH_NODE_TYPE_HOST, p, host_work, [](Node&) {});
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
