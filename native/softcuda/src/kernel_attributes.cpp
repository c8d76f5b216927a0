// Attributes of kernel nodes: hints that are kept and given back. Priorities order nothing here,
// since ready work is taken in the order in which it became ready.
#include <cstring>

#include "graphs.h"

using namespace softcuda;

namespace {
constexpr int kAccessPolicyWindow = 1, kClusterDimension = 4, kPriority = 8;

// Blocks do not form clusters: of one block, which is the default, they may be.
bool is_one_block(const void* value) {
  unsigned size[3];
  std::memcpy(size, value, sizeof size);
  for (unsigned n : size) {
    if (n > 1) return false;
  }
  return true;
}

CUresult kernel_node(CUgraphNode handle, int attribute, const void* value,
                     std::shared_ptr<Node>* out) {
  *out = graph_nodes().get(handle);
  if (!*out) return refuse(CUDA_ERROR_INVALID_HANDLE, "not a graph node");
  if (value == nullptr || (*out)->type != CU_GRAPH_NODE_TYPE_KERNEL) {
    return refuse(CUDA_ERROR_INVALID_VALUE, "only kernel nodes have these attributes");
  }
  if (attribute == kAccessPolicyWindow || attribute == kPriority ||
      attribute == kClusterDimension) {
    return CUDA_SUCCESS;
  }
  return refuse(CUDA_ERROR_NOT_SUPPORTED,
                "kernel attribute " + std::to_string(attribute) + " is not implemented");
}
}  // namespace

SC_EXPORT CUresult cuGraphKernelNodeSetAttribute(CUgraphNode handle, int attribute,
                                                 const void* value) {
  SC_API(cuGraphKernelNodeSetAttribute, 0);
  std::shared_ptr<Node> node;
  if (CUresult r = kernel_node(handle, attribute, value, &node); r != CUDA_SUCCESS) return r;
  if (attribute == kClusterDimension && !is_one_block(value)) {
    return refuse(CUDA_ERROR_NOT_SUPPORTED, "clusters of several blocks are not implemented");
  }
  std::lock_guard<std::mutex> lock(graph_mutex());
  std::memcpy(node->attributes[attribute].data(), value, kAttributeBytes);
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuGraphKernelNodeGetAttribute(CUgraphNode handle, int attribute, void* value) {
  SC_API(cuGraphKernelNodeGetAttribute, 0);
  std::shared_ptr<Node> node;
  if (CUresult r = kernel_node(handle, attribute, value, &node); r != CUDA_SUCCESS) return r;
  std::lock_guard<std::mutex> lock(graph_mutex());
  std::memcpy(value, node->attributes[attribute].data(), kAttributeBytes);
  return CUDA_SUCCESS;
}
