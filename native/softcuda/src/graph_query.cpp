// Queries of graph definitions: nodes, edges, node types, and a description in the DOT language.
#include <algorithm>
#include <cstdio>

#include "graphs.h"
#include "modules.h"

using namespace softcuda;

// Returns a list of handles as the driver's queries do. If `out` is null, *n receives the length of
// the list. Otherwise up to *n handles are stored in `out`, the remaining elements of `out` are set
// to null, and *n receives the number of stored handles.
static void copy_handles(CUgraphNode* out, size_t* n, const std::vector<void*>& list) {
  require(n != nullptr);
  for (size_t i = 0; out != nullptr && i < *n; ++i) {
    out[i] = i < list.size() ? static_cast<CUgraphNode>(list[i]) : nullptr;
  }
  *n = out != nullptr ? std::min(*n, list.size()) : list.size();
}

SC_API(cuGraphGetNodes, 10000, 0, CUgraph, handle, CUgraphNode*, out, size_t*, n) {
  const auto graph = graphs.find(handle);
  std::lock_guard<std::mutex> lock(graph_mutex);
  std::vector<void*> nodes;
  for (auto& node : graph->nodes) nodes.push_back(node->handle);
  copy_handles(out, n, nodes);
}

// Stores the edge data of the edges whose nodes were stored in `nodes`. If the caller passes no
// array for the edge data, all of these edges must be full dependencies.
static void copy_edge_data(CUgraphEdgeData* out, const CUgraphNode* nodes, size_t n,
                           const std::vector<unsigned char>& ports) {
  for (size_t i = 0; nodes != nullptr && i < n; ++i) {
    require(out != nullptr || ports[i] == 0, CUDA_ERROR_LOSSY_QUERY,
            "an edge is programmatic; pass an array for the edge data");
    const unsigned char type = ports[i] != 0;
    if (out != nullptr) out[i] = CUgraphEdgeData{ports[i], 0, type, {}};
  }
}

SC_API(cuGraphGetRootNodes, 10000, 0, CUgraph, handle, CUgraphNode*, out, size_t*, n) {
  const auto graph = graphs.find(handle);
  std::lock_guard<std::mutex> lock(graph_mutex);
  std::vector<void*> roots;
  for (auto& node : graph->nodes) {
    if (node->dependencies.empty()) roots.push_back(node->handle);
  }
  copy_handles(out, n, roots);
}

SC_API(cuGraphGetEdges_v2, 12030, 0, CUgraph, handle, CUgraphNode*, from, CUgraphNode*, to,
       CUgraphEdgeData*, data, size_t*, n) {
  const auto graph = graphs.find(handle);
  require(n != nullptr && (from == nullptr) == (to == nullptr));
  std::lock_guard<std::mutex> lock(graph_mutex);
  std::vector<void*> sources, targets;
  std::vector<unsigned char> ports;
  for (auto& node : graph->nodes) {
    for (Node* dependency : node->dependencies) {
      ports.push_back(node->port(dependency));
      sources.push_back(dependency->handle);
      targets.push_back(node->handle);
    }
  }
  size_t limit = *n;
  copy_handles(from, n, sources);
  copy_handles(to, &limit, targets);
  copy_edge_data(data, from, *n, ports);
}

SC_API(cuGraphNodeGetDependencies_v2, 12030, 0, CUgraphNode, handle, CUgraphNode*, out,
       CUgraphEdgeData*, data, size_t*, n) {
  const auto node = graph_nodes.find(handle);
  std::lock_guard<std::mutex> lock(graph_mutex);
  std::vector<void*> sources;
  std::vector<unsigned char> ports;
  for (Node* dependency : node->dependencies) {
    sources.push_back(dependency->handle);
    ports.push_back(node->port(dependency));
  }
  copy_handles(out, n, sources);
  copy_edge_data(data, out, *n, ports);
}

SC_API(cuGraphNodeGetDependentNodes_v2, 12030, 0, CUgraphNode, handle, CUgraphNode*, out,
       CUgraphEdgeData*, data, size_t*, n) {
  const auto node = graph_nodes.find(handle);
  std::lock_guard<std::mutex> lock(graph_mutex);
  std::vector<void*> targets;
  std::vector<unsigned char> ports;
  for (auto& other : node->graph->nodes) {
    const auto& list = other->dependencies;
    if (std::find(list.begin(), list.end(), node.get()) == list.end()) continue;
    targets.push_back(other->handle);
    ports.push_back(other->port(node.get()));
  }
  copy_handles(out, n, targets);
  copy_edge_data(data, out, *n, ports);
}

SC_API(cuGraphNodeGetType, 10000, 0, CUgraphNode, handle, int*, out) {
  const auto node = graph_nodes.find(handle);
  require(out != nullptr);
  *out = node->type;
}

// Returns the number of a handle among all handles of its kind, which are never reused
// (INVARIANTS.md A5).
static unsigned number_of(const void* handle) {
  return static_cast<unsigned>(reinterpret_cast<uint64_t>(handle) / 16 & 0xffffffff);
}

#define GET_ID(symbol, T, handles, Handle)           \
  SC_API(symbol, 13010, 0, Handle, handle, T*, id) { \
    handles.find(handle);                            \
    require(id != nullptr);                          \
    *id = number_of(handle);                         \
  }
GET_ID(cuGraphGetId, unsigned, graphs, CUgraph)
GET_ID(cuGraphExecGetId, unsigned, graph_execs, CUgraphExec)
GET_ID(cuGraphNodeGetLocalId, unsigned, graph_nodes, CUgraphNode)
GET_ID(cuGraphNodeGetToolsId, unsigned long long, graph_nodes, CUgraphNode)

SC_API(cuGraphNodeGetContainingGraph, 13010, 0, CUgraphNode, handle, CUgraph*, out) {
  const auto node = graph_nodes.find(handle);
  require(out != nullptr);
  std::lock_guard<std::mutex> lock(graph_mutex);
  *out = static_cast<CUgraph>(node->graph->handle);
}

// The flags, which select details to print, are ignored.
SC_API(cuGraphDebugDotPrint, 11030, 0, CUgraph, handle, const char*, path, unsigned, flags) {
  const auto graph = graphs.find(handle);
  require(path != nullptr);
  std::string text = "digraph graph_1 {\n";
  {
    std::lock_guard<std::mutex> lock(graph_mutex);
    for (auto& node : graph->nodes) {
      const auto name = [](const Node& n) {
        return "\"" + hex(reinterpret_cast<unsigned long long>(n.handle)) + "\"";
      };
      text += "  " + name(*node) + " [label=\"" + type_name(node->type);
      if (node->work.kernel) text += " " + node->work.kernel->function->name;
      text += "\"];\n";
      for (Node* dependency : node->dependencies) {
        text += "  " + name(*dependency) + " -> " + name(*node) + ";\n";
      }
    }
  }
  text += "}\n";
  std::FILE* file = std::fopen(path, "w");
  if (file == nullptr) {
    refuse(CUDA_ERROR_OPERATING_SYSTEM, std::string("cannot write the file ") + path);
  }
  std::fwrite(text.data(), 1, text.size(), file);
  std::fclose(file);
}
