// cuGetProcAddress: which symbol answers for (name, version). A name that is not here is absent.
#include <dlfcn.h>

#include <cstring>

#include "runtime.h"

using namespace softcuda;

namespace {
struct Row {
  const char* name;
  int from;                      // the CUDA version whose ABI the symbol has
  const char* symbol = nullptr;  // null: the name itself
};
// Rows of one name are listed newest first; a request gets the first whose version it covers.
const Row kRows[] = {
    // clang-format off
    {"cuInit", 2000}, {"cuDriverGetVersion", 2020}, {"cuGetErrorName", 6000},
    {"cuGetErrorString", 6000}, {"cuGetProcAddress", 12000, "cuGetProcAddress_v2"},
    {"cuGetProcAddress", 11030}, {"cuGetExportTable", 3000}, {"cuDeviceGet", 2000},
    {"cuDeviceGetCount", 2000}, {"cuDeviceGetName", 2000},
    {"cuDeviceGetUuid", 11040, "cuDeviceGetUuid_v2"},
    {"cuDeviceTotalMem", 3020, "cuDeviceTotalMem_v2"}, {"cuDeviceGetAttribute", 2000},
    {"cuDeviceComputeCapability", 2000}, {"cuDevicePrimaryCtxRetain", 7000},
    {"cuDevicePrimaryCtxRelease", 11000, "cuDevicePrimaryCtxRelease_v2"},
    {"cuDevicePrimaryCtxReset", 11000, "cuDevicePrimaryCtxReset_v2"},
    {"cuDevicePrimaryCtxSetFlags", 11000, "cuDevicePrimaryCtxSetFlags_v2"},
    {"cuDevicePrimaryCtxGetState", 7000}, {"cuCtxCreate", 12050, "cuCtxCreate_v4"},
    {"cuCtxCreate", 3020, "cuCtxCreate_v2"}, {"cuCtxDestroy", 4000, "cuCtxDestroy_v2"},
    {"cuCtxSetCurrent", 4000}, {"cuCtxGetCurrent", 4000},
    {"cuCtxPushCurrent", 4000, "cuCtxPushCurrent_v2"},
    {"cuCtxPopCurrent", 4000, "cuCtxPopCurrent_v2"}, {"cuCtxGetDevice", 2000},
    {"cuCtxGetFlags", 7000}, {"cuCtxSynchronize", 2000}, {"cuCtxGetStreamPriorityRange", 5050},
    {"cuMemAlloc", 3020, "cuMemAlloc_v2"}, {"cuMemFree", 3020, "cuMemFree_v2"},
    {"cuMemHostAlloc", 2020}, {"cuMemAllocHost", 3020, "cuMemAllocHost_v2"},
    {"cuMemFreeHost", 2000}, {"cuMemHostRegister", 6050, "cuMemHostRegister_v2"},
    {"cuMemHostUnregister", 4000},
    {"cuMemHostGetDevicePointer", 3020, "cuMemHostGetDevicePointer_v2"},
    {"cuMemHostGetFlags", 2030}, {"cuMemGetInfo", 3020, "cuMemGetInfo_v2"},
    {"cuMemGetAddressRange", 3020, "cuMemGetAddressRange_v2"}, {"cuPointerGetAttribute", 4000},
    {"cuPointerGetAttributes", 7000}, {"cuMemcpy", 4000}, {"cuMemcpyAsync", 4000},
    {"cuMemcpyHtoD", 3020, "cuMemcpyHtoD_v2"}, {"cuMemcpyDtoH", 3020, "cuMemcpyDtoH_v2"},
    {"cuMemcpyDtoD", 3020, "cuMemcpyDtoD_v2"}, {"cuMemcpyHtoDAsync", 3020, "cuMemcpyHtoDAsync_v2"},
    {"cuMemcpyDtoHAsync", 3020, "cuMemcpyDtoHAsync_v2"},
    {"cuMemcpyDtoDAsync", 3020, "cuMemcpyDtoDAsync_v2"}, {"cuMemsetD8", 3020, "cuMemsetD8_v2"},
    {"cuMemsetD16", 3020, "cuMemsetD16_v2"}, {"cuMemsetD32", 3020, "cuMemsetD32_v2"},
    {"cuMemsetD8Async", 3020}, {"cuMemsetD16Async", 3020}, {"cuMemsetD32Async", 3020},
    {"cuModuleLoadData", 2000}, {"cuModuleLoadDataEx", 2010}, {"cuModuleUnload", 2000},
    {"cuModuleGetFunction", 2000}, {"cuModuleGetFunctionCount", 12040},
    {"cuModuleEnumerateFunctions", 12040}, {"cuModuleGetGlobal", 3020, "cuModuleGetGlobal_v2"},
    {"cuModuleGetLoadingMode", 11070}, {"cuFuncGetModule", 11000}, {"cuFuncGetName", 12030},
    {"cuFuncGetParamInfo", 12040}, {"cuFuncGetParamCount", 13020}, {"cuFuncGetAttribute", 2020},
    {"cuFuncSetAttribute", 9000}, {"cuFuncLoad", 12040}, {"cuFuncIsLoaded", 12040},
    {"cuLibraryLoadData", 12000}, {"cuLibraryLoadFromFile", 12000}, {"cuLibraryUnload", 12000},
    {"cuLibraryGetKernel", 12000}, {"cuLibraryGetModule", 12000}, {"cuLibraryGetGlobal", 12000},
    {"cuLibraryGetKernelCount", 12040}, {"cuLibraryEnumerateKernels", 12040},
    {"cuKernelGetLibrary", 12050}, {"cuKernelGetFunction", 12000}, {"cuKernelGetName", 12030},
    {"cuKernelGetAttribute", 12000}, {"cuKernelSetAttribute", 12000},
    {"cuKernelGetParamInfo", 12040}, {"cuKernelGetParamCount", 13020},
    {"cuDeviceGetDefaultMemPool", 11020}, {"cuDeviceGetMemPool", 11020}, {"cuMemPoolCreate", 11020},
    {"cuMemAllocFromPoolAsync", 11020}, {"cuLaunchKernel", 4000}, {"cuLaunchKernelEx", 11060},
    {"cuLaunchHostFunc", 13020, "cuLaunchHostFunc_v2"}, {"cuLaunchHostFunc", 10000},
    {"cuStreamCreate", 2000}, {"cuStreamCreateWithPriority", 5050},
    {"cuStreamDestroy", 4000, "cuStreamDestroy_v2"}, {"cuStreamSynchronize", 2000},
    {"cuStreamQuery", 2000}, {"cuStreamWaitEvent", 3020},
    {"cuStreamGetCtx", 12050, "cuStreamGetCtx_v2"}, {"cuStreamGetCtx", 9020},
    {"cuStreamGetFlags", 5050}, {"cuStreamGetPriority", 5050}, {"cuStreamGetId", 12000},
    {"cuStreamGetDevice", 12080}, {"cuStreamIsCapturing", 10000},
    {"cuStreamGetCaptureInfo", 12030, "cuStreamGetCaptureInfo_v3"},
    {"cuStreamGetCaptureInfo", 11030, "cuStreamGetCaptureInfo_v2"},
    {"cuStreamBeginCapture", 10010, "cuStreamBeginCapture_v2"}, {"cuStreamEndCapture", 10000},
    {"cuStreamBeginCaptureToGraph", 12030},
    {"cuStreamUpdateCaptureDependencies", 12030, "cuStreamUpdateCaptureDependencies_v2"},
    {"cuThreadExchangeStreamCaptureMode", 10010},
    {"cuStreamBatchMemOp", 11070, "cuStreamBatchMemOp_v2"},
    {"cuStreamWaitValue32", 11070, "cuStreamWaitValue32_v2"},
    {"cuStreamWaitValue64", 11070, "cuStreamWaitValue64_v2"},
    {"cuStreamWriteValue32", 11070, "cuStreamWriteValue32_v2"},
    {"cuStreamWriteValue64", 11070, "cuStreamWriteValue64_v2"}, {"cuEventCreate", 2000},
    {"cuEventDestroy", 4000, "cuEventDestroy_v2"}, {"cuEventRecord", 2000},
    {"cuEventRecordWithFlags", 11010}, {"cuEventQuery", 2000}, {"cuEventSynchronize", 2000},
    {"cuEventElapsedTime", 2000, "cuEventElapsedTime_v2"}, {"cuUserObjectCreate", 11030},
    {"cuUserObjectRetain", 11030}, {"cuUserObjectRelease", 11030},
    {"cuGraphRetainUserObject", 11030}, {"cuGraphReleaseUserObject", 11030},
    {"cuGraphCreate", 10000}, {"cuGraphDestroy", 10000}, {"cuGraphClone", 10000},
    {"cuGraphNodeFindInClone", 10000}, {"cuGraphAddEmptyNode", 10000},
    {"cuGraphAddKernelNode", 12000, "cuGraphAddKernelNode_v2"}, {"cuGraphAddHostNode", 10000},
    {"cuGraphAddMemcpyNode", 10000}, {"cuGraphAddMemsetNode", 10000},
    {"cuGraphAddBatchMemOpNode", 11070}, {"cuGraphBatchMemOpNodeGetParams", 11070},
    {"cuGraphBatchMemOpNodeSetParams", 11070}, {"cuGraphExecBatchMemOpNodeSetParams", 11070},
    {"cuGraphAddEventRecordNode", 11010}, {"cuGraphAddEventWaitNode", 11010},
    {"cuGraphEventRecordNodeGetEvent", 11010}, {"cuGraphEventRecordNodeSetEvent", 11010},
    {"cuGraphEventWaitNodeGetEvent", 11010}, {"cuGraphEventWaitNodeSetEvent", 11010},
    {"cuGraphExecEventRecordNodeSetEvent", 11010}, {"cuGraphExecEventWaitNodeSetEvent", 11010},
    {"cuGraphAddChildGraphNode", 10000}, {"cuGraphAddNode", 12030, "cuGraphAddNode_v2"},
    {"cuGraphConditionalHandleCreate", 12030},
    {"cuGraphAddDependencies", 12030, "cuGraphAddDependencies_v2"},
    {"cuGraphRemoveDependencies", 12030, "cuGraphRemoveDependencies_v2"},
    {"cuGraphDestroyNode", 10000}, {"cuGraphGetNodes", 10000}, {"cuGraphGetRootNodes", 10000},
    {"cuGraphGetEdges", 12030, "cuGraphGetEdges_v2"},
    {"cuGraphNodeGetDependencies", 12030, "cuGraphNodeGetDependencies_v2"},
    {"cuGraphNodeGetDependentNodes", 12030, "cuGraphNodeGetDependentNodes_v2"},
    {"cuGraphNodeGetType", 10000}, {"cuGraphNodeGetParams", 13000}, {"cuGraphNodeSetParams", 12020},
    {"cuGraphExecNodeSetParams", 12020}, {"cuGraphHostNodeSetParams", 10000},
    {"cuGraphKernelNodeGetParams", 12000, "cuGraphKernelNodeGetParams_v2"},
    {"cuGraphKernelNodeSetParams", 12000, "cuGraphKernelNodeSetParams_v2"},
    {"cuGraphKernelNodeGetAttribute", 10000}, {"cuGraphKernelNodeSetAttribute", 10000},
    {"cuGraphMemcpyNodeGetParams", 10000}, {"cuGraphMemcpyNodeSetParams", 10000},
    {"cuGraphMemsetNodeGetParams", 10000}, {"cuGraphMemsetNodeSetParams", 10000},
    {"cuGraphHostNodeGetParams", 10000}, {"cuGraphChildGraphNodeGetGraph", 10000},
    {"cuGraphDebugDotPrint", 11030}, {"cuGraphInstantiateWithFlags", 11040},
    {"cuGraphInstantiate", 12000, "cuGraphInstantiateWithFlags"},
    {"cuGraphInstantiateWithParams", 12000}, {"cuGraphExecGetFlags", 12000},
    {"cuGraphUpload", 11010}, {"cuGraphLaunch", 10000}, {"cuGraphExecDestroy", 10000},
    {"cuGraphExecUpdate", 12000, "cuGraphExecUpdate_v2"},
    {"cuGraphExecKernelNodeSetParams", 12000, "cuGraphExecKernelNodeSetParams_v2"},
    {"cuGraphExecMemcpyNodeSetParams", 10020}, {"cuGraphExecMemsetNodeSetParams", 10020},
    {"cuGraphExecHostNodeSetParams", 10020}, {"cuGraphNodeSetEnabled", 11060},
    {"cuGraphNodeGetEnabled", 11060},
    // clang-format on
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
