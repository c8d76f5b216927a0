"""The driver's node structures, each built where it is used.

The bindings' structures copy raw pointers and keep nothing alive. So each function here holds the
structure, what it points to and the values until the driver call has returned; the driver copies
during the call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graft.cudagraph.driver import call, cu
from graft.cudagraph.kernels import PackedArgs
from graft.cudagraph.memory import Span


@dataclass(frozen=True)
class Node:
    """One node of a graph.

    Attributes
    ----------
    name : str
    kind : {"kernel", "copy", "fill", "host", "child", "if", "event wait", ...}
    lane : str
    index : int
        Position in ``Graph.nodes``.
    """

    name: str
    kind: str
    lane: str
    index: int


def add_kernel(
    graph: int,
    after: list[Any],
    function: Any,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    shared: int,
    packed: PackedArgs,
    priority: int | None = None,
    programmatic: bool = False,
) -> Any:
    """Add a kernel node and return its CUgraphNode; ``programmatic`` says how it depends."""
    any_node = cu.CUgraphNodeParams()
    edges = None
    any_node.type = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
    fill_kernel(any_node.kernel, function, grid, block, shared, packed)
    if programmatic:
        edges = [cu.CUgraphEdgeData() for _ in after]
        for edge in edges:
            edge.from_port = int(cu.CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC)
            edge.type = cu.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
    node = call(cu.cuGraphAddNode, graph, after, edges, len(after), any_node)
    del packed, any_node  # not before the call has returned
    if priority is not None:
        value = cu.CUkernelNodeAttrValue()
        value.priority = priority
        which = cu.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_PRIORITY
        call(cu.cuGraphKernelNodeSetAttribute, node, which, value)
    return node


def highest_priority() -> int:
    """Return the number of the priority that runs first."""
    return int(call(cu.cuCtxGetStreamPriorityRange)[1])


def kernel_params(
    function: Any,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    shared: int,
    packed: PackedArgs,
) -> Any:
    """Return a kernel's structure; ``packed`` must live until the driver has read it."""
    params = cu.CUDA_KERNEL_NODE_PARAMS()
    fill_kernel(params, function, grid, block, shared, packed)
    return params


def fill_kernel(
    params: Any,
    function: Any,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    shared: int,
    packed: PackedArgs,
) -> None:
    """Fill a kernel's structure, or that of a node of any kind."""
    params.func = function
    params.gridDimX, params.gridDimY, params.gridDimZ = grid
    params.blockDimX, params.blockDimY, params.blockDimZ = block
    params.sharedMemBytes = shared
    params.kernelParams = packed.address


def add_copy(graph: int, after: list[Any], dst: Span, src: Span) -> Any:
    """Add a one-dimensional copy node and return its CUgraphNode."""
    params = cu.CUDA_MEMCPY3D()
    host = cu.CUmemorytype.CU_MEMORYTYPE_HOST
    device = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
    params.srcMemoryType = host if src.pinned else device
    params.dstMemoryType = host if dst.pinned else device
    if src.pinned:
        params.srcHost = src.address
    else:
        params.srcDevice = cu.CUdeviceptr(src.address)
    if dst.pinned:
        params.dstHost = dst.address
    else:
        params.dstDevice = cu.CUdeviceptr(dst.address)
    params.WidthInBytes = dst.nbytes
    params.Height = 1
    params.Depth = 1
    context = call(cu.cuCtxGetCurrent)
    return call(cu.cuGraphAddMemcpyNode, graph, after, len(after), params, context)


def add_fill(graph: int, after: list[Any], address: int, byte: int, nbytes: int) -> Any:
    """Add a node that sets bytes and return its CUgraphNode."""
    params = cu.CUDA_MEMSET_NODE_PARAMS()
    params.dst = cu.CUdeviceptr(address)
    params.value = byte
    params.elementSize = 1
    params.width = nbytes
    params.height = 1
    context = call(cu.cuCtxGetCurrent)
    return call(cu.cuGraphAddMemsetNode, graph, after, len(after), params, context)


def move_child(graph: int, after: list[Any], child: int) -> Any:
    """Add another graph itself as one node, which owns it then; return its CUgraphNode."""
    any_node = cu.CUgraphNodeParams()
    any_node.type = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_GRAPH
    any_node.graph.graph = cu.CUgraph(child)
    any_node.graph.ownership = cu.CUgraphChildGraphNodeOwnership.CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE
    return call(cu.cuGraphAddNode, graph, after, None, len(after), any_node)


def add_event(function: Any, graph: int, after: list[Any], event: int) -> Any:
    """Add a node that records an event or waits for one, by the driver's function for it."""
    return call(function, graph, after, len(after), event)


def add_conditional(
    graph: int, after: list[Any], condition: int, kind: str, bodies: int
) -> tuple[Any, list[int]]:
    """Add an "if" or "while" node; return its CUgraphNode and its bodies' CUgraphs."""
    any_node = cu.CUgraphNodeParams()
    any_node.type = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    types = cu.CUgraphConditionalNodeType
    any_node.conditional.handle = cu.CUgraphConditionalHandle(condition)
    any_node.conditional.type = getattr(types, f"CU_GRAPH_COND_TYPE_{kind.upper()}")
    any_node.conditional.size = bodies
    any_node.conditional.ctx = call(cu.cuCtxGetCurrent)
    node = call(cu.cuGraphAddNode, graph, after, None, len(after), any_node)
    return node, [int(body) for body in any_node.conditional.phGraph_out]


def add_host(graph: int, after: list[Any], function: int, data: int, spin: bool = False) -> Any:
    """Add a host node and return its CUgraphNode."""
    if spin:  # only the generic call knows how a host step waits
        any_node = cu.CUgraphNodeParams()
        any_node.type = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_HOST
        any_node.host.fn = cu.CUhostFn(function)
        any_node.host.userData = data
        any_node.host.syncMode = int(cu.CUhostTaskSyncMode.CU_HOST_TASK_SPINWAIT)
        return call(cu.cuGraphAddNode, graph, after, None, len(after), any_node)
    params = cu.CUDA_HOST_NODE_PARAMS()
    params.fn = cu.CUhostFn(function)
    params.userData = data
    node = call(cu.cuGraphAddHostNode, graph, after, len(after), params)
    del params
    return node


def add_answer_wait(graph: int, after: list[Any], address: int) -> Any:
    """Add a node that waits until a word is 1 and sets it to 0; return its CUgraphNode.

    One batch runs in the order of its array, so every replay waits for an answer of its own.
    """
    wait = cu.CUstreamBatchMemOpParams()
    reset = cu.CUstreamBatchMemOpParams()
    kinds = cu.CUstreamBatchMemOpType
    flags = cu.CUstreamWaitValue_flags
    wait.operation = kinds.CU_STREAM_MEM_OP_WAIT_VALUE_32
    wait.waitValue.operation = kinds.CU_STREAM_MEM_OP_WAIT_VALUE_32
    wait.waitValue.address = cu.CUdeviceptr(address)
    wait.waitValue.value = cu.cuuint32_t(1)
    wait.waitValue.flags = int(flags.CU_STREAM_WAIT_VALUE_EQ)
    reset.operation = kinds.CU_STREAM_MEM_OP_WRITE_VALUE_32
    reset.writeValue.operation = kinds.CU_STREAM_MEM_OP_WRITE_VALUE_32
    reset.writeValue.address = cu.CUdeviceptr(address)
    reset.writeValue.value = cu.cuuint32_t(0)
    reset.writeValue.flags = 0
    params = cu.CUDA_BATCH_MEM_OP_NODE_PARAMS()
    params.ctx = call(cu.cuCtxGetCurrent)
    params.count = 2
    params.paramArray = [wait, reset]
    params.flags = 0
    node = call(cu.cuGraphAddBatchMemOpNode, graph, after, len(after), params)
    del params, wait, reset
    return node
