"""Graphs, built explicitly node by node, never by capture.

Lifetime: whatever a node's address or handle belongs to is kept by a CUDA user object that is
retained on the graph before the node is added. It lives with the definition, its executable and
launches in flight, and dies with the last of them; nothing is freed by hand.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graft.cudagraph import drawing
from graft.cudagraph.cells import Cell
from graft.cudagraph.children import Recipe, rebuild
from graft.cudagraph.driver import call, check_code, cu, enter
from graft.cudagraph.errors import OptionError
from graft.cudagraph.exec import GraphExec
from graft.cudagraph.graphlane import Again, GraphLane, GraphMark
from graft.cudagraph.mailbox import MailboxWorker
from graft.cudagraph.memory import PinnedArray
from graft.native import _native

if TYPE_CHECKING:
    from graft.cudagraph.conditional import Condition
    from graft.cudagraph.device import Device

__all__ = ["Graph", "GraphExec", "GraphLane", "GraphMark", "Node"]

STATUS_WORDS = 16


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


class Graph:
    """A graph definition.

    Parameters
    ----------
    device : Device
    name : str
        Name for errors and drawings.

    Attributes
    ----------
    nodes : list of Node
    edges : list of (int, int)
        Node indices, from and to.
    status : PinnedArray
        int32 [16]: word 0 is 0, or why a replay failed (1 a Python host step raised, 2 a native
        one failed, 3 the interpreter is ending, 4 a mailbox missed its deadline), word 1 the number
        of that replay. It stays set until ``GraphExec.clear()``; kernels that must do nothing in a
        failed replay read it.
    """

    _resource: _native.Resource | None

    def __init__(
        self, device: Device, name: str = "graph", *, part_of: Graph | None = None
    ) -> None:
        if part_of is None:
            status = device.pinned((STATUS_WORDS,), "int32")
            self._init_definition(device, name, status, _native.GraphState(status.host_ptr))
        else:  # a child graph: its host steps count and fail with the parent's
            self._init_definition(device, name, part_of.status, part_of.state)
        handle = int(call(cu.cuGraphCreate, 0))
        self._resource = _native.Resource(_native.ResourceKind.GRAPH, handle)

    def _init_definition(
        self, device: Device, name: str, status: PinnedArray, state: _native.GraphState
    ) -> None:
        self.device = device
        self.name = name
        self.nodes: list[Node] = []
        self.edges: list[tuple[int, int]] = []
        self.status, self.state = status, state
        self._resource = None
        self._conditions: list[Condition] = []
        self.cells: list[Cell] = []
        # Lane name -> nodes that its next node depends on. Lanes are handles on this, so that a
        # graph is freed as soon as it is dropped, with no reference cycle to be collected.
        self._ends: dict[str, tuple[int, ...]] = {}
        self._handles: list[Any] = []
        self._recipes: dict[int, Recipe] = {}
        self._worker: MailboxWorker | None = None
        self._lent: list[PinnedArray] = []  # status words of moved children
        self._moved_into: str | None = None
        self._moved: dict[int, Graph] = {}  # child graphs that became nodes, by index
        # Serialises edits of the definition; never held while waiting for host work.
        self._lock = threading.RLock()
        self._exec: weakref.ref[GraphExec] | None = None

    @property
    def handle(self) -> int:
        """The CUgraph as an integer."""
        if self._moved_into is not None:
            raise OptionError(f"graph {self.name!r} was moved into {self._moved_into!r}")
        if self._resource is None:
            raise OptionError(f"graph {self.name!r} is closed")
        return self._resource.handle

    @property
    def records(self) -> int:
        """The CUgraph that keeps what the nodes use."""
        return self.handle

    def refuse(self, kind: str, name: str, inner: Graph | None = None) -> None:
        """Raise for a node that may not stand here; every kind may stand in a whole graph."""

    def lane(self, name: str) -> GraphLane:
        """Return the lane of this name; it begins at the start of the graph."""
        with self._lock:
            self._ends.setdefault(name, ())
        return GraphLane(self, name)

    @property
    def lanes(self) -> list[str]:
        """Names of the lanes, in the order they were made."""
        return list(self._ends)

    @contextlib.contextmanager
    def editing(self) -> Iterator[int]:
        """Hold the definition as it is, and give its handle."""
        with self._lock:
            yield self.handle

    def node_index(self, handle: int) -> int | None:
        """Return the index of the node with this CUgraphNode handle."""
        for index, node in enumerate(self._handles):
            if int(node) == handle:
                return index
        return None

    def node_handle(self, index: int) -> int:
        """Return the CUgraphNode of a node as an integer."""
        if self._moved_into is None:
            self.handle  # noqa: B018  (raises when the graph is closed)
        return int(self._handles[index])

    def cell(self, value: object = None, *, name: str = "cell") -> Cell:
        """Make a payload that changes between replays, for host steps of this graph."""
        made = Cell(self, value, name)
        self.cells.append(made)
        return made

    def add(
        self,
        kind: str,
        name: str,
        lane: str,
        attach: Callable[[int], tuple],
        make: Callable[[int, list[Any], tuple], Any],
        again: Again | None = None,
    ) -> int:
        """Add one node: attach what it needs, then make it, undoing the first if that fails.

        Used by lanes. ``attach(graph)`` returns (code, api, user object, ...); ``make(graph,
        dependencies, attached)`` makes the driver's node. ``again`` is the lane's method, arguments
        and options that add such a node to another graph; without it the graph has no copies.
        Returns the node's index.
        """
        self.refuse(kind, name)
        with self.editing() as graph:
            enter("cuGraphAddNode")
            depends = self._ends[lane]
            keeper = self.records
            attached = attach(keeper)
            code, api, user_object = attached[:3]
            check_code(api, code)
            try:
                node = make(graph, [self._handles[i] for i in depends], attached)
            except BaseException:
                _native.detach(keeper, user_object)
                raise
            index = len(self.nodes)
            self._handles.append(node)
            self.nodes.append(Node(name, kind, lane, index))
            self.edges.extend((i, index) for i in depends)
            self._ends[lane] = (index,)
            if again is not None:
                self._recipes[index] = Recipe(*again, depends)
            return index

    def end(self, lane: str) -> tuple[int, ...]:
        """Return what the next node of a lane will depend on."""
        return self._ends[lane]

    def join(self, lane: str, nodes: Iterable[int]) -> None:
        """Let the next node of a lane depend on more nodes."""
        with self._lock:
            self._ends[lane] = tuple(sorted({*self._ends[lane], *nodes}))

    def keep(self, owners: tuple[object, ...]) -> Callable[[int], tuple]:
        """Return what keeps objects for a node, as :meth:`add` wants it."""

        def attach(graph: int) -> tuple:
            return _native.attach_keep(graph, owners)

        return attach

    def condition(self, default: int | None = None, *, name: str = "condition") -> Condition:
        """Make the condition of one IF or WHILE node in this graph or in a body of it.

        Parameters
        ----------
        default : int, optional
            Value it has when a replay begins; without it, what the last replay left.
        name : str
            Name for errors.

        Returns
        -------
        Condition
            Pass it to kernels as an ``unsigned long long``; they set it with
            ``cudaGraphSetConditional`` (``conditional.cuh``).
        """
        from graft.cudagraph.conditional import make_condition

        made = make_condition(self, default, name)
        self._conditions.append(made)
        return made

    def depend(self, lane: str, nodes: tuple[int, ...]) -> None:
        """Let the next node of a lane depend on these nodes and no others."""
        with self._lock:
            self._ends[lane] = nodes

    def recipes(self) -> list[Recipe | None]:
        """Return how each node was added; OptionError when the graph is closed."""
        with self._lock:
            if self._moved_into is not None or (self._resource is None and not self._recipes):
                self.handle  # noqa: B018  (raises)
            return [self.recipe(index) for index in range(len(self.nodes))]

    def recipe(self, index: int) -> Recipe | None:
        """Return how a node was added; None for one that cannot be added a second time."""
        return self._recipes.get(index)

    def add_child(
        self,
        child: Graph | object,
        *,
        lane: str = "main",
        name: str = "child",
        move: bool = False,
    ) -> None:
        """Add another graph as one node of a lane; see :meth:`GraphLane.child`."""
        self.lane(lane).child(child, name=name, move=move)

    def child_at(self, index: int) -> Graph | None:
        """Return the child graph that a node is; None for other nodes and captured graphs."""
        recipe = self.recipe(index)
        if recipe is not None and self.nodes[index].kind == "child":
            part: Graph = recipe.args[0]
            return part
        return self._moved.get(index)

    def give_away(self, parent: Graph, index: int | None) -> None:
        """Become the parent's: node ``index`` of it, or (None) nothing, as it was copied."""
        root = parent.root
        if index is not None and self._resource is not None:
            self._resource.disown()
            _native.adopt_state(self.state, root.state)
            root.cells.extend(self.cells)
            root._conditions.extend(self._conditions)
            root._lent.extend((self.status, *self._lent))
            parent._moved[index] = self
        self._resource = None
        self._recipes.clear()
        self._moved_into = parent.name

    def settle(self) -> None:
        """Wait until launches of an earlier executable, which count in the records, are over."""
        if self._exec is not None:
            self.device.synchronize()

    @property
    def root(self) -> Graph:
        """The whole graph that this one is part of: itself, or what is around a body."""
        return self

    def clone(self, name: str | None = None) -> Graph:
        """Return a copy with host steps, replay numbers and failures of its own.

        It outlives this graph. Kernels that were given this graph's ``status`` get the copy's.

        Raises
        ------
        OptionError
            A node (a conditional, a captured child) allows no copy; names it.
        """
        made = Graph(self.device, name or f"{self.name} copy")
        rebuild(self, made, "cloned")
        for lane in self.lanes:
            made.depend(lane, self.end(lane))
        return made

    def undo(self, ends: tuple[int, ...]) -> None:
        """Take the last node out again; its lane then ends in ``ends``. Used by lanes."""
        with self._lock:
            call(cu.cuGraphDestroyNode, self._handles.pop())
            node = self.nodes.pop()
            self.edges = [edge for edge in self.edges if edge[1] != node.index]
            self._ends[node.lane] = ends

    @property
    def worker(self) -> MailboxWorker:
        """The thread that answers mailboxes for which no worker was named."""
        with self._lock:
            if self._worker is None:
                self._worker = MailboxWorker(name="mailbox")
            return self._worker

    def instantiate(self, *, priorities: bool = False) -> GraphExec:
        """Make the executable. A definition has one at a time.

        Parameters
        ----------
        priorities : bool
            Let kernel nodes run with the priorities they were given, not with the stream's.

        Raises
        ------
        OptionError
            An executable of this definition is still open: two would share the replay status. Or a
            condition steers no node.
        DeviceError
            The driver refused.
        """
        with self._lock:
            if self.executable is not None:
                raise OptionError(f"graph {self.name!r} has an open executable; close it first")
            self.settle()
            for condition in self._conditions:
                if not condition.used:
                    raise OptionError(
                        f"condition {condition.name!r} of graph {self.name!r} steers no node"
                    )
            made = GraphExec(self, priorities)
            self._exec = weakref.ref(made)
            return made

    def adopted_by(self, executable: GraphExec) -> None:
        """Note that an executable was updated to this definition."""
        self._exec = weakref.ref(executable)

    @property
    def executable(self) -> GraphExec | None:
        """The open executable that runs this definition."""
        living = self._exec() if self._exec is not None else None
        return living if living is not None and living.runs(self.state) else None

    def dot(self) -> str:
        """Return the graph in Graphviz's DOT language, lanes as clusters."""
        return drawing.dot(self.name, self.lanes, self.nodes, self.edges)

    def svg(self) -> str:
        """Return a drawing as an SVG document, lanes as columns."""
        return drawing.svg(self.name, self.lanes, self.nodes, self.edges)

    def close(self) -> None:
        """Drop the definition; executables and launches in flight go on."""
        with self._lock:
            self._recipes.clear()
            self._resource = None
        _native.flush(1.0)

    def release(self) -> None:
        """Drop the driver's definition and keep the recipes, from which it can be built again."""
        with self._lock:
            self._resource = None

    def __repr__(self) -> str:
        return f"<Graph {self.name!r}, {len(self.nodes)} nodes on {len(self._ends)} lanes>"
