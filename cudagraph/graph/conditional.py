"""Conditional nodes: IF, WHILE and SWITCH nodes, whose bodies run depending on a condition.

A condition is a 32-bit value on the device. A kernel sets it with
``cudaGraphSetConditional(handle, value)`` (``#include "conditional.cuh"``). The handle is a
:class:`Condition`, which is passed to the kernel as an ``unsigned long long`` argument.

The driver allows kernels, copies, fills, child graphs and nested conditionals in a body. Adding a
node of another kind, such as a host node, raises :class:`OptionError`. Host work can be added with
:meth:`GraphLane.spinkernel`, which uses kernels only.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np

from graft.cudagraph.driver.context import Context
from graft.cudagraph.driver.driver import call, cu
from graft.cudagraph.driver.memory import OUT_OF_MEMORY
from graft.cudagraph.errors import DeviceError, OptionError
from graft.cudagraph.graph import nodes
from graft.cudagraph.graph.graph import (
    Attached,
    Graph,
    GraphBase,
    GraphBody,
    GraphLane,
    keep_owners,
)
from graft.cudagraph.kernels.kernels import load
from graft.native import _native

LOG = logging.getLogger("graft")

CONDITION_LIMIT = 1 << 32
#: Maximum number of bodies of a SWITCH node. It catches calls that pass something else by mistake.
MAX_BODIES = 1 << 16
_WAITING_KERNEL = Path(__file__).parents[1] / "kernels" / "waiting.cu"
#: Whether the driver accepts programmatic edges in bodies; None if it is not known yet.
_programmatic_bodies: bool | None = None


class Condition(int):
    """Handle of a condition that belongs to the CUgraph `graph_handle`.

    Kernels that set the condition receive it as an ``unsigned long long`` argument.
    """

    name: str
    graph_handle: int


def condition(
    graph: GraphBase, default: int | None = None, *, name: str = "condition"
) -> Condition:
    """Create a condition for one conditional node in `graph` or in a body inside it.

    `default` is the value of the condition at the start of each replay. If it is None, the value is
    undefined until a kernel of the replay sets it, which must happen before the conditional node.
    """
    if default is not None and not (
        isinstance(default, int | np.integer) and 0 <= default < CONDITION_LIMIT
    ):
        raise OptionError(f"the default of condition {name!r} must be 0 to 2**32 - 1: {default!r}")
    if not isinstance(graph, GraphBase):
        raise OptionError(f"condition {name!r} needs a graph or the body of one, not {graph!r}")
    root = graph.root
    root.check_editable(f"condition {name!r}")
    context = call(cu.cuCtxGetCurrent)
    flags = 0 if default is None else int(cu.CU_GRAPH_COND_ASSIGN_DEFAULT)
    with root.editing() as graph_handle:
        handle = call(cu.cuGraphConditionalHandleCreate, graph_handle, context, default or 0, flags)
        out = Condition(int(handle))
        out.name = name
        out.graph_handle = graph_handle
        root.unused_conditions[out] = name
    return out


def if_(lane: GraphLane, condition: Condition, *, name: str = "if") -> GraphBody:
    """Add an IF node and return its body, which runs if the condition is not 0."""
    [body] = _add_conditional(lane, "if", condition, [name])
    return body


def if_else(
    lane: GraphLane, condition: Condition, *, name: str = "if"
) -> tuple[GraphBody, GraphBody]:
    """Add an IF node and return its two bodies; the second one runs if the condition is 0."""
    then, otherwise = _add_conditional(lane, "if", condition, [name, f"{name}/else"])
    return then, otherwise


def while_(lane: GraphLane, condition: Condition, *, name: str = "while") -> GraphBody:
    """Add a WHILE node and return its body, which runs as long as the condition is not 0."""
    [body] = _add_conditional(lane, "while", condition, [name])
    return body


def switch_(
    lane: GraphLane, condition: Condition, count: int, *, name: str = "switch"
) -> list[GraphBody]:
    """Add a SWITCH node and return its `count` bodies. Requires CUDA 12.8.

    The body runs whose index is the value of the condition. If the value is `count` or more, no
    body runs.
    """
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_BODIES:
        raise OptionError(
            f"switch {name!r} needs a number of bodies from 1 to {MAX_BODIES}, not {count!r}"
        )
    return _add_conditional(lane, "switch", condition, [f"{name}/{i}" for i in range(count)], name)


def _add_conditional(
    lane: GraphLane, kind: str, condition: Condition, body_names: list[str], name: str = ""
) -> list[GraphBody]:
    name = name or body_names[0]
    if not isinstance(lane, GraphLane):
        raise OptionError(f"{kind} {name!r} needs a lane of a graph, not {lane!r}")
    graph = lane.graph
    root = graph.root
    if not isinstance(condition, Condition):
        raise OptionError(f"{kind} {name!r} needs a condition made by condition()")
    if condition.graph_handle != root.handle:
        raise OptionError(f"condition {condition.name!r} does not belong to graph {root.name!r}")
    if condition not in root.unused_conditions:
        raise OptionError(
            f"condition {condition.name!r} already controls a conditional node; create another one"
        )
    body_handles: list[int] = []
    programmatic = root.programmatic and _accepts_programmatic_bodies(root.context)

    def make(handle: int, dependencies: list[Any], _: Attached) -> Any:
        node, handles = nodes.add_conditional(
            handle, dependencies, int(condition), kind, len(body_names)
        )
        body_handles.extend(handles)
        return node

    node = graph.add(kind, name, lane.name, keep_owners(()), make)
    del root.unused_conditions[condition]
    bodies = [
        GraphBody(root, body_name, handle, programmatic=programmatic)
        for body_name, handle in zip(body_names, body_handles, strict=True)
    ]
    graph.contents.inner[node.index] = [body.contents for body in bodies]
    return bodies


def _accepts_programmatic_bodies(context: Context) -> bool:
    """Return whether the driver accepts programmatic edges in the bodies of IF and WHILE nodes.

    CUDA's documentation does not say whether it does. The first call therefore instantiates a graph
    with such an edge.
    """
    global _programmatic_bodies
    if _programmatic_bodies is None:
        kernel = load(context, _WAITING_KERNEL)["wait_only"]
        graph = Graph(context, "graph with a programmatic edge in a body", programmatic=True)
        _programmatic_bodies = True  # so that if_() below gives the body programmatic edges
        accepted = None
        try:
            lane = if_(graph.lane("main"), condition(graph, 0)).lane("main")
            lane.kernel(kernel, 1, 1, [])
            lane.kernel(kernel, 1, 1, [])
            graph.instantiate().close()
            accepted = True
        except DeviceError as error:
            if _native.is_context_fault(error.code) or error.code == OUT_OF_MEMORY:
                raise
            accepted = False
            LOG.warning(
                "kernels in the bodies of conditionals do not overlap, because the driver refuses "
                "programmatic edges there: %s",
                error,
            )
        finally:
            _programmatic_bodies = accepted
            graph.close()
    return bool(_programmatic_bodies)
