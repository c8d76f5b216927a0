// Reading graph definitions: nodes and edges.
#include <algorithm>

#include "graphs.h"

using namespace softcuda;

// The two-call protocol: null asks for the count, an array takes at most *n and the rest is null.
static void give_list(CUgraphNode* out, size_t* n, const std::vector<void*>& list) {
  need(n != nullptr);
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
  give_list(out, n, nodes);
}

SC_API(cuGraphGetEdges_v2, 12030, 0, CUgraph, handle, CUgraphNode*, from, CUgraphNode*, to,
       CUgraphEdgeData*, data, size_t*, n) {
  const auto graph = graphs.find(handle);
  need(n != nullptr && (from == nullptr) == (to == nullptr));
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
  give_list(from, n, sources);
  give_list(to, &limit, targets);
  for (size_t i = 0; from != nullptr && i < *n; ++i) {
    need(data != nullptr || ports[i] == 0, CUDA_ERROR_LOSSY_QUERY, "an edge is programmatic");
    const unsigned char type = ports[i] != 0;
    if (data != nullptr) data[i] = CUgraphEdgeData{ports[i], 0, type, {}};
  }
}

SC_API(cuGraphNodeGetType, 10000, 0, CUgraphNode, handle, int*, out) {
  const auto node = graph_nodes.find(handle);
  need(out != nullptr);
  *out = node->type;
}
