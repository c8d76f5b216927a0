"""IF, WHILE and SWITCH nodes: bodies that run when a kernel says so.

A :class:`Condition` is a number that kernels set with ``cudaGraphSetConditional(handle, value)``
(``#include "conditional.cuh"``; pass the condition as an ``unsigned long long`` argument). The
driver allows kernels, copies, fills, child graphs and further conditionals in a body: whatever
meets the host is refused here when it is added, by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from graft.cudagraph import nodes
from graft.cudagraph.driver import call, cu
from graft.cudagraph.errors import OptionError
from graft.cudagraph.graph import Graph

if TYPE_CHECKING:
    from graft.cudagraph.exec import GraphExec

__all__ = ["Condition", "GraphBody", "add_conditional", "make_condition"]

#: Kinds of nodes that the driver allows in a body, at any depth.
ALLOWED = frozenset({"kernel", "copy", "fill", "child", "if", "while", "switch"})


class Condition(int):
    """The handle of one conditional node; an argument for kernels that decide.

    Attributes
    ----------
    name : str
    used : bool
        Does it steer a node yet?
    """

    name: str
    used: bool
    owner: int


class GraphBody(Graph):
    """The graph inside a conditional node: lanes as in any graph, within what the driver allows.

    Everything its nodes use lives as long as the graph around it.
    """

    def __init__(self, root: Graph, name: str, handle: int) -> None:
        # The driver owns the body; the root owns the records of its nodes.
        self._init_definition(root.device, name, root.status, root.state)
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
            below = inner.child_at(node.index) if inner is not None else None
            self.refuse(node.kind, f"{name}/{node.name}", below)

    def condition(self, default: int | None = None, *, name: str = "condition") -> Condition:
        """Make a condition for a conditional inside this body."""
        return self.root.condition(default, name=name)

    def instantiate(self, *, priorities: bool = False) -> GraphExec:
        """Refused: the graph around it is what runs."""
        raise OptionError(f"{self.name!r} is the body of a conditional and runs with its graph")

    def clone(self, name: str | None = None) -> Graph:
        """Refused: the driver copies no conditionals."""
        raise OptionError(f"{self.name!r} is the body of a conditional and cannot be cloned")

    def close(self) -> None:
        """Do nothing: the body goes with its graph."""


def make_condition(graph: Graph, default: int | None, name: str) -> Condition:
    """Create a condition for one conditional of ``graph`` or of a body in it."""
    if default is not None and not 0 <= default < 1 << 32:
        raise OptionError(f"the default of condition {name!r} must be 0 to 2**32 - 1: {default!r}")
    context = call(cu.cuCtxGetCurrent)
    flags = 0 if default is None else int(cu.CU_GRAPH_COND_ASSIGN_DEFAULT)
    with graph.editing() as handle:
        made = call(cu.cuGraphConditionalHandleCreate, handle, context, default or 0, flags)
    condition = Condition(int(made))
    condition.name, condition.used, condition.owner = name, False, graph.handle
    return condition


def add_conditional(
    graph: Graph, lane: str, kind: str, condition: Condition, bodies: int, name: str
) -> list[GraphBody]:
    """Add an IF (one or two bodies), WHILE or SWITCH (any number) node to a lane."""
    root = graph.root if isinstance(graph, GraphBody) else graph
    if not isinstance(condition, Condition):
        raise OptionError(f"{kind} {name!r} needs a condition made by Graph.condition()")
    if condition.owner != root.handle or condition.used:
        raise OptionError(
            f"condition {condition.name!r} "
            + ("steers a node already" if condition.used else f"is not of graph {root.name!r}")
        )
    handles: list[int] = []

    def make(handle: int, after: list[Any], _: tuple) -> Any:
        node, made = nodes.add_conditional(handle, after, int(condition), kind, bodies)
        handles.extend(made)
        return node

    attach: Callable[[int], tuple] = graph.keep(())
    graph.add(kind, name, lane, attach, make)
    condition.used = True
    if kind == "switch":
        titles = [f"{name}/{case}" for case in range(bodies)]
    else:
        titles = [name, f"{name}/else"][:bodies]
    return [GraphBody(root, t, h) for t, h in zip(titles, handles, strict=True)]
