"""Signatures of all functions of the soft device, and the error codes for invalid arguments.

A line of ``TABLE`` describes one or more functions with the same signature. It contains the names
of the functions, their flags in brackets, the parameters and, if a valid call returns an error,
``-> CODE``. ``NAME@VERSION`` is the ABI of a function in an older CUDA version.

Flags:

* ``c``: the function requires a current context.
* ``u``: the function is unsafe during a capture.
* ``f``: the function is allowed after a fault.
* ``i``: the function is allowed before cuInit.
* ``a``: the function is always allowed, even in host functions.

Parameters:

* ``valid|invalid|...``: an integer. The invalid values return INVALID_VALUE; ``invalid:CODE``
  states another error code.
* ``out``: the address of a result. NULL returns INVALID_VALUE.
* ``in.NAME``: the address of an input structure or array. NULL returns INVALID_VALUE.
* any other word: a kind of handle or pointer. An unknown one returns the code in ``DEFAULT_CODES``,
  or INVALID_HANDLE if the kind is not listed there.

Suffixes of parameters:

* ``?``: NULL is allowed.
* ``~CODE``: an unknown handle returns this code.
* ``~-``: an unknown handle is not tested.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Error codes for unknown handles and pointers, by kind. Other kinds return INVALID_HANDLE.
DEFAULT_CODES = {
    "dev": "INVALID_DEVICE",
    "dptr": "INVALID_VALUE",
    "pinned": "INVALID_VALUE",
    "ctx": "INVALID_CONTEXT",
    "newctx": "INVALID_CONTEXT",
    "registered": "HOST_MEMORY_NOT_REGISTERED",
    "managed": "INVALID_VALUE",
    "pool": "INVALID_VALUE",
    "galloc": "INVALID_VALUE",
    "memory": "INVALID_VALUE",
    "reserved": "INVALID_VALUE",
    "mapped": "INVALID_VALUE",
    "file": "INVALID_VALUE",
}
#: All kinds of handles and pointers.
KINDS = frozenset(
    {
        *DEFAULT_CODES,
        "stream",
        "capturing",
        "event",
        "timed",
        "graph",
        "graph2",
        "exec",
        "node",
        "knode",
        "cnode",
        "mnode",
        "hnode",
        "bnode",
        "anode",
        "fnode",
        "gnode",
        "rnode",
        "wnode",
        "clone",
        "module",
        "function",
        "library",
        "kernel",
        "linked",
        "linking",
        "object",
        "retained",
        "pageable",
        "array",
        "desc",
        "green",
    }
)

TABLE = """
cuInit [if] 0|1
cuDriverGetVersion [a] out
cuGetErrorName,cuGetErrorString [a] 1|12345 out
cuGetProcAddress [a] in.symbol out 13020 0 out?
cuGetProcAddress@11030 [a] in.symbol out 13020 0
cuGetExportTable [a] out? in.bytes? -> NOT_FOUND
cuDeviceGet [f] out 0|99:INVALID_DEVICE
cuDeviceGetCount,cuCtxGetCurrent [f] out
cuDeviceGetName [f] out 64 dev
cuDeviceGetUuid,cuDeviceTotalMem [f] out dev
cuDeviceGetUuid@9020 [f] out dev
cuDeviceGetAttribute [f] out 16|0|99999 dev
cuDeviceComputeCapability [f] out out dev
cuDeviceCanAccessPeer [] out dev dev
cuDeviceGetPCIBusId [f] out 64|0 dev
cuDevicePrimaryCtxRetain [] out dev
cuDevicePrimaryCtxSetFlags [] dev 0|256
cuDevicePrimaryCtxGetState [f] dev out out
cuCtxCreate [] out 0 0|256 dev
cuCtxCreate@3020 [] out 0|256 dev
cuCtxCreate@11040 [] out 0 0|1:NOT_SUPPORTED 0|256 dev
cuCtxDestroy [f] newctx
cuCtxSetCurrent,cuCtxPushCurrent [] ctx
cuCtxPopCurrent [] out?
cuCtxGetDevice,cuCtxGetFlags,cuModuleGetLoadingMode,cuThreadExchangeStreamCaptureMode [] out
cuCtxSynchronize []
cuCtxGetLimit [c] out 0|99|3:UNSUPPORTED_LIMIT
cuCtxSetLimit [c] 0|99|3:UNSUPPORTED_LIMIT 4096
cuCtxGetCacheConfig [c] out
cuCtxSetCacheConfig [c] 1|9
cuCtxSetFlags [c] 0|256
cuCtxGetApiVersion,cuCtxGetId [] ctx out
cuFuncSetCacheConfig [] function 1|9
cuKernelSetCacheConfig [] kernel 1|9 dev
cuDeviceGetByPCIBusId [f] out in.bus
cuDeviceGetP2PAttribute [] out 1|99 dev dev -> INVALID_DEVICE
cuDeviceGetExecAffinitySupport [] out 0|1 dev
cuDeviceGetDevResource [] dev out 1|7:INVALID_RESOURCE_TYPE
cuCtxGetDevResource [] ctx out 1|7:INVALID_RESOURCE_TYPE
cuGreenCtxGetDevResource [] green out 1|7:INVALID_RESOURCE_TYPE
cuStreamGetDevResource [] stream out 1|7:INVALID_RESOURCE_TYPE
cuDevSmResourceSplitByCount [] 0 in.ones in.sm out? 0|4 2|9:INVALID_RESOURCE_CONFIGURATION
cuDevSmResourceSplit [] 0 1|0 in.sm out? 0|1 in.bytes
cuDevResourceGenerateDesc [] out in.sm 1|0
cuGreenCtxCreate [] out desc dev 1|2
cuGreenCtxDestroy [] green
cuCtxFromGreenCtx [] out green
cuGreenCtxGetId [] green out
cuStreamGetGreenCtx [] stream out
cuGreenCtxStreamCreate [] out green 1|0 0
cuProfilerStart,cuProfilerStop [c]
cuCoredumpGetAttribute [c] 3|99 out? out
cuCoredumpGetAttributeGlobal [] 3|99 out? out
cuCoredumpSetAttribute [c] 3|99 in.bytes in.fours
cuCoredumpSetAttributeGlobal [] 3|99 in.bytes in.fours
cuCtxGetStreamPriorityRange [] out? out?
cuMemAlloc [cu] out 64|0|1125899906842624:OUT_OF_MEMORY
cuMemFree [cu] dptr
cuMemAllocManaged [cu] out 64|0 1|0|4
cuMemAllocAsync [c] out 64|1125899906842624:OUT_OF_MEMORY stream
cuMemAllocFromPoolAsync [c] out 64|1125899906842624:OUT_OF_MEMORY pool stream
cuMemFreeAsync [c] dptr stream
cuMemPoolCreate [] out in.pool_props
cuMemPoolDestroy [] pool
cuMemPoolTrimTo [] pool 0
cuMemPoolSetAttribute [] pool 4|5|99 in.zeros
cuMemPoolGetAttribute [] pool 4|99 out
cuMemPoolSetAccess [] pool in.access_desc 1
cuMemPoolGetAccess [] out pool in.location
cuDeviceGetDefaultMemPool,cuDeviceGetMemPool [] out dev
cuDeviceSetMemPool [] dev pool
cuMemGetDefaultMemPool,cuMemGetMemPool [] out in.location 1|0
cuMemSetMemPool [] in.location 1|0 pool
cuDeviceGetGraphMemAttribute [] dev 0|9 out
cuDeviceSetGraphMemAttribute [] dev 1|0 in.zeros
cuDeviceGraphMemTrim [] dev
cuMemAdvise [c] managed 64|0 1|0|9 1
cuMemAdvise@8000 [c] managed 64|0 5|0|9 0|7:INVALID_DEVICE
cuMemPrefetchAsync [c] managed 64|0 1|0 0|1 stream
cuMemPrefetchAsync@8000 [c] managed 64|0 0|7:INVALID_DEVICE stream
cuMemPrefetchBatchAsync [c] in.ranges in.sizes 1|0 in.location in.zeros 1|2 0|1 stream
cuMemDiscardBatchAsync [c] in.ranges in.sizes 1|0 0|1 stream
cuMemDiscardAndPrefetchBatchAsync [c] in.ranges in.sizes 1|0 in.location in.zeros 1|2 0|1 stream
cuMemRangeGetAttribute [c] out 4|0|8 1|99 managed 64|0
cuMemRangeGetAttributes [c] in.results in.fours in.ones 1|0 managed 64|0
cuStreamAttachMemAsync [c] stream managed 0|7 4|0
cuMemGetAllocationGranularity [] out in.prop 0|2
cuMemAddressReserve [c] out 65536|0|1 0|3 0 0|1
cuMemAddressFree [c] reserved 65536|0
cuMemCreate [c] out 65536|0|1|1125899906842624:OUT_OF_MEMORY in.prop 0|1
cuMemRelease [c] memory
cuMemMap [c] reserved 65536|0|1 0|65536 memory 0|1
cuMemUnmap [c] mapped 65536|0
cuMemSetAccess [c] mapped 65536|0 in.access_desc 1|0
cuMemGetAccess [c] out in.location mapped
cuMemRetainAllocationHandle [c] out mapped
cuMemGetAllocationPropertiesFromHandle [c] out memory
cuMemExportToShareableHandle [c] out memory 1|2 0|1
cuMemImportFromShareableHandle [c] out file 1|2
cuMemHostAlloc [cu] out 64|0 3|64
cuMemAllocHost [cu] out 64|0
cuMemFreeHost [cu] pinned
cuMemHostRegister [cu] pageable~- 4096|0 2|64
cuMemHostUnregister [cu] registered
cuMemHostGetDevicePointer [] out pinned 0|1
cuMemHostGetFlags [] out pinned
cuMemGetAddressRange [] out? out? dptr~NOT_FOUND
cuMemGetInfo [c] out? out?
cuPointerGetAttribute [] out 2|9999:NOT_SUPPORTED dptr
cuPointerSetAttribute [] in.ones 6|2 dptr
cuPointerGetAttributes [] 1|0 in.attributes in.results dptr~-
cuMemcpy [cu] dptr~- dptr~- 64|65536
cuMemcpyAsync [c] dptr~- dptr~- 64|65536 stream
cuMemcpyHtoD [cu] dptr in.bytes 64|65536
cuMemcpyDtoH [cu] out dptr 64|65536
cuMemcpyDtoD [cu] dptr dptr 64|65536
cuMemcpyHtoDAsync [c] dptr in.bytes 64|65536 stream
cuMemcpyDtoHAsync [c] out dptr 64|65536 stream
cuMemcpyDtoDAsync [c] dptr dptr 64|65536 stream
cuMemcpyWithAttributesAsync [c] dptr~- dptr~- 64|65536 in.access? stream
cuMemcpyBatchAsync [c] in.pointers in.pointers2 in.sizes 1|0 in.access in.zeros 1|2 stream
cuMemcpyBatchAsync@12080 [c] in.pointers in.pointers2 in.sizes 1|0 in.access in.zeros 1|2 0 stream
cuMemsetD8,cuMemsetD16,cuMemsetD32 [cu] dptr 1 16|65536
cuMemsetD8Async,cuMemsetD16Async,cuMemsetD32Async [c] dptr 1 16|65536 stream
cuMemsetD2D8,cuMemsetD2D16,cuMemsetD2D32 [cu] dptr 32|4 1 8|65536 2|65536
cuMemsetD2D8Async,cuMemsetD2D16Async,cuMemsetD2D32Async [c] dptr 32|4 1 8|65536 2|65536 stream
cuMemAllocPitch [cu] out out 64|0 2|0 4|3
cuMemcpy2D,cuMemcpy2DUnaligned [cu] in.copy2d
cuMemcpy2DAsync [c] in.copy2d stream
cuMemcpy3D,cuMemcpy3DPeer [cu] in.copy
cuMemcpy3DAsync,cuMemcpy3DPeerAsync [c] in.copy stream
cuMemcpyPeer [cu] dptr ctx dptr ctx 64|65536
cuMemcpyPeerAsync [c] dptr ctx dptr ctx 64|65536 stream
cuArrayCreate [cu] out in.array2d
cuArray3DCreate [cu] out in.array3d
cuArrayDestroy [cu] array
cuArrayGetDescriptor,cuArray3DGetDescriptor [c] out array
cuMemcpyHtoA [cu] array 0|64 in.bytes 16|65536
cuMemcpyHtoAAsync [c] array 0|64 in.bytes 16|65536 stream
cuMemcpyAtoH [cu] out array 0|64 16|65536
cuMemcpyAtoHAsync [c] out array 0|64 16|65536 stream
cuMemcpyDtoA [cu] array 0|64 dptr 16|65536
cuMemcpyAtoD [cu] dptr array 0|64 16|65536
cuMemcpyAtoA [cu] array 0|64 array 0|64 16|65536
cuModuleLoadData [cu] out in.image
cuModuleLoadDataEx [cu] out in.image 0 0 0
cuLinkCreate [c] 0 0 0 out
cuLinkAddData [c] linking 1|0:NOT_SUPPORTED in.ptx 44|0 0 0 0 0
cuLinkAddFile [c] linking 1|0:NOT_SUPPORTED in.ptx_path 0 0 0
cuLinkComplete [c] linked out out?
cuLinkDestroy [] linking
cuModuleGetGlobal [c] out? out? module in.name -> NOT_FOUND
cuLibraryGetGlobal [] out? out? library in.name -> NOT_FOUND
cuModuleLoad [cu] out in.path
cuModuleUnload [cu] module
cuModuleGetFunctionCount [] out module
cuModuleEnumerateFunctions [] out 1 module
cuModuleGetFunction [] out module in.name
cuFuncGetModule,cuFuncIsLoaded [] out function
cuFuncGetName [] out function~INVALID_VALUE
cuFuncGetParamInfo [] function~INVALID_VALUE 0|99 out out?
cuFuncGetParamCount [] function~INVALID_VALUE out
cuFuncGetAttribute [] out 0|9999:NOT_SUPPORTED function
cuFuncSetAttribute [] function 8|9999:NOT_SUPPORTED 64
cuFuncLoad [] function
cuLibraryLoadData [u] out in.image 0 0 0 0 0 0
cuLibraryLoadFromFile [u] out in.path 0 0 0 0 0 0
cuLibraryUnload [u] library
cuLibraryGetKernel [] out library in.name
cuLibraryGetModule,cuLibraryGetKernelCount [] out library
cuLibraryEnumerateKernels [] out 1 library
cuKernelGetLibrary,cuKernelGetFunction [] out kernel
cuKernelGetName [] out kernel~INVALID_VALUE
cuKernelGetAttribute [] out 0|9999:NOT_SUPPORTED kernel dev
cuKernelSetAttribute [] 8|9999:NOT_SUPPORTED 64 kernel dev
cuKernelGetParamInfo [c] kernel~INVALID_VALUE 0|99 out out?
cuKernelGetParamCount [] kernel~INVALID_VALUE out
cuOccupancyMaxActiveBlocksPerMultiprocessor [] out function 32|0 0
cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags [] out function 32|0 0 0|2
cuOccupancyMaxPotentialBlockSize [] out out function 0 0 0
cuOccupancyMaxPotentialBlockSizeWithFlags [] out out function 0 0 0 0|2
cuOccupancyMaxActiveClusters,cuOccupancyMaxPotentialClusterSize [] out function in.config
cuOccupancyAvailableDynamicSMemPerBlock [] out function 1|0 32|0
cuLaunchKernel [c] function 1|0 1|0 1|0 1|0|2048 1|0 1|0 0|9999999 stream in.arguments~- 0
cuLaunchKernelEx [c] in.config function in.arguments~- 0
cuLaunchHostFunc [] stream in.fn 0 0|2
cuLaunchHostFunc@10000 [] stream in.fn 0
cuStreamCreate [c] out 1|8
cuStreamCreateWithPriority [c] out 1|8 0
cuStreamDestroy,cuStreamSynchronize,cuStreamQuery [] stream
cuStreamWaitEvent [] stream event 0|2|1
cuStreamGetAttribute [] stream 8|99 out
cuStreamSetAttribute [] stream 8|99 in.bytes
cuStreamCopyAttributes [] stream stream
cuStreamAddCallback [] stream in.fn 0 0|1
cuStreamGetCtx [] stream out out
cuStreamGetCtx@9020,cuStreamGetFlags,cuStreamGetPriority,cuStreamGetId [] stream out
cuStreamGetDevice,cuStreamIsCapturing [] stream out
cuStreamGetCaptureInfo [] stream out out? out? out? out? out?
cuStreamGetCaptureInfo@10010 [] stream out out?
cuStreamGetCaptureInfo@11030 [] stream out out? out? out? out?
cuStreamBeginCapture [] stream 2|9
cuStreamBeginCaptureToGraph [] stream graph 0 0 0 2|9
cuStreamEndCapture [] capturing~ILLEGAL_STATE out
cuStreamUpdateCaptureDependencies [] capturing~ILLEGAL_STATE 0 0 0 0|9
cuStreamUpdateCaptureDependencies@11030 [] capturing~ILLEGAL_STATE 0 0 0|9
cuStreamBatchMemOp [] stream 1|0|256 in.operations 0|1
cuStreamWaitValue32,cuStreamWaitValue64 [] stream dptr 0 0|64|4
cuStreamWriteValue32,cuStreamWriteValue64 [] stream dptr 0 0|64|2|1:NOT_SUPPORTED
cuEventCreate [c] out 2|64|4:NOT_SUPPORTED
cuEventDestroy,cuEventQuery,cuEventSynchronize [] event
cuEventRecord [] event stream
cuEventRecordWithFlags [] event stream 0|2|1
cuEventElapsedTime [] out timed timed
cuUserObjectCreate [] out 0 in.fn 1|0 1|0
cuUserObjectRelease [] object 1|0|9
cuUserObjectRetain [] object 1|0
cuGraphRetainUserObject [] graph object 1|0 0|2
cuGraphReleaseUserObject [] graph retained 1|0|9
cuGraphCreate [] out 0|1
cuGraphDestroy [] graph
cuGraphAddEmptyNode [] out graph 0 0
cuGraphAddKernelNode [] out graph 0 0 in.kernel
cuGraphAddHostNode [] out graph 0 0 in.host
cuGraphAddMemcpyNode [] out graph 0 0 in.copy 0
cuGraphAddMemsetNode [] out graph 0 0 in.fill 0
cuGraphAddBatchMemOpNode [] out graph 0 0 in.batch
cuGraphAddMemAllocNode [] out graph 0 0 in.alloc
cuGraphAddMemFreeNode [] out graph 0 0 galloc
cuGraphAddEventRecordNode,cuGraphAddEventWaitNode [] out graph 0 0 event
cuGraphAddChildGraphNode [] out graph 0 0 graph2
cuGraphAddNode [] out graph 0 0 0 in.node_params
cuGraphAddNode@12020 [] out graph 0 0 in.node_params
cuGraphAddKernelNode@10000 [] out graph 0 0 in.kernel
cuGraphConditionalHandleCreate [] out graph ctx 0 0|2
cuGraphDestroyNode [] node
cuGraphClone [] out graph
cuGraphNodeFindInClone [] out node~INVALID_VALUE clone~INVALID_VALUE
cuGraphAddDependencies [] graph in.first in.second 0 1
cuGraphRemoveDependencies [] graph in.joined_from in.joined_to 0 1
cuGraphAddDependencies@10000 [] graph in.first in.second 1
cuGraphRemoveDependencies@10000 [] graph in.joined_from in.joined_to 1
cuGraphDebugDotPrint [] graph in.dot 0
cuGraphGetNodes,cuGraphGetRootNodes [] graph 0 out
cuGraphGetEdges [] graph 0 0 0 out
cuGraphGetEdges@10000 [] graph 0 0 out
cuGraphNodeGetDependencies,cuGraphNodeGetDependentNodes [] node 0 0 out
cuGraphNodeGetDependencies@10000,cuGraphNodeGetDependentNodes@10000 [] node 0 out
cuGraphNodeGetType [] node out
cuGraphNodeGetParams,cuGraphKernelNodeGetParams [] knode out
cuGraphKernelNodeGetParams@10000 [] knode out
cuGraphMemcpyNodeGetParams [] cnode out
cuGraphMemsetNodeGetParams [] mnode out
cuGraphBatchMemOpNodeGetParams [] bnode out
cuGraphMemAllocNodeGetParams [] anode out
cuGraphMemFreeNodeGetParams [] fnode out
cuGraphChildGraphNodeGetGraph [] gnode out
cuGraphEventRecordNodeGetEvent [] rnode out
cuGraphEventWaitNodeGetEvent [] wnode out
cuGraphNodeSetParams [] mnode in.node_params
cuGraphKernelNodeSetParams [] knode in.kernel
cuGraphKernelNodeSetParams@10000 [] knode in.kernel
cuGraphMemcpyNodeSetParams [] cnode in.copy
cuGraphMemsetNodeSetParams [] mnode in.fill
cuGraphHostNodeSetParams [] hnode in.host
cuGraphBatchMemOpNodeSetParams [] bnode in.batch
cuGraphEventRecordNodeSetEvent [] rnode event
cuGraphEventWaitNodeSetEvent [] wnode event
cuGraphGetId [] graph out
cuGraphExecGetId [] exec out
cuGraphNodeGetLocalId,cuGraphNodeGetToolsId,cuGraphNodeGetContainingGraph [] node out
cuGraphKernelNodeCopyAttributes [] knode knode
cuGraphKernelNodeGetAttribute [] knode 8|99:NOT_SUPPORTED out
cuGraphKernelNodeSetAttribute [] knode 8|99:NOT_SUPPORTED in.bytes
cuGraphHostNodeGetParams [] hnode out
cuGraphInstantiateWithFlags,cuGraphInstantiate [] out graph 0|16|4:NOT_SUPPORTED
cuGraphInstantiate@11000 [] out graph out? 0 0
cuGraphInstantiateWithParams [] out graph in.instantiate
cuGraphExecGetFlags [] exec out
cuGraphUpload,cuGraphLaunch [] exec stream
cuGraphExecDestroy [] exec
cuGraphExecUpdate [] exec graph out
cuGraphExecUpdate@10020 [] exec graph out out
cuGraphExecNodeSetParams [] exec mnode~INVALID_VALUE in.node_params
cuGraphExecKernelNodeSetParams [] exec knode~INVALID_VALUE in.kernel
cuGraphExecKernelNodeSetParams@10010 [] exec knode~INVALID_VALUE in.kernel
cuGraphExecMemcpyNodeSetParams [] exec cnode~INVALID_VALUE in.copy 0
cuGraphExecMemsetNodeSetParams [] exec mnode~INVALID_VALUE in.fill 0
cuGraphExecHostNodeSetParams [] exec hnode~INVALID_VALUE in.host
cuGraphExecBatchMemOpNodeSetParams [] exec bnode~INVALID_VALUE in.batch
cuGraphExecChildGraphNodeSetParams [] exec gnode~INVALID_VALUE graph2
cuGraphExecEventRecordNodeSetEvent [] exec rnode~INVALID_VALUE event
cuGraphExecEventWaitNodeSetEvent [] exec wnode~INVALID_VALUE event
cuGraphNodeSetEnabled [] exec knode~INVALID_VALUE 1
cuGraphNodeGetEnabled [] exec knode~INVALID_VALUE out
cuDevicePrimaryCtxRelease [f] dev
cuDevicePrimaryCtxRelease@7000 [f] dev
"""


@dataclass(frozen=True)
class Call:
    """One function of the table.

    Attributes
    ----------
    name : str
        Name of the function, with ``@VERSION`` for an older ABI.
    flags : frozenset of str
        Flags of the function.
    parameters : tuple of str
        Parameters in the notation of the table.
    expected : str
        Error code of a valid call.
    """

    name: str
    flags: frozenset[str] = frozenset()
    parameters: tuple[str, ...] = ()
    expected: str = "SUCCESS"


def calls() -> list[Call]:
    """Return all functions of the table."""
    out = []
    for line in TABLE.strip().splitlines():
        signature, _, expected = line.partition(" -> ")
        names, flags, *parameters = signature.split()
        for name in names.split(","):
            flag_set = frozenset(flags.strip("[]"))
            out.append(Call(name, flag_set, tuple(parameters), expected or "SUCCESS"))
    return out
