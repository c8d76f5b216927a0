"""Functions that add one node to a CUgraph.

The parameter structures of ``cuda.bindings`` contain raw pointers and keep nothing alive. Each
function here therefore holds the structure, its arrays and the values until the driver call has
returned. The driver copies them during the call.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from graft.cudagraph.driver.driver import call, cu
from graft.cudagraph.driver.memory import Span
from graft.cudagraph.kernels.kernels import PackedArgs


@dataclass(frozen=True, eq=False)
class Node:
    """One node of a graph or of a conditional body, at position `index` in its `nodes`.

    `kind` is "kernel", "copy", "fill", "host", "child", "if" or another kind of node. Nodes are
    compared by identity.
    """

    name: str
    kind: str
    lane: str
    index: int


@dataclass
class Contents:
    """Nodes of a graph or body. A graph refers to the contents of its bodies, not to the bodies.

    A body refers to its graph. If the graph referred to the body as well, both would form a
    reference cycle, and the graph would not be freed as soon as the program drops it.

    Attributes
    ----------
    nodes
        Nodes in the order in which they were added.
    edges
        Pairs of node indices. The second node of a pair depends on the first one.
    handles
        CUgraphNodes by node index.
    tails
        Indices of the nodes that the lane's next node depends on, by lane name.
    programmatic
        Indices of the nodes at either end of a programmatic edge.
    inner
        Contents of the bodies of a conditional node, or of the graph of a child-graph node, by node
        index.
    """

    name: str
    nodes: list[Node] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    tails: dict[str, tuple[int, ...]] = field(default_factory=dict)
    programmatic: set[int] = field(default_factory=set)
    inner: dict[int, list[Contents]] = field(default_factory=dict)

    def owner_of(self, node: Node) -> Contents | None:
        """Return the contents, this or inner ones at any depth, that have a node; None if none."""
        if node.index < len(self.nodes) and self.nodes[node.index] is node:
            return self
        for contents in self.all_inner():
            found = contents.owner_of(node)
            if found is not None:
                return found
        return None

    def all_inner(self) -> Iterator[Contents]:
        """Iterate over the contents of the bodies and child graphs directly inside."""
        for contents in self.inner.values():
            yield from contents


class KernelLaunch(NamedTuple):
    """Parameters of a kernel node.

    `packed` owns the values of the kernel's arguments. It must live until the driver has copied
    them.
    """

    function: Any
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    packed: PackedArgs


def add_dependencies(graph: int, before: list[Any], node: Any) -> None:
    """Make an existing node depend on other existing nodes."""
    call(cu.cuGraphAddDependencies, graph, before, [node] * len(before), None, len(before))


def add_kernel(
    graph: int,
    dependencies: list[Any],
    launch: KernelLaunch,
    priority: int | None = None,
    programmatic: bool = False,
) -> Any:
    """Add a kernel node to a CUgraph and return the CUgraphNode.

    `priority` is the launch priority; None selects the priority of the stream that the graph is
    launched on. With `programmatic`, the edges from the dependencies (CUgraphNodes) use
    programmatic dependent launch.
    """
    params = _kernel_node_params()
    _set_launch(params.kernel, launch)
    edges = [_programmatic_edge() for _ in dependencies] if programmatic else None
    node = call(cu.cuGraphAddNode, graph, dependencies, edges, len(dependencies), params)
    del launch  # must live until the call has returned
    if priority is not None:
        value = cu.CUkernelNodeAttrValue()
        value.priority = priority
        attribute = cu.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_PRIORITY
        call(cu.cuGraphKernelNodeSetAttribute, node, attribute, value)
    return node


_thread_local = threading.local()


def _kernel_node_params() -> Any:
    """Return parameters of a kernel node, which the thread reuses.

    Creating a ``CUgraphNodeParams`` takes several times longer than adding a node.
    """
    params = getattr(_thread_local, "kernel_node_params", None)
    if params is None:
        params = cu.CUgraphNodeParams()
        params.type = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
        _thread_local.kernel_node_params = params
    return params


def _programmatic_edge() -> Any:
    edge = cu.CUgraphEdgeData()
    edge.from_port = int(cu.CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC)
    edge.type = cu.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
    return edge


def highest_priority() -> int:
    """Return the highest launch priority of the device, which is the lowest number."""
    return int(call(cu.cuCtxGetStreamPriorityRange)[1])


def kernel_params(launch: KernelLaunch) -> Any:
    """Return the parameters of a launch as CUDA_KERNEL_NODE_PARAMS."""
    params = cu.CUDA_KERNEL_NODE_PARAMS()
    _set_launch(params, launch)
    return params


def _set_launch(params: Any, launch: KernelLaunch) -> None:
    params.func = launch.function
    params.gridDimX, params.gridDimY, params.gridDimZ = launch.grid
    params.blockDimX, params.blockDimY, params.blockDimZ = launch.block
    params.sharedMemBytes = launch.shared
    params.kernelParams = launch.packed.address


def add_copy(graph: int, dependencies: list[Any], dst: Span, src: Span) -> Any:
    """Add a copy node of memory with the same number of rows, and return its CUgraphNode."""
    params = cu.CUDA_MEMCPY3D()
    host = cu.CUmemorytype.CU_MEMORYTYPE_HOST
    device = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
    if src.on_host:
        params.srcMemoryType = host
        params.srcHost = src.address
    else:
        params.srcMemoryType = device
        params.srcDevice = cu.CUdeviceptr(src.address)
    if dst.on_host:
        params.dstMemoryType = host
        params.dstHost = dst.address
    else:
        params.dstMemoryType = device
        params.dstDevice = cu.CUdeviceptr(dst.address)
    params.WidthInBytes = dst.nbytes // dst.rows
    params.Height = dst.rows
    if dst.rows > 1:
        params.srcPitch = src.pitch
        params.dstPitch = dst.pitch
        params.srcHeight = dst.rows
        params.dstHeight = dst.rows
    params.Depth = 1
    context = call(cu.cuCtxGetCurrent)
    return call(cu.cuGraphAddMemcpyNode, graph, dependencies, len(dependencies), params, context)


def add_fill(graph: int, dependencies: list[Any], address: int, byte: int, nbytes: int) -> Any:
    """Add a memset node that sets `nbytes` bytes to `byte`, and return its CUgraphNode."""
    params = cu.CUDA_MEMSET_NODE_PARAMS()
    params.dst = cu.CUdeviceptr(address)
    params.value = byte
    params.elementSize = 1
    params.width = nbytes
    params.height = 1
    context = call(cu.cuCtxGetCurrent)
    return call(cu.cuGraphAddMemsetNode, graph, dependencies, len(dependencies), params, context)


def move_child(graph: int, dependencies: list[Any], child: int) -> Any:
    """Add a child-graph node, to which ownership of `child` moves, and return its CUgraphNode."""
    params = cu.CUgraphNodeParams()
    params.type = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_GRAPH
    params.graph.graph = cu.CUgraph(child)
    params.graph.ownership = cu.CUgraphChildGraphNodeOwnership.CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE
    return call(cu.cuGraphAddNode, graph, dependencies, None, len(dependencies), params)


def add_event(function: Any, graph: int, dependencies: list[Any], event: int) -> Any:
    """Add an event node with cuGraphAddEventRecordNode or cuGraphAddEventWaitNode (`function`)."""
    return call(function, graph, dependencies, len(dependencies), event)


def add_conditional(
    graph: int, dependencies: list[Any], condition: int, kind: str, bodies: int
) -> tuple[Any, list[int]]:
    """Add a conditional node to a CUgraph; return the node and the CUgraphs of its bodies.

    `kind` is "if", "while" or "switch". The dependencies are CUgraphNodes, `condition` is the
    handle of the condition, and `bodies` is the number of bodies.
    """
    params = cu.CUgraphNodeParams()
    params.type = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    types = cu.CUgraphConditionalNodeType
    params.conditional.handle = cu.CUgraphConditionalHandle(condition)
    params.conditional.type = getattr(types, f"CU_GRAPH_COND_TYPE_{kind.upper()}")
    params.conditional.size = bodies
    params.conditional.ctx = call(cu.cuCtxGetCurrent)
    node = call(cu.cuGraphAddNode, graph, dependencies, None, len(dependencies), params)
    return node, [int(body) for body in params.conditional.phGraph_out]


def add_host(
    graph: int, dependencies: list[Any], function: int, data: int, spin: bool = False
) -> Any:
    """Add a host node to a CUgraph and return its CUgraphNode.

    `function` and `data` are the addresses of the C function and of its argument. With `spin`, the
    driver's thread spins until the node may run.
    """
    if spin:  # only cuGraphAddNode accepts a synchronization mode
        params = cu.CUgraphNodeParams()
        params.type = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_HOST
        params.host.fn = cu.CUhostFn(function)
        params.host.userData = data
        params.host.syncMode = int(cu.CUhostTaskSyncMode.CU_HOST_TASK_SPINWAIT)
        return call(cu.cuGraphAddNode, graph, dependencies, None, len(dependencies), params)
    params = cu.CUDA_HOST_NODE_PARAMS()
    params.fn = cu.CUhostFn(function)
    params.userData = data
    return call(cu.cuGraphAddHostNode, graph, dependencies, len(dependencies), params)


def add_mailbox_wait(graph: int, dependencies: list[Any], address: int) -> Any:
    """Add a batch memory operation node that waits until the 32-bit word at `address` is 1."""
    wait = cu.CUstreamBatchMemOpParams()
    kinds = cu.CUstreamBatchMemOpType
    flags = cu.CUstreamWaitValue_flags
    wait.operation = kinds.CU_STREAM_MEM_OP_WAIT_VALUE_32
    wait.waitValue.operation = kinds.CU_STREAM_MEM_OP_WAIT_VALUE_32
    wait.waitValue.address = cu.CUdeviceptr(address)
    wait.waitValue.value = cu.cuuint32_t(1)
    wait.waitValue.flags = int(flags.CU_STREAM_WAIT_VALUE_EQ)
    params = cu.CUDA_BATCH_MEM_OP_NODE_PARAMS()
    params.ctx = call(cu.cuCtxGetCurrent)
    params.count = 1
    params.paramArray = [wait]
    params.flags = 0
    node = call(cu.cuGraphAddBatchMemOpNode, graph, dependencies, len(dependencies), params)
    del params, wait  # must live until the call has returned
    return node
