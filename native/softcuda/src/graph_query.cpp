// Queries of graph definitions: nodes, edges and node types.
#include <algorithm>

#include "graphs.h"

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
  for (size_t i = 0; from != nullptr && i < *n; ++i) {
    require(data != nullptr || ports[i] == 0, CUDA_ERROR_LOSSY_QUERY,
            "an edge is programmatic; pass an array for the edge data");
    const unsigned char type = ports[i] != 0;
    if (data != nullptr) data[i] = CUgraphEdgeData{ports[i], 0, type, {}};
  }
}

SC_API(cuGraphNodeGetType, 10000, 0, CUgraphNode, handle, int*, out) {
  const auto node = graph_nodes.find(handle);
  require(out != nullptr);
  *out = node->type;
}
