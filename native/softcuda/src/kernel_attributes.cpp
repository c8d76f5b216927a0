// Attributes of kernel nodes: hints that are kept and given back. Priorities order nothing here,
// since ready work is taken in the order in which it became ready.
#include <cstring>

#include "graphs.h"

using namespace softcuda;

static constexpr int kAccessPolicyWindow = 1, kClusterDimension = 4, kPriority = 8;

// Where a kernel node keeps the attribute.
static std::array<char, kAttributeBytes>& kept(Node& node, int attribute, const void* value) {
  need(value != nullptr && node.type == CU_GRAPH_NODE_TYPE_KERNEL, CUDA_ERROR_INVALID_VALUE,
       "only kernel nodes have these attributes");
  if (attribute != kAccessPolicyWindow && attribute != kPriority &&
      attribute != kClusterDimension) {
    refuse(CUDA_ERROR_NOT_SUPPORTED,
           "kernel attribute " + std::to_string(attribute) + " is not implemented");
  }
  return node.attributes[attribute];
}

SC_API(cuGraphKernelNodeSetAttribute, 10000, 0, CUgraphNode, handle, int, attribute, const void*,
       value) {
  const auto node = graph_nodes.find(handle);
  std::lock_guard<std::mutex> lock(graph_mutex);
  auto& place = kept(*node, attribute, value);
  unsigned size[3];
  std::memcpy(size, value, sizeof size);
  // Blocks do not form clusters: of one block, which is the default, they may be.
  need(attribute != kClusterDimension || (size[0] <= 1 && size[1] <= 1 && size[2] <= 1),
       CUDA_ERROR_NOT_SUPPORTED, "clusters of several blocks are not implemented");
  std::memcpy(place.data(), value, kAttributeBytes);
}

SC_API(cuGraphKernelNodeGetAttribute, 10000, 0, CUgraphNode, handle, int, attribute, void*, value) {
  const auto node = graph_nodes.find(handle);
  std::lock_guard<std::mutex> lock(graph_mutex);
  std::memcpy(value, kept(*node, attribute, value).data(), kAttributeBytes);
}
