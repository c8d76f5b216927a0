"""Graphs of other libraries: their CUgraph, nodes and edges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from graft.cudagraph.driver.driver import call, cu
from graft.cudagraph.errors import OptionError

#: Kinds of graft's nodes by the end of the name of a CUgraphNodeType.
KINDS = {
    "KERNEL": "kernel",
    "MEMCPY": "copy",
    "MEMSET": "fill",
    "HOST": "host",
    "GRAPH": "child",
    "EMPTY": "empty",
    "WAIT_EVENT": "event wait",
    "EVENT_RECORD": "event record",
    "MEM_ALLOC": "allocation",
    "MEM_FREE": "free",
    "BATCH_MEM_OP": "memory operation",
    "CONDITIONAL": "conditional",
}


class ForeignNode(NamedTuple):
    """A node of a CUgraph: its CUgraphNode, and its name and kind for drawings."""

    handle: Any
    name: str
    kind: str


def graph_handle(captured: Any) -> tuple[int, bool]:
    """Return the CUgraph of a graph, and whether its ownership passes to graft.

    OptionError is raised if the object is not a graph that ``Graph.from_capture`` accepts, or if
    the graph is not complete.
    """
    if isinstance(captured, int | cu.CUgraph) and not isinstance(captured, bool):
        handle = int(captured)
        if handle > 0:
            return handle, True
    found = None
    try:
        if hasattr(captured, "raw_cuda_graph"):  # torch
            found = captured.raw_cuda_graph()
        elif hasattr(captured, "graph_definition"):  # a builder of cuda.core
            found = captured.graph_definition.handle
        elif type(captured).__name__ == "GraphDefinition":  # cuda.core
            found = captured.handle
        elif type(captured).__name__ == "Graph" and hasattr(captured, "graphExec"):  # CuPy
            found = captured.graph
    except RuntimeError as error:
        raise OptionError(f"from_capture(): {captured!r} gives no graph: {error}") from error
    if found is None or int(found) == 0:
        raise OptionError(
            "from_capture() needs a GraphDefinition or a finished GraphBuilder of cuda.core, a "
            "Graph of CuPy, a CUDAGraph of torch created with keep_graph=True, or a CUgraph of "
            f"cuda.bindings or its handle as an int, not {captured!r}"
        )
    return int(found), False


def read_nodes(graph: int) -> tuple[list[ForeignNode], list[tuple[int, int]]]:
    """Return the nodes of a CUgraph, and its edges as pairs of node indices."""
    count = call(cu.cuGraphGetNodes, graph, 0)[1]
    handles = call(cu.cuGraphGetNodes, graph, count)[0] if count else []
    index = {int(handle): i for i, handle in enumerate(handles)}
    edge_count = call(cu.cuGraphGetEdges, graph, 0)[-1]
    starts: Sequence[Any] = ()
    ends: Sequence[Any] = ()
    if edge_count:
        starts, ends = call(cu.cuGraphGetEdges, graph, edge_count)[:2]
    edges = [(index[int(a)], index[int(b)]) for a, b in zip(starts, ends, strict=True)]
    nodes = []
    for handle in handles:
        node_type = call(cu.cuGraphNodeGetType, handle).name.rpartition("TYPE_")[2]
        kind = KINDS.get(node_type, node_type.lower().replace("_", " "))
        name = _kernel_name(handle) if kind == "kernel" else kind
        nodes.append(ForeignNode(handle, name, kind))
    return nodes, edges


def _kernel_name(node: Any) -> str:
    """Return the name of a kernel node's function, or "kernel" if the driver does not report it."""
    code, params = cu.cuGraphKernelNodeGetParams(node)
    if int(code) != 0:
        return "kernel"
    if int(params.func):
        code, name = cu.cuFuncGetName(params.func)
    else:
        code, name = cu.cuKernelGetName(params.kern)
    return name.decode() if int(code) == 0 and name else "kernel"
