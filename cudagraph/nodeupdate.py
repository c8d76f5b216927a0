"""Changing single nodes of an executable.

The driver copies the new parameters; what they refer to is kept by the executable until launches
that use it have ended. The driver takes no ownership here, unlike in a whole-graph update, so
replaced operands wait in a list that is emptied whenever the executable is seen idle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from graft.cudagraph import nodes
from graft.cudagraph.errors import OptionError
from graft.cudagraph.lanes import check_copy, check_launch

if TYPE_CHECKING:
    from graft.cudagraph.graph import Graph, Node
    from graft.cudagraph.kernels import Kernel
    from graft.cudagraph.lanes import Array, Dims

__all__ = ["Kept", "find_node", "kernel_change", "set_copy"]

KERNEL, COPY, FILL, EVENT_RECORD, EVENT_WAIT = range(5)
#: Replaced operand sets that may wait for launches in flight before an update waits for these.
WAITING = 256

#: What performs a change: (kind, node handle, address of the structure).
Setter = Callable[[int, int, int], None]


class Kept:
    """Operands of changed nodes: the present ones by node, and those that were replaced."""

    def __init__(self) -> None:
        self.present: dict[int, object] = {}
        self.replaced: list[object] = []

    def put(
        self, node: int, owners: object, idle: Callable[[], bool], wait: Callable[[], None]
    ) -> None:
        """Hold a node's new operands; let go of replaced ones that nothing can use."""
        if node in self.present:
            self.replaced.append(self.present[node])
        self.present[node] = owners
        if self.replaced and idle():
            self.replaced.clear()
        elif len(self.replaced) > WAITING:
            wait()
            self.replaced.clear()


def find_node(graph: Graph | None, node: Node | str, what: str, kinds: tuple[str, ...]) -> int:
    """Return the CUgraphNode of a node, by name or as listed by its definition.

    Raises
    ------
    OptionError
        The definition is gone, there is no such node or several, or it is of another kind.
    """
    if graph is None:
        raise OptionError(f"cannot {what}: the definition was dropped, and names the nodes")
    if isinstance(node, str):
        found = [n for n in graph.nodes if n.name == node]
        if len(found) != 1:
            raise OptionError(f"graph {graph.name!r} has {len(found)} nodes called {node!r}")
        node = found[0]
    if node.index >= len(graph.nodes) or graph.nodes[node.index] != node:
        raise OptionError(f"{node} is no node of graph {graph.name!r}")
    if node.kind not in kinds:
        raise OptionError(
            f"cannot {what} {node.kind} node {node.name!r} of graph {graph.name!r}: the driver "
            f"does so for {', '.join(kinds)} nodes only"
        )
    return graph.node_handle(node.index)


def kernel_change(
    kernel: Kernel, grid: Dims, block: Dims, args: Iterable[object], shared: int
) -> tuple[Any, object, object]:
    """Return (structure, what must live during the call, what must live while it can run)."""
    dims = check_launch(kernel, grid, block, shared)
    packed = kernel.pack(args)
    kernel.allow_shared(shared)
    return nodes.kernel_params(kernel.function, *dims, shared, packed), packed, packed.owners


def set_copy(dst: Array, src: Array) -> tuple[Any, object]:
    """Return (structure, what must live while it can run)."""
    to, source = check_copy(dst, src)
    return nodes.copy_params(to, source), (to.owner, source.owner)
