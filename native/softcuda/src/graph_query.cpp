// Reading graph definitions: nodes, edges, parameters, a DOT picture.
#include <algorithm>
#include <cstdio>

#include "graphs.h"
#include "modules.h"

using namespace softcuda;

// The two-call protocol: null asks for the count, an array takes at most *n and the rest is null.
static void give_list(CUgraphNode* out, size_t* n, const std::vector<void*>& list) {
  need(n != nullptr);
  for (size_t i = 0; out != nullptr && i < *n; ++i) {
    out[i] = i < list.size() ? static_cast<CUgraphNode>(list[i]) : nullptr;
  }
  *n = out != nullptr ? std::min(*n, list.size()) : list.size();
}

// The same for edges, of which n were given; without a place for their data all must be full ones.
static void give_edge_data(CUgraphEdgeData* data, const CUgraphNode* asked, size_t n,
                           const std::vector<unsigned char>& ports) {
  for (size_t i = 0; asked != nullptr && i < n; ++i) {
    need(data != nullptr || ports[i] == 0, CUDA_ERROR_LOSSY_QUERY, "an edge is programmatic");
    const unsigned char type = ports[i] != 0;
    if (data != nullptr) data[i] = CUgraphEdgeData{ports[i], 0, type, {}};
  }
}

SC_API(cuGraphGetNodes, 10000, 0, CUgraph, handle, CUgraphNode*, out, size_t*, n) {
  const auto graph = graphs().find(handle);
  std::lock_guard<std::mutex> lock(graph_mutex());
  std::vector<void*> nodes;
  for (auto& node : graph->nodes) nodes.push_back(node->handle);
  give_list(out, n, nodes);
}

SC_API(cuGraphGetRootNodes, 10000, 0, CUgraph, handle, CUgraphNode*, out, size_t*, n) {
  const auto graph = graphs().find(handle);
  std::lock_guard<std::mutex> lock(graph_mutex());
  std::vector<void*> roots;
  for (auto& node : graph->nodes) {
    if (node->dependencies.empty()) roots.push_back(node->handle);
  }
  give_list(out, n, roots);
}

SC_API(cuGraphGetEdges_v2, 12030, 0, CUgraph, handle, CUgraphNode*, from, CUgraphNode*, to,
       CUgraphEdgeData*, data, size_t*, n) {
  const auto graph = graphs().find(handle);
  need(n != nullptr && (from == nullptr) == (to == nullptr));
  std::lock_guard<std::mutex> lock(graph_mutex());
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
  give_list(from, n, sources);
  give_list(to, &limit, targets);
  give_edge_data(data, from, *n, ports);
}

SC_API(cuGraphNodeGetDependencies_v2, 12030, 0, CUgraphNode, handle, CUgraphNode*, out,
       CUgraphEdgeData*, data, size_t*, n) {
  const auto node = graph_nodes().find(handle);
  std::lock_guard<std::mutex> lock(graph_mutex());
  std::vector<void*> before;
  std::vector<unsigned char> ports;
  for (Node* dependency : node->dependencies) {
    before.push_back(dependency->handle);
    ports.push_back(node->port(dependency));
  }
  give_list(out, n, before);
  give_edge_data(data, out, *n, ports);
}

SC_API(cuGraphNodeGetDependentNodes_v2, 12030, 0, CUgraphNode, handle, CUgraphNode*, out,
       CUgraphEdgeData*, data, size_t*, n) {
  const auto node = graph_nodes().find(handle);
  std::lock_guard<std::mutex> lock(graph_mutex());
  std::vector<void*> after;
  std::vector<unsigned char> ports;
  for (auto& other : node->graph->nodes) {
    const auto& list = other->dependencies;
    const bool depends = std::find(list.begin(), list.end(), node.get()) != list.end();
    if (!depends) continue;
    after.push_back(other->handle);
    ports.push_back(other->port(node.get()));
  }
  give_list(out, n, after);
  give_edge_data(data, out, *n, ports);
}

SC_API(cuGraphNodeGetType, 10000, 0, CUgraphNode, handle, int*, out) {
  const auto node = graph_nodes().find(handle);
  need(out != nullptr);
  *out = node->type;
}

SC_API(cuGraphDebugDotPrint, 11030, 0, CUgraph, handle, const char*, path, unsigned, flags) {
  const auto graph = graphs().find(handle);
  need(path != nullptr);
  std::FILE* file = std::fopen(path, "w");
  if (file == nullptr) refuse(CUDA_ERROR_INVALID_VALUE, std::string("cannot write ") + path);
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
}
