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

from graft.cudagraph import drawing, nodes
from graft.cudagraph.children import Recipe, child_maker, rebuild
from graft.cudagraph.driver import call, check_code, cu, enter
from graft.cudagraph.errors import OptionError
from graft.cudagraph.exec import GraphExec
from graft.cudagraph.hostwork import HostWork, NativeWork, Spin, as_work, use_spin
from graft.cudagraph.kernels import Kernel
from graft.cudagraph.lanes import Array, Dims, check_copy, check_launch
from graft.cudagraph.mailbox import Limits, MailboxWorker
from graft.cudagraph.mailbox_nodes import add_mailbox
from graft.cudagraph.memory import PinnedArray, check_byte
from graft.native import _native

if TYPE_CHECKING:
    from graft.cudagraph.device import Device

__all__ = ["Graph", "GraphExec", "GraphLane", "GraphMark", "Node"]

STATUS_WORDS = 16


@dataclass(frozen=True)
class Node:
    """One node of a graph.

    Attributes
    ----------
    name : str
    kind : {"kernel", "copy", "fill", "host", "child", "if", "while", ...}
    lane : str
    index : int
        Position in ``Graph.nodes``.
    """

    name: str
    kind: str
    lane: str
    index: int


@dataclass(frozen=True)
class GraphMark:
    """A point in a graph lane: the nodes that what waits for it will depend on."""

    graph: Graph
    name: str
    nodes: tuple[int, ...]


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
        one failed, 3 the interpreter is ending), word 1 the number of that replay. It stays set
        until ``GraphExec.clear()``; kernels that must do nothing in a failed replay read it.
    """

    def __init__(
        self, device: Device, name: str = "graph", *, part_of: Graph | None = None
    ) -> None:
        self.device = device
        self.name = name
        self.nodes: list[Node] = []
        self.edges: list[tuple[int, int]] = []
        if part_of is None:
            self.status: PinnedArray = device.pinned((STATUS_WORDS,), "int32")
            self.state = _native.GraphState(self.status.host_ptr)
        else:  # a child graph: its host steps count and fail with the parent's
            self.status, self.state = part_of.status, part_of.state
        handle = int(call(cu.cuGraphCreate, 0))
        self._resource: _native.Resource | None = _native.Resource(
            _native.ResourceKind.GRAPH, handle
        )
        # Lane name -> nodes that its next node depends on. Lanes are handles on this, so that a
        # graph is freed as soon as it is dropped, with no reference cycle to be collected.
        self._ends: dict[str, tuple[int, ...]] = {}
        self._handles: list[Any] = []
        self._recipes: dict[int, Recipe] = {}
        self._worker: MailboxWorker | None = None
        # Serialises edits of the definition; never held while waiting for host work.
        self._lock = threading.RLock()
        self._exec: weakref.ref[GraphExec] | None = None

    @property
    def handle(self) -> int:
        """The CUgraph as an integer."""
        if self._resource is None:
            raise OptionError(f"graph {self.name!r} is closed")
        return self._resource.handle

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

    def add(
        self,
        kind: str,
        name: str,
        lane: str,
        attach: Callable[[int], tuple],
        make: Callable[[int, list[Any], tuple], Any],
        again: tuple[str, tuple[Any, ...], dict[str, Any]] | None = None,
    ) -> int:
        """Add one node: attach what it needs, then make it, undoing the first if that fails.

        Used by lanes. ``attach(graph)`` returns (code, api, user object, ...); ``make(graph,
        dependencies, attached)`` makes the driver's node. ``again`` is the lane's method, arguments
        and options that add such a node to another graph; without it the graph has no copies.
        Returns the node's index.
        """
        with self.editing() as graph:
            enter("cuGraphAddNode")
            depends = self._ends[lane]
            attached = attach(graph)
            code, api, user_object = attached[:3]
            check_code(api, code)
            try:
                node = make(graph, [self._handles[i] for i in depends], attached)
            except BaseException:
                _native.detach(graph, user_object)
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

    def depend(self, lane: str, nodes: tuple[int, ...]) -> None:
        """Let the next node of a lane depend on these nodes and no others."""
        with self._lock:
            self._ends[lane] = nodes

    def recipe(self, index: int) -> Recipe | None:
        """Return how a node was added; None for one that cannot be added a second time."""
        return self._recipes.get(index)

    def add_child(self, child: Graph | object, *, lane: str = "main", name: str = "child") -> None:
        """Add another graph as one node of a lane; see :meth:`GraphLane.child`."""
        self.lane(lane).child(child, name=name)

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

    def instantiate(self) -> GraphExec:
        """Make the executable. A definition has one at a time.

        Raises
        ------
        OptionError
            An executable of this definition is still open: two would share the replay status.
        DeviceError
            The driver refused.
        """
        with self._lock:
            if self.executable is not None:
                raise OptionError(f"graph {self.name!r} has an open executable; close it first")
            if self._exec is not None:
                # Launches of an earlier executable still count in the shared records.
                self.device.synchronize()
            made = GraphExec(self)
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


class GraphLane:
    """A lane that adds nodes to a graph. Made by :meth:`Graph.lane`."""

    def __init__(self, graph: Graph, name: str) -> None:
        self.graph = graph
        self.name = name

    def kernel(
        self,
        kernel: Kernel,
        grid: Dims,
        block: Dims,
        args: Iterable[object],
        *,
        shared: int = 0,
        name: str | None = None,
    ) -> None:
        """Add a kernel node; argument values are copied now."""
        dims = check_launch(kernel, grid, block, shared)
        values = tuple(args)
        packed = kernel.pack(values)
        kernel.allow_shared(shared)

        def make(graph: int, after: list[Any], _: tuple) -> Any:
            return nodes.add_kernel(graph, after, kernel.function, *dims, shared, packed)

        again = ("kernel", (kernel, *dims, values), {"shared": shared})
        self._add("kernel", name or kernel.name, packed.owners, make, again)

    def copy(self, dst: Array, src: Array, *, name: str | None = None) -> None:
        """Add a copy node between device and pinned arrays."""
        to, source = check_copy(dst, src)

        def make(graph: int, after: list[Any], _: tuple) -> Any:
            return nodes.add_copy(graph, after, to, source)

        self._add("copy", name or "copy", (to.owner, source.owner), make, ("copy", (dst, src), {}))

    def fill(self, dst: Array, byte: int = 0, *, name: str | None = None) -> None:
        """Add a node that sets every byte of an array."""
        value, address, nbytes = check_byte(byte), dst.ptr, dst.nbytes

        def make(graph: int, after: list[Any], _: tuple) -> Any:
            return nodes.add_fill(graph, after, address, value, nbytes)

        self._add("fill", name or "fill", (dst.owner,), make, ("fill", (dst, byte), {}))

    def child(self, child: Graph | object, *, name: str | None = None) -> None:
        """Add another graph as one node.

        Parameters
        ----------
        child : Graph, or a captured graph
            A Graph is copied as it is now; its copy's host steps count, fail and stand down with
            this graph. A captured graph is the CUgraph of a finished capture (or CuPy's Graph, or
            torch's CUDAGraph that kept its graph); the driver copies it, and its host work belongs
            to this graph from now on.

        Raises
        ------
        OptionError
            It is no graph, has a node of which there is no copy, or is part of another graph.
        DeviceError
            The driver refused, as it does for captured graphs with conditionals.
        """
        title = name or getattr(child, "name", None) or "child"
        make, part = child_maker(self.graph, child, title)
        again = None if part is None else ("child", (part,), {})
        self._add("child", title, (), make, again)

    def host(self, work: HostWork, *, name: str | None = None, spin: Spin = False) -> None:
        """Add a host node; see :mod:`graft.cudagraph.hostwork`, and hostfunc() for ``spin``."""
        item = as_work(work)
        spinning = use_spin(spin)
        graph = self.graph
        title = name or item.title
        keep = (graph.status.owner, item.keep if isinstance(item, NativeWork) else None)

        def attach(handle: int) -> tuple:
            if isinstance(item, NativeWork):
                return _native.attach_native(
                    handle, graph.state, title, item.address, item.data, keep
                )
            return _native.attach_python(handle, graph.state, title, item.fn, item.args, keep)

        def make(handle: int, after: list[Any], attached: tuple) -> Any:
            return nodes.add_host(handle, after, attached[3], attached[4], spinning)

        graph.add("host", title, self.name, attach, make, ("host", (item,), {"spin": spin}))

    def mailbox(
        self,
        work: HostWork,
        *,
        worker: MailboxWorker | None = None,
        deadline_s: float = 10.0,
        replay_deadline_s: float | None = None,
        output: PinnedArray | None = None,
        name: str | None = None,
    ) -> None:
        """Add host work that a worker of ours answers: a request node and the wait for its answer.

        The wait is a node of memory operations; see :meth:`spin` where there are none.

        Parameters
        ----------
        work : callable, PythonWork or NativeWork
            As for :meth:`host`.
        worker : MailboxWorker, optional
            Who answers; default one thread of this graph's own.
        deadline_s : float
            Seconds from the moment the request is seen. Then the wait is released, the replay
            fails with this step's name, and no launch is taken before the work has returned.
        replay_deadline_s : float, optional
            Seconds from the launch to the request; the replay fails when they have passed.
        output : PinnedArray, optional
            Where results go. The work fills a private array instead (the last argument of a
            callable, ``current_output()`` of native work), which is copied here only if it answers
            in time.
        name : str, optional

        Raises
        ------
        DeviceError
            The driver has no memory operations.
        OptionError
            A deadline is out of range, or the worker is none.
        """
        add_mailbox(
            self, work, worker, Limits(deadline_s, replay_deadline_s, deadline_s), output, name
        )

    def spin(
        self,
        work: HostWork,
        *,
        worker: MailboxWorker | None = None,
        deadline_s: float = 10.0,
        replay_deadline_s: float | None = None,
        device_deadline_s: float | None = None,
        output: PinnedArray | None = None,
        name: str | None = None,
    ) -> None:
        """Add host work as :meth:`mailbox` does, with a one-thread kernel that spins as the wait.

        The kernel ends by itself after ``device_deadline_s`` of the device's own clock (default
        twice ``deadline_s``), even when no host thread runs any more. It occupies a place on a
        multiprocessor meanwhile.
        """
        limits = Limits(deadline_s, replay_deadline_s, device_deadline_s or 2.0 * deadline_s)
        add_mailbox(self, work, worker, limits, output, name, spinning=True)

    def record(self, name: str | None = None) -> GraphMark:
        """Mark this point; on an empty lane it is the start of the graph."""
        return GraphMark(self.graph, name or f"mark on {self.name}", self.graph.end(self.name))

    def wait(self, mark: Any) -> None:
        """Let the next node of this lane depend on a mark of this graph too."""
        if not isinstance(mark, GraphMark) or mark.graph is not self.graph:
            name = getattr(mark, "name", mark)
            raise OptionError(
                f"lane {self.name!r} of graph {self.graph.name!r} cannot wait for {name!r}, "
                "which is no mark of this graph"
            )
        self.graph.join(self.name, mark.nodes)

    def _add(
        self,
        kind: str,
        name: str,
        owners: tuple[object, ...],
        make: Callable[[int, list[Any], tuple], Any],
        again: tuple[str, tuple[Any, ...], dict[str, Any]] | None,
    ) -> None:
        def attach(graph: int) -> tuple:
            return _native.attach_keep(graph, owners)

        self.graph.add(kind, name, self.name, attach, make, again)

    def __repr__(self) -> str:
        return f"<GraphLane {self.name!r} of {self.graph!r}>"
