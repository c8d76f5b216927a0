"""Graphs inside graphs, and copies of graphs.

The driver's own copies share the records of host steps, whose runs are then counted together and
which may run at the same time. So graft builds a definition again, node by node, wherever it needs
a second one: every copy has records, replay numbers and failures of its own. The copy that becomes
a child graph reports to its parent. What cannot be copied can still be moved: the child then is the
parent's node, records and all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graft.cudagraph import nodes
from graft.cudagraph.driver import call, cu
from graft.cudagraph.errors import OptionError
from graft.native import _native

if TYPE_CHECKING:
    from graft.cudagraph.graph import Graph
    from graft.cudagraph.graphlane import GraphLane

__all__ = ["Recipe", "add_moved", "can_move", "captured_handle", "child_maker", "rebuild"]

#: The driver that can move a graph into another one: CUDA 12.9.
MOVES_SINCE = 12090


@dataclass(frozen=True)
class Recipe:
    """How a node was added: a lane's method with its arguments, and the nodes it depends on."""

    method: str
    args: tuple[Any, ...]
    options: dict[str, Any]
    depends: tuple[int, ...]


def rebuild(source: Graph, target: Graph, why: str) -> None:
    """Add every node of ``source`` to the empty graph ``target``.

    Kernel arguments that are the source's ``status`` become the target's.

    Raises
    ------
    OptionError
        A node cannot be built a second time; names it and ``why`` that was needed.
    """
    recipes = source.recipes()
    for node, recipe in zip(source.nodes, recipes, strict=True):
        if recipe is None:
            raise OptionError(
                f"graph {source.name!r} cannot be {why}: its {node.kind} node {node.name!r} "
                + (
                    "is a conditional, of which the driver allows no copies"
                    if node.kind in ("if", "while", "switch")
                    else "cannot be built a second time"
                )
            )
    for node, recipe in zip(source.nodes, recipes, strict=True):
        assert recipe is not None
        lane = target.lane(node.lane)
        target.depend(node.lane, recipe.depends)
        args = [_swap(arg, source, target) for arg in recipe.args]
        getattr(lane, recipe.method)(*args, **recipe.options, name=node.name)


def _swap(value: Any, source: Graph, target: Graph) -> Any:
    if value is source.status:
        return target.status
    if isinstance(value, tuple):
        return tuple(_swap(item, source, target) for item in value)
    return value


def can_move() -> bool:
    """Return whether driver and bindings can move a graph into another one."""
    known = hasattr(cu, "CUgraphChildGraphNodeOwnership")
    return known and int(call(cu.cuDriverGetVersion)) >= MOVES_SINCE


def add_moved(lane: GraphLane, child: Graph, name: str) -> None:
    """Do what GraphLane.child says of ``move``."""
    parent = lane.graph
    if child.records == parent.records or child.executable is not None:
        why = "has an open executable" if child.executable is not None else "holds that graph"
        raise OptionError(f"graph {child.name!r} cannot be moved into {parent.name!r}: it {why}")
    if not can_move():
        lane.child(child, name=name)
        child.give_away(parent, None)
        return
    child.settle()

    def make(graph: int, after: list[Any], _: tuple) -> Any:
        return nodes.move_child(graph, after, child.handle)

    with child.editing(), parent.editing():
        # The child's kernels read its status, which tells of the parent's failures from now on.
        index = parent.add("child", name, lane.name, parent.keep((child.status.owner,)), make)
        child.give_away(parent, index)


def captured_handle(child: object) -> int:
    """Return the CUgraph of a captured graph: a handle, or an object of CuPy's or torch's."""
    for name in ("graph", "raw_cuda_graph"):
        value = getattr(child, name, None)
        if value is not None:
            child = value() if callable(value) else value
            break
    if type(child).__name__ == "CUgraph" or isinstance(child, int):
        handle = int(child)  # type: ignore[call-overload]
        if handle != 0:
            return handle
    raise OptionError(f"{child!r} is no graph: pass a Graph or the CUgraph of a finished capture")


def child_maker(
    parent: Graph, child: Graph | object, name: str
) -> tuple[Callable[[int, list[Any], tuple], Any], object]:
    """Return what adds the child's node, and what the recipe keeps of it (None: not again)."""
    from graft.cudagraph.graph import Graph

    if isinstance(child, Graph):
        part = Graph(parent.device, f"{parent.name}/{name}", part_of=parent)
        rebuild(child, part, "a child graph")

        def make(graph: int, after: list[Any], _: tuple) -> Any:
            node = nodes.add_child(graph, after, part.handle)
            part.release()  # the driver has copied it, with its references
            return node

        return make, part
    handle = captured_handle(child)
    if not _native.link_captured(handle, parent.state):
        raise OptionError(
            f"a captured graph with host work cannot join {parent.name!r}: it is part of another "
            "graph, and its host steps would belong to both; capture it again"
        )

    def make_captured(graph: int, after: list[Any], _: tuple) -> Any:
        return nodes.add_child(graph, after, handle)

    return make_captured, None
