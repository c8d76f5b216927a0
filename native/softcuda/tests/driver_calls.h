// Declarations of the driver functions that the test programs call, and a macro that checks
// results.
#pragma once

#include "../src/cuda_api.h"
#include "check.h"

extern "C" {
CUresult cuInit(unsigned);
CUresult cuDevicePrimaryCtxRetain(CUcontext*, CUdevice);
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice);
CUresult cuCtxSetCurrent(CUcontext);
CUresult cuCtxSynchronize();
CUresult cuMemHostAlloc(void**, size_t, unsigned);
CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr*, void*, unsigned);
CUresult cuMemFreeHost(void*);
CUresult cuModuleLoadData(CUmodule*, const void*);
CUresult cuModuleUnload(CUmodule);
CUresult cuModuleGetFunction(CUfunction*, CUmodule, const char*);
CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                        unsigned, CUstream, void**, void**);
CUresult cuLaunchHostFunc(CUstream, CUhostFn, void*);
CUresult cuStreamCreate(CUstream*, unsigned);
CUresult cuStreamDestroy_v2(CUstream);
CUresult cuStreamSynchronize(CUstream);
CUresult cuEventCreate(CUevent*, unsigned);
CUresult cuGraphCreate(CUgraph*, unsigned);
CUresult cuGraphDestroy(CUgraph);
CUresult cuGraphAddKernelNode_v2(CUgraphNode*, CUgraph, const CUgraphNode*, size_t,
                                 const CUDA_KERNEL_NODE_PARAMS*);
CUresult cuGraphAddMemcpyNode(CUgraphNode*, CUgraph, const CUgraphNode*, size_t,
                              const CUDA_MEMCPY3D*, CUcontext);
CUresult cuGraphAddMemsetNode(CUgraphNode*, CUgraph, const CUgraphNode*, size_t,
                              const CUDA_MEMSET_NODE_PARAMS*, CUcontext);
CUresult cuGraphAddHostNode(CUgraphNode*, CUgraph, const CUgraphNode*, size_t,
                            const CUDA_HOST_NODE_PARAMS*);
CUresult cuGraphAddEmptyNode(CUgraphNode*, CUgraph, const CUgraphNode*, size_t);
CUresult cuGraphAddChildGraphNode(CUgraphNode*, CUgraph, const CUgraphNode*, size_t, CUgraph);
CUresult cuGraphAddBatchMemOpNode(CUgraphNode*, CUgraph, const CUgraphNode*, size_t,
                                  const CUDA_BATCH_MEM_OP_NODE_PARAMS*);
CUresult cuGraphAddEventRecordNode(CUgraphNode*, CUgraph, const CUgraphNode*, size_t, CUevent);
CUresult cuGraphAddEventWaitNode(CUgraphNode*, CUgraph, const CUgraphNode*, size_t, CUevent);
CUresult cuGraphAddNode_v2(CUgraphNode*, CUgraph, const CUgraphNode*, const CUgraphEdgeData*,
                           size_t, CUgraphNodeParams*);
CUresult cuGraphConditionalHandleCreate(uint64_t*, CUgraph, CUcontext, unsigned, unsigned);
CUresult cuStreamBeginCapture_v2(CUstream, int);
CUresult cuStreamEndCapture(CUstream, CUgraph*);
CUresult cuStreamGetCaptureInfo_v3(CUstream, int*, uint64_t*, CUgraph*, const CUgraphNode**,
                                   const CUgraphEdgeData**, size_t*);
CUresult cuStreamUpdateCaptureDependencies_v2(CUstream, const CUgraphNode*, const CUgraphEdgeData*,
                                              size_t, unsigned);
CUresult cuStreamWaitEvent(CUstream, CUevent, unsigned);
CUresult cuEventRecord(CUevent, CUstream);
CUresult cuEventRecordWithFlags(CUevent, CUstream, unsigned);
CUresult cuEventDestroy_v2(CUevent);
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr, CUdeviceptr, size_t, CUstream);
CUresult cuMemsetD8Async(CUdeviceptr, unsigned char, size_t, CUstream);
CUresult cuGraphExecDestroy(CUgraphExec);
CUresult cuGraphInstantiateWithFlags(CUgraphExec*, CUgraph, unsigned long long);
CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec, CUgraphNode,
                                           const CUDA_KERNEL_NODE_PARAMS*);
CUresult cuGraphLaunch(CUgraphExec, CUstream);
CUresult cuGraphNodeSetEnabled(CUgraphExec, CUgraphNode, unsigned);
int64_t softcuda_live(const char* kind);
int64_t softcuda_count(const char* what);
size_t softcuda_last_fault(char* text, size_t size);
size_t softcuda_last_refusal(char* text, size_t size);
}

namespace stress {

[[noreturn]] inline void fail_call(const char* expression, const char* file, int line) {
  char reason[512] = "";
  softcuda_last_refusal(reason, sizeof reason);
  fail(expression, file, line, reason);
}

// Ends the program with an error message if a driver call does not return CUDA_SUCCESS.
#define CALL(expression) \
  if ((expression) != CUDA_SUCCESS) stress::fail_call(#expression, __FILE__, __LINE__)

}  // namespace stress
