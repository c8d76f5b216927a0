// Attributes of kernel nodes. They are stored and returned but have no effect. Priorities have no
// effect because ready operations run in the order in which they became ready.
#include <cstring>

#include "graphs.h"

using namespace softcuda;

// Returns the memory in which an attribute of a kernel node is stored. Refuses the call if the node
// is not a kernel node, if the attribute is not supported, or if the caller's pointer `value` is
// null.
static std::array<char, kAttributeBytes>& stored_value(Node& node, int attribute,
                                                       const void* value) {
  require(value != nullptr && node.type == CU_GRAPH_NODE_TYPE_KERNEL, CUDA_ERROR_INVALID_VALUE,
          "the node is not a kernel node, or the value is null");
  if (attribute != CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW &&
      attribute != CU_LAUNCH_ATTRIBUTE_COOPERATIVE && attribute != CU_LAUNCH_ATTRIBUTE_PRIORITY &&
      attribute != CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
    refuse(CUDA_ERROR_NOT_SUPPORTED,
           "kernel node attribute " + std::to_string(attribute) + " is not implemented");
  }
  return node.attributes[attribute];
}

SC_API(cuGraphKernelNodeSetAttribute, 10000, 0, CUgraphNode, handle, int, attribute, const void*,
       value) {
  const auto node = graph_nodes.find(handle);
  std::lock_guard<std::mutex> lock(graph_mutex);
  auto& stored = stored_value(*node, attribute, value);
  unsigned size[3];
  std::memcpy(size, value, sizeof size);
  // Only the default cluster of one block is supported.
  require(attribute != CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION ||
              (size[0] <= 1 && size[1] <= 1 && size[2] <= 1),
          CUDA_ERROR_NOT_SUPPORTED, "clusters of more than one block are not implemented");
  require(attribute != CU_LAUNCH_ATTRIBUTE_COOPERATIVE || size[0] == 0, CUDA_ERROR_NOT_SUPPORTED,
          "cooperative kernels are not implemented");
  std::memcpy(stored.data(), value, kAttributeBytes);
}

SC_API(cuGraphKernelNodeGetAttribute, 10000, 0, CUgraphNode, handle, int, attribute, void*, value) {
  const auto node = graph_nodes.find(handle);
  std::lock_guard<std::mutex> lock(graph_mutex);
  std::memcpy(value, stored_value(*node, attribute, value).data(), kAttributeBytes);
}

SC_API(cuGraphKernelNodeCopyAttributes, 11000, 0, CUgraphNode, dst, CUgraphNode, src) {
  const auto to = graph_nodes.find(dst);
  const auto from = graph_nodes.find(src);
  require(to->type == CU_GRAPH_NODE_TYPE_KERNEL && from->type == CU_GRAPH_NODE_TYPE_KERNEL,
          CUDA_ERROR_INVALID_VALUE, "both nodes must be kernel nodes");
  std::lock_guard<std::mutex> lock(graph_mutex);
  to->attributes = from->attributes;
}
