"""IF and WHILE nodes: bodies that run when a kernel says so.

A :class:`Condition` is a number that kernels set with ``cudaGraphSetConditional(handle, value)``
(``#include "conditional.cuh"``; pass the condition as an ``unsigned long long`` argument). The
driver allows kernels, copies, fills, child graphs and further conditionals in a body: whatever
meets the host is refused here when it is added, by name.
"""

from __future__ import annotations

from typing import Any

from graft.cudagraph import nodes
from graft.cudagraph.driver import call, cu
from graft.cudagraph.errors import OptionError
from graft.cudagraph.graph import Graph, GraphExec, GraphLane, keep

#: Kinds of nodes that the driver allows in a body, at any depth.
ALLOWED = frozenset({"kernel", "copy", "fill", "child", "if", "while"})


class Condition(int):
    """The handle of one conditional node; an argument for kernels that decide."""

    name: str
    owner: int


def condition(graph: Graph, default: int | None = None, *, name: str = "condition") -> Condition:
    """Make the condition of one conditional node in a graph or in a body of it.

    ``default`` is its value when a replay begins; without it, what the last replay left.
    """
    if default is not None and not 0 <= default < 1 << 32:
        raise OptionError(f"the default of condition {name!r} must be 0 to 2**32 - 1: {default!r}")
    root = graph.root
    context = call(cu.cuCtxGetCurrent)
    flags = 0 if default is None else int(cu.CU_GRAPH_COND_ASSIGN_DEFAULT)
    with root.editing() as handle:
        made = call(cu.cuGraphConditionalHandleCreate, handle, context, default or 0, flags)
        out = Condition(int(made))
        out.name = name
        out.owner = handle
        root.unused_conditions[out] = name
    return out


def if_(lane: GraphLane, condition: Condition, *, name: str = "if") -> GraphBody:
    """Add an IF node and return its body, which runs when the condition is not 0."""
    return _add(lane, "if", condition, 1, name)[0]


def if_else(
    lane: GraphLane, condition: Condition, *, name: str = "if"
) -> tuple[GraphBody, GraphBody]:
    """Add an IF node with two bodies; the second runs when the condition is 0."""
    then, otherwise = _add(lane, "if", condition, 2, name)
    return then, otherwise


def while_(lane: GraphLane, condition: Condition, *, name: str = "while") -> GraphBody:
    """Add a WHILE node and return its body, which runs as long as the condition is not 0."""
    return _add(lane, "while", condition, 1, name)[0]


class GraphBody(Graph):
    """The graph inside a conditional node: lanes as in any graph, within what the driver allows.

    Everything its nodes use lives as long as the graph around it.
    """

    def __init__(self, root: Graph, name: str, handle: int) -> None:
        # The driver owns the body; the root owns the records of its nodes.
        self._begin(root.context, name, root.status, root.state)
        self._root = root
        self._body = handle

    @property
    def root(self) -> Graph:
        """The graph around the conditional."""
        return self._root

    @property
    def handle(self) -> int:
        """The CUgraph of the body as an integer."""
        self.root.handle  # noqa: B018  (raises when the graph is closed)
        return self._body

    @property
    def records(self) -> int:
        """The CUgraph that keeps what the nodes use."""
        return self.root.handle

    def refuse(self, kind: str, name: str, inner: Graph | None = None) -> None:
        """Raise OptionError for a node that may not stand in a body."""
        if kind not in ALLOWED:
            raise OptionError(
                f"{kind} node {name!r} cannot stand in the conditional {self.name!r}: the driver "
                "allows kernels, copies, fills, child graphs and conditionals there"
            )
        for node in inner.nodes if inner is not None else ():
            below = inner.children.get(node.index) if inner is not None else None
            self.refuse(node.kind, f"{name}/{node.name}", below)

    def instantiate(self, *, priorities: bool = False) -> GraphExec:
        """Refused: the graph around it is what runs."""
        raise OptionError(f"{self.name!r} is the body of a conditional and runs with its graph")

    def close(self) -> None:
        """Do nothing: the body goes with its graph."""


def _add(
    lane: GraphLane, kind: str, condition: Condition, bodies: int, name: str
) -> list[GraphBody]:
    graph = lane.graph
    root = lane.graph.root
    if not isinstance(condition, Condition):
        raise OptionError(f"{kind} {name!r} needs a condition made by condition()")
    if condition.owner != root.handle:
        raise OptionError(f"condition {condition.name!r} is not of graph {root.name!r}")
    if condition not in root.unused_conditions:
        raise OptionError(f"condition {condition.name!r} steers a node already")
    handles: list[int] = []

    def make(handle: int, after: list[Any], _: tuple) -> Any:
        node, made = nodes.add_conditional(handle, after, int(condition), kind, bodies)
        handles.extend(made)
        return node

    graph.add(kind, name, lane.name, keep(()), make)
    del root.unused_conditions[condition]
    titles = (name, f"{name}/else")
    return [GraphBody(root, t, h) for t, h in zip(titles, handles, strict=False)]
