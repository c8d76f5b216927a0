// cuGetProcAddress: which symbol answers for (name, version). A name that is not here is absent.
#include <dlfcn.h>

#include <cstring>

#include "runtime.h"

using namespace softcuda;

namespace {
struct Row {
  const char* name;
  int from;            // the CUDA version whose ABI the symbol has
  const char* symbol;  // null: the name itself
};
// Rows of one name are listed newest first; a request gets the first whose version it covers.
const Row kRows[] = {
    {"cuInit", 2000, nullptr},
    {"cuDriverGetVersion", 2020, nullptr},
    {"cuGetErrorName", 6000, nullptr},
    {"cuGetErrorString", 6000, nullptr},
    {"cuGetProcAddress", 12000, "cuGetProcAddress_v2"},
    {"cuGetProcAddress", 11030, nullptr},
    {"cuGetExportTable", 3000, nullptr},
    {"cuDeviceGet", 2000, nullptr},
    {"cuDeviceGetCount", 2000, nullptr},
    {"cuDeviceGetName", 2000, nullptr},
    {"cuDeviceGetUuid", 11040, "cuDeviceGetUuid_v2"},
    {"cuDeviceTotalMem", 3020, "cuDeviceTotalMem_v2"},
    {"cuDeviceGetAttribute", 2000, nullptr},
    {"cuDeviceComputeCapability", 2000, nullptr},
    {"cuDevicePrimaryCtxRetain", 7000, nullptr},
    {"cuDevicePrimaryCtxRelease", 11000, "cuDevicePrimaryCtxRelease_v2"},
    {"cuDevicePrimaryCtxReset", 11000, "cuDevicePrimaryCtxReset_v2"},
    {"cuDevicePrimaryCtxSetFlags", 11000, "cuDevicePrimaryCtxSetFlags_v2"},
    {"cuDevicePrimaryCtxGetState", 7000, nullptr},
    {"cuCtxCreate", 12050, "cuCtxCreate_v4"},
    {"cuCtxCreate", 3020, "cuCtxCreate_v2"},
    {"cuCtxDestroy", 4000, "cuCtxDestroy_v2"},
    {"cuCtxSetCurrent", 4000, nullptr},
    {"cuCtxGetCurrent", 4000, nullptr},
    {"cuCtxPushCurrent", 4000, "cuCtxPushCurrent_v2"},
    {"cuCtxPopCurrent", 4000, "cuCtxPopCurrent_v2"},
    {"cuCtxGetDevice", 2000, nullptr},
    {"cuCtxGetFlags", 7000, nullptr},
    {"cuCtxSynchronize", 2000, nullptr},
    {"cuCtxGetStreamPriorityRange", 5050, nullptr},
    {"cuMemAlloc", 3020, "cuMemAlloc_v2"},
    {"cuMemFree", 3020, "cuMemFree_v2"},
    {"cuMemHostAlloc", 2020, nullptr},
    {"cuMemAllocHost", 3020, "cuMemAllocHost_v2"},
    {"cuMemFreeHost", 2000, nullptr},
    {"cuMemHostRegister", 6050, "cuMemHostRegister_v2"},
    {"cuMemHostUnregister", 4000, nullptr},
    {"cuMemHostGetDevicePointer", 3020, "cuMemHostGetDevicePointer_v2"},
    {"cuMemHostGetFlags", 2030, nullptr},
    {"cuMemGetInfo", 3020, "cuMemGetInfo_v2"},
    {"cuMemGetAddressRange", 3020, "cuMemGetAddressRange_v2"},
    {"cuPointerGetAttribute", 4000, nullptr},
    {"cuPointerGetAttributes", 7000, nullptr},
    {"cuMemcpy", 4000, nullptr},
    {"cuMemcpyAsync", 4000, nullptr},
    {"cuMemcpyHtoD", 3020, "cuMemcpyHtoD_v2"},
    {"cuMemcpyDtoH", 3020, "cuMemcpyDtoH_v2"},
    {"cuMemcpyDtoD", 3020, "cuMemcpyDtoD_v2"},
    {"cuMemcpyHtoDAsync", 3020, "cuMemcpyHtoDAsync_v2"},
    {"cuMemcpyDtoHAsync", 3020, "cuMemcpyDtoHAsync_v2"},
    {"cuMemcpyDtoDAsync", 3020, "cuMemcpyDtoDAsync_v2"},
    {"cuMemsetD8", 3020, "cuMemsetD8_v2"},
    {"cuMemsetD16", 3020, "cuMemsetD16_v2"},
    {"cuMemsetD32", 3020, "cuMemsetD32_v2"},
    {"cuMemsetD8Async", 3020, nullptr},
    {"cuMemsetD16Async", 3020, nullptr},
    {"cuMemsetD32Async", 3020, nullptr},
    {"cuModuleLoadData", 2000, nullptr},
    {"cuModuleLoadDataEx", 2010, nullptr},
    {"cuModuleUnload", 2000, nullptr},
    {"cuModuleGetFunction", 2000, nullptr},
    {"cuModuleGetFunctionCount", 12040, nullptr},
    {"cuModuleEnumerateFunctions", 12040, nullptr},
    {"cuModuleGetGlobal", 3020, "cuModuleGetGlobal_v2"},
    {"cuModuleGetLoadingMode", 11070, nullptr},
    {"cuFuncGetModule", 11000, nullptr},
    {"cuFuncGetName", 12030, nullptr},
    {"cuFuncGetParamInfo", 12040, nullptr},
    {"cuFuncGetParamCount", 13020, nullptr},
    {"cuFuncGetAttribute", 2020, nullptr},
    {"cuFuncSetAttribute", 9000, nullptr},
    {"cuFuncLoad", 12040, nullptr},
    {"cuFuncIsLoaded", 12040, nullptr},
    {"cuLibraryLoadData", 12000, nullptr},
    {"cuLibraryLoadFromFile", 12000, nullptr},
    {"cuLibraryUnload", 12000, nullptr},
    {"cuLibraryGetKernel", 12000, nullptr},
    {"cuLibraryGetModule", 12000, nullptr},
    {"cuLibraryGetGlobal", 12000, nullptr},
    {"cuLibraryGetKernelCount", 12040, nullptr},
    {"cuLibraryEnumerateKernels", 12040, nullptr},
    {"cuKernelGetLibrary", 12050, nullptr},
    {"cuKernelGetFunction", 12000, nullptr},
    {"cuKernelGetName", 12030, nullptr},
    {"cuKernelGetAttribute", 12000, nullptr},
    {"cuKernelSetAttribute", 12000, nullptr},
    {"cuKernelGetParamInfo", 12040, nullptr},
    {"cuKernelGetParamCount", 13020, nullptr},
    {"cuDeviceGetDefaultMemPool", 11020, nullptr},
    {"cuDeviceGetMemPool", 11020, nullptr},
    {"cuMemPoolCreate", 11020, nullptr},
    {"cuMemAllocFromPoolAsync", 11020, nullptr},
    {"cuLaunchKernel", 4000, nullptr},
    {"cuLaunchKernelEx", 11060, nullptr},
    {"cuLaunchHostFunc", 13020, "cuLaunchHostFunc_v2"},
    {"cuLaunchHostFunc", 10000, nullptr},
    {"cuStreamCreate", 2000, nullptr},
    {"cuStreamCreateWithPriority", 5050, nullptr},
    {"cuStreamDestroy", 4000, "cuStreamDestroy_v2"},
    {"cuStreamSynchronize", 2000, nullptr},
    {"cuStreamQuery", 2000, nullptr},
    {"cuStreamWaitEvent", 3020, nullptr},
    {"cuStreamGetCtx", 12050, "cuStreamGetCtx_v2"},
    {"cuStreamGetCtx", 9020, nullptr},
    {"cuStreamGetFlags", 5050, nullptr},
    {"cuStreamGetPriority", 5050, nullptr},
    {"cuStreamGetId", 12000, nullptr},
    {"cuStreamGetDevice", 12080, nullptr},
    {"cuStreamIsCapturing", 10000, nullptr},
    {"cuStreamGetCaptureInfo", 12030, "cuStreamGetCaptureInfo_v3"},
    {"cuStreamGetCaptureInfo", 11030, "cuStreamGetCaptureInfo_v2"},
    {"cuStreamBeginCapture", 10010, "cuStreamBeginCapture_v2"},
    {"cuStreamEndCapture", 10000, nullptr},
    {"cuStreamBeginCaptureToGraph", 12030, nullptr},
    {"cuStreamUpdateCaptureDependencies", 12030, "cuStreamUpdateCaptureDependencies_v2"},
    {"cuThreadExchangeStreamCaptureMode", 10010, nullptr},
    {"cuStreamBatchMemOp", 11070, "cuStreamBatchMemOp_v2"},
    {"cuStreamWaitValue32", 11070, "cuStreamWaitValue32_v2"},
    {"cuStreamWaitValue64", 11070, "cuStreamWaitValue64_v2"},
    {"cuStreamWriteValue32", 11070, "cuStreamWriteValue32_v2"},
    {"cuStreamWriteValue64", 11070, "cuStreamWriteValue64_v2"},
    {"cuEventCreate", 2000, nullptr},
    {"cuEventDestroy", 4000, "cuEventDestroy_v2"},
    {"cuEventRecord", 2000, nullptr},
    {"cuEventRecordWithFlags", 11010, nullptr},
    {"cuEventQuery", 2000, nullptr},
    {"cuEventSynchronize", 2000, nullptr},
    {"cuEventElapsedTime", 2000, "cuEventElapsedTime_v2"},
    {"cuUserObjectCreate", 11030, nullptr},
    {"cuUserObjectRetain", 11030, nullptr},
    {"cuUserObjectRelease", 11030, nullptr},
    {"cuGraphRetainUserObject", 11030, nullptr},
    {"cuGraphReleaseUserObject", 11030, nullptr},
    {"cuGraphCreate", 10000, nullptr},
    {"cuGraphDestroy", 10000, nullptr},
    {"cuGraphClone", 10000, nullptr},
    {"cuGraphNodeFindInClone", 10000, nullptr},
    {"cuGraphAddEmptyNode", 10000, nullptr},
    {"cuGraphAddKernelNode", 12000, "cuGraphAddKernelNode_v2"},
    {"cuGraphAddHostNode", 10000, nullptr},
    {"cuGraphAddMemcpyNode", 10000, nullptr},
    {"cuGraphAddMemsetNode", 10000, nullptr},
    {"cuGraphAddBatchMemOpNode", 11070, nullptr},
    {"cuGraphBatchMemOpNodeGetParams", 11070, nullptr},
    {"cuGraphBatchMemOpNodeSetParams", 11070, nullptr},
    {"cuGraphExecBatchMemOpNodeSetParams", 11070, nullptr},
    {"cuGraphAddEventRecordNode", 11010, nullptr},
    {"cuGraphAddEventWaitNode", 11010, nullptr},
    {"cuGraphEventRecordNodeGetEvent", 11010, nullptr},
    {"cuGraphEventRecordNodeSetEvent", 11010, nullptr},
    {"cuGraphEventWaitNodeGetEvent", 11010, nullptr},
    {"cuGraphEventWaitNodeSetEvent", 11010, nullptr},
    {"cuGraphExecEventRecordNodeSetEvent", 11010, nullptr},
    {"cuGraphExecEventWaitNodeSetEvent", 11010, nullptr},
    {"cuGraphAddChildGraphNode", 10000, nullptr},
    {"cuGraphAddNode", 12030, "cuGraphAddNode_v2"},
    {"cuGraphConditionalHandleCreate", 12030, nullptr},
    {"cuGraphAddDependencies", 12030, "cuGraphAddDependencies_v2"},
    {"cuGraphRemoveDependencies", 12030, "cuGraphRemoveDependencies_v2"},
    {"cuGraphDestroyNode", 10000, nullptr},
    {"cuGraphGetNodes", 10000, nullptr},
    {"cuGraphGetRootNodes", 10000, nullptr},
    {"cuGraphGetEdges", 12030, "cuGraphGetEdges_v2"},
    {"cuGraphNodeGetDependencies", 12030, "cuGraphNodeGetDependencies_v2"},
    {"cuGraphNodeGetDependentNodes", 12030, "cuGraphNodeGetDependentNodes_v2"},
    {"cuGraphNodeGetType", 10000, nullptr},
    {"cuGraphNodeGetParams", 13000, nullptr},
    {"cuGraphNodeSetParams", 12020, nullptr},
    {"cuGraphExecNodeSetParams", 12020, nullptr},
    {"cuGraphHostNodeSetParams", 10000, nullptr},
    {"cuGraphKernelNodeGetParams", 12000, "cuGraphKernelNodeGetParams_v2"},
    {"cuGraphKernelNodeSetParams", 12000, "cuGraphKernelNodeSetParams_v2"},
    {"cuGraphKernelNodeGetAttribute", 10000, nullptr},
    {"cuGraphKernelNodeSetAttribute", 10000, nullptr},
    {"cuGraphMemcpyNodeGetParams", 10000, nullptr},
    {"cuGraphMemcpyNodeSetParams", 10000, nullptr},
    {"cuGraphMemsetNodeGetParams", 10000, nullptr},
    {"cuGraphMemsetNodeSetParams", 10000, nullptr},
    {"cuGraphHostNodeGetParams", 10000, nullptr},
    {"cuGraphChildGraphNodeGetGraph", 10000, nullptr},
    {"cuGraphDebugDotPrint", 11030, nullptr},
    {"cuGraphInstantiateWithFlags", 11040, nullptr},
    {"cuGraphInstantiate", 12000, "cuGraphInstantiateWithFlags"},
    {"cuGraphInstantiateWithParams", 12000, nullptr},
    {"cuGraphExecGetFlags", 12000, nullptr},
    {"cuGraphUpload", 11010, nullptr},
    {"cuGraphLaunch", 10000, nullptr},
    {"cuGraphExecDestroy", 10000, nullptr},
    {"cuGraphExecUpdate", 12000, "cuGraphExecUpdate_v2"},
    {"cuGraphExecKernelNodeSetParams", 12000, "cuGraphExecKernelNodeSetParams_v2"},
    {"cuGraphExecMemcpyNodeSetParams", 10020, nullptr},
    {"cuGraphExecMemsetNodeSetParams", 10020, nullptr},
    {"cuGraphExecHostNodeSetParams", 10020, nullptr},
    {"cuGraphNodeSetEnabled", 11060, nullptr},
    {"cuGraphNodeGetEnabled", 11060, nullptr},
};

void* own_symbol(const char* name) {
  // This very library, whatever else is loaded under the SONAME.
  static void* const self = [] {
    Dl_info info{};
    dladdr(reinterpret_cast<void*>(&own_symbol), &info);
    return dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  }();
  return self == nullptr ? nullptr : dlsym(self, name);
}
}  // namespace

SC_EXPORT CUresult cuGetProcAddress_v2(const char* name, void** out, int version,
                                       uint64_t /*flags*/, int* status) {
  SC_API(cuGetProcAddress, kAlways);
  if (name == nullptr || out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *out = nullptr;
  bool known = false;
  for (const Row& row : kRows) {
    if (std::strcmp(row.name, name) != 0) continue;
    known = true;
    if (version < row.from) continue;
    *out = own_symbol(row.symbol != nullptr ? row.symbol : row.name);
    if (status != nullptr) *status = 0;  // SUCCESS
    return *out != nullptr ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
  }
  if (status != nullptr) *status = known ? 2 : 1;  // VERSION_NOT_SUFFICIENT, SYMBOL_NOT_FOUND
  return CUDA_ERROR_NOT_FOUND;
}

SC_EXPORT CUresult cuGetProcAddress(const char* name, void** out, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, out, version, flags, nullptr);
}

SC_EXPORT CUresult cuGetExportTable(const void**, const void*) {
  SC_API(cuGetExportTable, kAlways);
  return CUDA_ERROR_NOT_FOUND;  // undocumented tables: there are none
}
