// Functions with the signatures of older CUDA versions, which programs built for CUDA 11 and 12
// request from cuGetProcAddress. Each one calls the current function, which checks the state of the
// driver and the arguments.
#include <cstring>

#include "runtime.h"

using namespace softcuda;

extern "C" {
CUresult cuCtxCreate_v4(CUcontext*, const void*, unsigned, CUdevice);
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice);
CUresult cuDeviceGetUuid_v2(unsigned char*, CUdevice);
CUresult cuMemcpyBatchAsync_v2(const CUdeviceptr*, const CUdeviceptr*, const size_t*, size_t,
                               const CUmemcpyAttributes*, const size_t*, size_t, CUstream);
CUresult cuStreamGetCaptureInfo_v3(CUstream, int*, uint64_t*, CUgraph*, const CUgraphNode**,
                                   const CUgraphEdgeData**, size_t*);
CUresult cuStreamUpdateCaptureDependencies_v2(CUstream, const CUgraphNode*, const CUgraphEdgeData*,
                                              size_t, unsigned);
CUresult cuGraphAddNode_v2(CUgraphNode*, CUgraph, const CUgraphNode*, const CUgraphEdgeData*,
                           size_t, CUgraphNodeParams*);
CUresult cuGraphAddDependencies_v2(CUgraph, const CUgraphNode*, const CUgraphNode*,
                                   const CUgraphEdgeData*, size_t);
CUresult cuGraphRemoveDependencies_v2(CUgraph, const CUgraphNode*, const CUgraphNode*,
                                      const CUgraphEdgeData*, size_t);
CUresult cuGraphGetEdges_v2(CUgraph, CUgraphNode*, CUgraphNode*, CUgraphEdgeData*, size_t*);
CUresult cuGraphNodeGetDependencies_v2(CUgraphNode, CUgraphNode*, CUgraphEdgeData*, size_t*);
CUresult cuGraphNodeGetDependentNodes_v2(CUgraphNode, CUgraphNode*, CUgraphEdgeData*, size_t*);
CUresult cuGraphAddKernelNode_v2(CUgraphNode*, CUgraph, const CUgraphNode*, size_t,
                                 const CUDA_KERNEL_NODE_PARAMS*);
CUresult cuGraphKernelNodeGetParams_v2(CUgraphNode, CUDA_KERNEL_NODE_PARAMS*);
CUresult cuGraphKernelNodeSetParams_v2(CUgraphNode, const CUDA_KERNEL_NODE_PARAMS*);
CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec, CUgraphNode,
                                           const CUDA_KERNEL_NODE_PARAMS*);
CUresult cuGraphInstantiateWithFlags(CUgraphExec*, CUgraph, unsigned long long);
CUresult cuGraphExecUpdate_v2(CUgraphExec, CUgraph, CUgraphExecUpdateResultInfo*);
}

// ---- contexts and devices ----------------------------------------------------------------------
SC_API_CODE(cuCtxCreate_v2, 3020, kAlways, CUcontext*, out, unsigned, flags, CUdevice, device) {
  return cuCtxCreate_v4(out, nullptr, flags, device);
}

SC_API_CODE(cuCtxCreate_v3, 11040, kAlways, CUcontext*, out, const void*, affinities, int, count,
            unsigned, flags, CUdevice, device) {
  require(count >= 0);
  require(count == 0, CUDA_ERROR_NOT_SUPPORTED,
          "contexts with execution affinity are not implemented");
  return cuCtxCreate_v4(out, nullptr, flags, device);
}

SC_API_CODE(cuDevicePrimaryCtxRelease, 7000, kAlways, CUdevice, device) {
  return cuDevicePrimaryCtxRelease_v2(device);
}

SC_API_CODE(cuDeviceGetUuid, 9020, kAlways, unsigned char*, uuid, CUdevice, device) {
  return cuDeviceGetUuid_v2(uuid, device);
}

// ---- copies ------------------------------------------------------------------------------------
// The returned index of the copy that failed is always SIZE_MAX, because the checks of the batch do
// not report which copy has failed.
SC_API_CODE(cuMemcpyBatchAsync, 12080, kAlways, const CUdeviceptr*, dsts, const CUdeviceptr*, srcs,
            const size_t*, sizes, size_t, count, const CUmemcpyAttributes*, attributes,
            const size_t*, first_copies, size_t, groups, size_t*, failed, CUstream, stream) {
  const CUresult result =
      cuMemcpyBatchAsync_v2(dsts, srcs, sizes, count, attributes, first_copies, groups, stream);
  if (result != CUDA_SUCCESS && failed != nullptr) *failed = SIZE_MAX;
  return result;
}

// ---- captures ----------------------------------------------------------------------------------
SC_API_CODE(cuStreamGetCaptureInfo, 10010, kAlways, CUstream, stream, int*, status, uint64_t*, id) {
  return cuStreamGetCaptureInfo_v3(stream, status, id, nullptr, nullptr, nullptr, nullptr);
}

SC_API_CODE(cuStreamGetCaptureInfo_v2, 11030, kAlways, CUstream, stream, int*, status, uint64_t*,
            id, CUgraph*, graph, const CUgraphNode**, dependencies, size_t*, count) {
  return cuStreamGetCaptureInfo_v3(stream, status, id, graph, dependencies, nullptr, count);
}

SC_API_CODE(cuStreamUpdateCaptureDependencies, 11030, kAlways, CUstream, stream, const CUgraphNode*,
            dependencies, size_t, count, unsigned, flags) {
  return cuStreamUpdateCaptureDependencies_v2(stream, dependencies, nullptr, count, flags);
}

// ---- graphs: edges without edge data -----------------------------------------------------------
SC_API_CODE(cuGraphAddNode, 12020, kAlways, CUgraphNode*, out, CUgraph, graph, const CUgraphNode*,
            dependencies, size_t, count, CUgraphNodeParams*, params) {
  return cuGraphAddNode_v2(out, graph, dependencies, nullptr, count, params);
}

SC_API_CODE(cuGraphAddDependencies, 10000, kAlways, CUgraph, graph, const CUgraphNode*, from,
            const CUgraphNode*, to, size_t, count) {
  return cuGraphAddDependencies_v2(graph, from, to, nullptr, count);
}

SC_API_CODE(cuGraphRemoveDependencies, 10000, kAlways, CUgraph, graph, const CUgraphNode*, from,
            const CUgraphNode*, to, size_t, count) {
  return cuGraphRemoveDependencies_v2(graph, from, to, nullptr, count);
}

SC_API_CODE(cuGraphGetEdges, 10000, kAlways, CUgraph, graph, CUgraphNode*, from, CUgraphNode*, to,
            size_t*, count) {
  return cuGraphGetEdges_v2(graph, from, to, nullptr, count);
}

SC_API_CODE(cuGraphNodeGetDependencies, 10000, kAlways, CUgraphNode, node, CUgraphNode*, out,
            size_t*, count) {
  return cuGraphNodeGetDependencies_v2(node, out, nullptr, count);
}

SC_API_CODE(cuGraphNodeGetDependentNodes, 10000, kAlways, CUgraphNode, node, CUgraphNode*, out,
            size_t*, count) {
  return cuGraphNodeGetDependentNodes_v2(node, out, nullptr, count);
}

// ---- graphs: kernel nodes without `kern` and `ctx` ---------------------------------------------
namespace {
// CUDA_KERNEL_NODE_PARAMS_v1: all fields of the current structure except for the last two.
constexpr size_t kKernelParamsV1 = offsetof(CUDA_KERNEL_NODE_PARAMS, kern);
static_assert(kKernelParamsV1 == 56, "driver ABI");

// Converts a CUDA_KERNEL_NODE_PARAMS_v1 of the caller to a CUDA_KERNEL_NODE_PARAMS, which get()
// returns. If the caller passed null, get() returns null.
class KernelParams {
 public:
  explicit KernelParams(const void* v1) : given_(v1 != nullptr) {
    if (given_) std::memcpy(&params_, v1, kKernelParamsV1);
  }
  CUDA_KERNEL_NODE_PARAMS* get() { return given_ ? &params_ : nullptr; }

 private:
  CUDA_KERNEL_NODE_PARAMS params_{};
  bool given_;
};
}  // namespace

SC_API_CODE(cuGraphAddKernelNode, 10000, kAlways, CUgraphNode*, out, CUgraph, graph,
            const CUgraphNode*, dependencies, size_t, count, const void*, params) {
  return cuGraphAddKernelNode_v2(out, graph, dependencies, count, KernelParams(params).get());
}

SC_API_CODE(cuGraphKernelNodeSetParams, 10000, kAlways, CUgraphNode, node, const void*, params) {
  return cuGraphKernelNodeSetParams_v2(node, KernelParams(params).get());
}

SC_API_CODE(cuGraphExecKernelNodeSetParams, 10010, kAlways, CUgraphExec, exec, CUgraphNode, node,
            const void*, params) {
  return cuGraphExecKernelNodeSetParams_v2(exec, node, KernelParams(params).get());
}

SC_API_CODE(cuGraphKernelNodeGetParams, 10000, kAlways, CUgraphNode, node, void*, out) {
  KernelParams params(out);
  const CUresult result = cuGraphKernelNodeGetParams_v2(node, params.get());
  if (result == CUDA_SUCCESS) std::memcpy(out, params.get(), kKernelParamsV1);
  return result;
}

// ---- executable graphs -------------------------------------------------------------------------
// In CUDA, the function returns the node that caused an error, and an error text in the caller's
// buffer. Here it returns no node and an empty text; softcuda_last_refusal() has the text.
SC_API_CODE(cuGraphInstantiate_v2, 11000, kAlways, CUgraphExec*, out, CUgraph, graph, CUgraphNode*,
            error_node, char*, log, size_t, log_size) {
  if (error_node != nullptr) *error_node = nullptr;
  if (log != nullptr && log_size > 0) *log = '\0';
  return cuGraphInstantiateWithFlags(out, graph, 0);
}

SC_API_CODE(cuGraphExecUpdate, 10020, kAlways, CUgraphExec, exec, CUgraph, graph, CUgraphNode*,
            error_node, int*, result) {
  // `info` keeps this value if the call is refused before it compares the graphs.
  CUgraphExecUpdateResultInfo info{CU_GRAPH_EXEC_UPDATE_ERROR, nullptr, nullptr};
  const bool complete = error_node != nullptr && result != nullptr;
  const CUresult code = cuGraphExecUpdate_v2(exec, graph, complete ? &info : nullptr);
  if (complete) {
    *error_node = info.errorNode;
    *result = info.result;
  }
  return code;
}
