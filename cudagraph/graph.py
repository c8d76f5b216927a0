"""Graphs, built explicitly node by node on lanes, never by capture.

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
from typing import Any

from graft.cudagraph import drawing, nodes
from graft.cudagraph.cells import Cell
from graft.cudagraph.context import Context
from graft.cudagraph.driver import call, check_code, cu, enter
from graft.cudagraph.errors import OptionError
from graft.cudagraph.exec import GraphExec
from graft.cudagraph.hostwork import HostWork, Spin, as_work, use_spin
from graft.cudagraph.kernels import Kernel
from graft.cudagraph.lanes import Array, Dims, check_copy, check_launch
from graft.cudagraph.mailbox import Limits, Mailbox, MailboxWorker
from graft.cudagraph.memory import PinnedArray, check_byte
from graft.cudagraph.nodes import Node
from graft.cudagraph.streams import Event
from graft.native import _native

STATUS_WORDS = 16
#: Given the graph, keeps what a node uses; returns (code, api, user object, ...).
Attach = Callable[[int], tuple]
#: Given the graph, the nodes it depends on and what was attached, behind which stands whether the
#: node depends programmatically, makes the driver's node.
Make = Callable[[int, list[Any], tuple], Any]
#: The driver that can move a graph into another one: CUDA 12.9.
MOVES_SINCE = 12090
#: Compute capability, and CUDA, that know programmatic edges: 9.0 and 12.3.
PROGRAMMATIC_SINCE = (9, 12030)


class Graph:
    """A graph definition.

    Parameters
    ----------
    context : Context
        The device.
    name : str
        Name for errors and drawings.
    programmatic : bool
        Let a kernel come up while the one before it on its lane runs (programmatic dependent
        launch), where nothing but that kernel is between the two, no mark either, and its text
        calls ``wait_for_kernel_before()``. Such nodes cannot be changed in executables.

    Raises
    ------
    OptionError
        The device or the driver knows no programmatic edges.

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
        self, context: Context, name: str = "graph", *, programmatic: bool = False
    ) -> None:
        if programmatic:
            major = context.attribute("COMPUTE_CAPABILITY_MAJOR")
            cuda = call(cu.cuDriverGetVersion)
            if major < PROGRAMMATIC_SINCE[0] or cuda < PROGRAMMATIC_SINCE[1]:
                raise OptionError(
                    f"graph {name!r} cannot have programmatic edges: they need compute capability "
                    f"9.0 and CUDA 12.3, here are {major}.x and {cuda // 1000}.{cuda % 1000 // 10}"
                )
        status = PinnedArray(context, (STATUS_WORDS,), "int32")
        self._begin(context, name, status, _native.GraphState(status.host_ptr))
        self.programmatic = programmatic
        self.become(int(call(cu.cuGraphCreate, 0)))

    def become(self, handle: int) -> None:
        """Be this CUgraph, such as a captured one, and destroy it when nobody holds it any more."""
        self._resource = _native.Resource(_native.ResourceKind.GRAPH, handle)

    def _begin(
        self, context: Context, name: str, status: PinnedArray, state: _native.GraphState
    ) -> None:
        self.context = context
        self.name = name
        self.nodes: list[Node] = []
        self.edges: list[tuple[int, int]] = []
        self.status = status
        self.state = state
        self.cells: list[Cell] = []
        self.lent: list[PinnedArray] = []  # status words of children
        self.unused_conditions: dict[int, str] = {}
        self._resource = None
        # Lane name -> nodes that its next node depends on. Lanes are handles on this, so that a
        # graph is freed as soon as it is dropped, with no reference cycle to be collected.
        self._ends: dict[str, tuple[int, ...]] = {}
        self.programmatic = False
        # Lanes whose next node depends on one kernel of theirs alone, which no mark names; and the
        # nodes at programmatic edges.
        self._chained: set[str] = set()
        self._at_programmatic: set[int] = set()
        self._handles: list[Any] = []
        self._worker: MailboxWorker | None = None
        self._moved_into: str | None = None
        self.children: dict[int, Graph] = {}  # by node
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

    @property
    def root(self) -> Graph:
        """The whole graph that this one is part of: itself, or what is around a body."""
        return self

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
        return next((i for i, node in enumerate(self._handles) if int(node) == handle), None)

    def find(self, node: Node | str, what: str, kind: str) -> int:
        """Return the CUgraphNode of a node of one kind, by name or as listed in ``nodes``; refuses
        no such node, several, or another kind by ``what`` it was for."""
        if isinstance(node, str):
            found = [n for n in self.nodes if n.name == node]
            if len(found) != 1:
                raise OptionError(f"graph {self.name!r} has {len(found)} nodes called {node!r}")
            node = found[0]
        if node.index >= len(self.nodes) or self.nodes[node.index] != node:
            raise OptionError(f"{node} is no node of graph {self.name!r}")
        if node.kind != kind:
            raise OptionError(
                f"cannot {what} {node.kind} node {node.name!r} of graph {self.name!r}: only {kind} "
                "nodes"
            )
        if node.index in self._at_programmatic:
            raise OptionError(
                f"cannot {what} node {node.name!r} of graph {self.name!r}: its edge is programmatic"
            )
        if self._moved_into is None:
            self.handle  # noqa: B018  (raises when the graph is closed)
        return int(self._handles[node.index])

    def cell(self, value: object = None, *, name: str = "cell") -> Cell:
        """Make a payload that changes between replays, for host steps of this graph."""
        made = Cell(self.state, value, name)
        self.cells.append(made)
        return made

    def add(
        self, kind: str, name: str, lane: str, attach: Attach, make: Make, waits: bool = False
    ) -> int:
        """Add one node, for lanes: attach what it needs, then make it, undoing the first if that
        fails; returns its index. ``waits``: it may depend programmatically."""
        self.refuse(kind, name)
        with self.editing() as graph:
            enter("cuGraphAddNode")
            depends = self._ends[lane]
            keeper = self.records
            attached = attach(keeper)
            code, api, user_object = attached[:3]
            check_code(api, code)
            try:
                follows = waits and self.programmatic and lane in self._chained
                node = make(graph, [self._handles[i] for i in depends], (*attached, follows))
            except BaseException:
                _native.detach(keeper, user_object)
                raise
            index = len(self.nodes)
            self._handles.append(node)
            self.nodes.append(Node(name, kind, lane, index))
            self.edges.extend((i, index) for i in depends)
            self._ends[lane] = (index,)
            self._at_programmatic.update((*depends, index) if follows else ())
            self._chained = self._chained - {lane} | ({lane} if kind == "kernel" else set())
            return index

    def add_pair(
        self, lane: str, first: tuple[str, str, Attach, Make], second: tuple[str, str, Attach, Make]
    ) -> None:
        """Add two nodes, (kind, name, attach, make) each, or none."""
        with self._lock:
            ends = self._ends[lane]
            self.add(first[0], first[1], lane, *first[2:])
            try:
                self.add(second[0], second[1], lane, *second[2:])
            except BaseException:
                call(cu.cuGraphDestroyNode, self._handles.pop())
                index = self.nodes.pop().index
                self.edges = [edge for edge in self.edges if edge[1] != index]
                self._ends[lane] = ends
                raise

    def add_child(self, child: Graph, lane: str, name: str | None) -> None:
        """Do what :meth:`GraphLane.child` says."""
        if not isinstance(child, Graph):
            raise OptionError(f"{child!r} is no Graph")
        name = name or child.name
        self.refuse("child", name, child)
        if child.records == self.records or child.executable is not None:
            why = "has an open executable" if child.executable is not None else "holds that graph"
            raise OptionError(f"graph {child.name!r} cannot be moved into {self.name!r}: it {why}")
        known = hasattr(cu, "CUgraphChildGraphNodeOwnership")
        if not known or int(call(cu.cuDriverGetVersion)) < MOVES_SINCE:
            raise OptionError(
                f"graph {child.name!r} cannot be moved into {self.name!r}: that needs CUDA 12.9, "
                "driver and bindings"
            )
        child.settle()
        root = self.root
        with child.editing(), self.editing():
            # The child's kernels read its status, which tells of the parent's failures from now on.
            index = self.add(
                "child",
                name,
                lane,
                keep((child.status.owner,)),
                lambda graph, after, _: nodes.move_child(graph, after, child.handle),
            )
            if child._resource is not None:
                child._resource.disown()
            _native.adopt_state(child.state, root.state)
            root.cells.extend(child.cells)
            root.unused_conditions.update(child.unused_conditions)
            root.lent.extend((child.status, *child.lent))
            self.children[index] = child
            child._resource = None
            child._moved_into = self.name

    def end(self, lane: str) -> tuple[int, ...]:
        """Return what the next node of a lane will depend on, for a mark."""
        with self._lock:
            self._chained.discard(lane)
            return self._ends[lane]

    def join(self, lane: str, nodes: Iterable[int]) -> None:
        """Let the next node of a lane depend on more nodes."""
        with self._lock:
            self._chained.discard(lane)
            self._ends[lane] = tuple(sorted({*self._ends[lane], *nodes}))

    def settle(self) -> None:
        """Wait until launches of an earlier executable, which count in the records, are over."""
        if self._exec is not None:
            self.context.synchronize()

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
        self._require_no_executable()
        self.settle()  # without the lock: host work may take as long as it likes
        with self._lock:
            self._require_no_executable()
            for name in self.unused_conditions.values():
                raise OptionError(f"condition {name!r} of graph {self.name!r} steers no node")
            made = GraphExec(self, priorities)
            self._exec = weakref.ref(made)
            return made

    def _require_no_executable(self) -> None:
        if self.executable is not None:
            raise OptionError(f"graph {self.name!r} has an open executable; close it first")

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

    def close(self) -> None:
        """Drop the definition; executables and launches in flight go on."""
        with self._lock:
            self._resource = None
        _native.flush(1.0)

    def __repr__(self) -> str:
        return f"<Graph {self.name!r}, {len(self.nodes)} nodes on {len(self._ends)} lanes>"


def keep(owners: tuple[object, ...]) -> Attach:
    """Return what keeps objects for a node."""
    return lambda graph: _native.attach_keep(graph, owners)


@dataclass(frozen=True)
class GraphMark:
    """A point in a graph lane: the nodes that what waits for it will depend on."""

    graph: Graph
    name: str
    nodes: tuple[int, ...]


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
        priority: int | None = None,
    ) -> None:
        """Add a kernel node; argument values are copied now.

        ``priority`` (lower runs first) counts in executables made with ``priorities``.
        """
        dims = check_launch(kernel, grid, block, shared)
        packed = kernel.pack(args)
        kernel.allow_shared(shared)

        self.graph.add(
            "kernel",
            name or kernel.name,
            self.name,
            keep(packed.owners),
            lambda graph, after, attached: nodes.add_kernel(
                graph, after, kernel.function, *dims, shared, packed, priority, attached[-1]
            ),
            kernel.waits,
        )

    def copy(self, dst: Array, src: Array, *, name: str | None = None) -> None:
        """Add a copy node between device and pinned arrays."""
        to, source = check_copy(dst, src)
        self._add(
            "copy",
            name or "copy",
            (to.owner, source.owner),
            lambda graph, after, _: nodes.add_copy(graph, after, to, source),
        )

    def fill(self, dst: Array, byte: int = 0, *, name: str | None = None) -> None:
        """Add a node that sets every byte of an array."""
        value = check_byte(byte)
        address = dst.ptr
        nbytes = dst.nbytes
        self._add(
            "fill",
            name or "fill",
            (dst.owner,),
            lambda graph, after, _: nodes.add_fill(graph, after, address, value, nbytes),
        )

    def child(self, child: Graph, *, name: str | None = None) -> None:
        """Add another graph itself as one node: it belongs to this graph from now on.

        Its host steps count, fail and stand down with this graph's; it is neither edited nor
        instantiated any more. Driver and bindings must know CUDA 12.9, and it may have no open
        executable.
        """
        self.graph.add_child(child, self.name, name)

    def host(
        self,
        work: HostWork,
        *,
        name: str | None = None,
        spin: Spin = False,
        cell: Cell | None = None,
    ) -> None:
        """Add a host node; see :mod:`graft.cudagraph.hostwork`, and hostfunc() for ``spin``.

        With a ``cell`` of this graph the work gets that cell's value of the replay: a callable
        before its arguments, native work in place of its ``data``.
        """
        item = as_work(work)
        spinning = use_spin(spin)
        graph = self.graph
        if cell is not None and cell.state is not graph.state:
            raise OptionError(f"{cell.name!r} is no cell of graph {graph.name!r}")
        title = name or item.title
        payload = None if cell is None else cell.native
        owners = (graph.status.owner, item.keep)
        graph.add(
            "host",
            title,
            self.name,
            lambda handle: _native.attach_host(
                handle, graph.state, title, item.native, owners, payload
            ),
            lambda handle, after, attached: nodes.add_host(
                handle, after, attached[3], attached[4], spinning
            ),
        )

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
        """
        limits = Limits(deadline_s, replay_deadline_s, deadline_s)
        self._mailbox(work, worker, limits, output, name, spinning=False)

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
        device_s = 2.0 * deadline_s if device_deadline_s is None else device_deadline_s
        limits = Limits(deadline_s, replay_deadline_s, device_s)
        self._mailbox(work, worker, limits, output, name, spinning=True)

    def _mailbox(
        self,
        work: HostWork,
        worker: MailboxWorker | None,
        limits: Limits,
        output: PinnedArray | None,
        name: str | None,
        *,
        spinning: bool,
    ) -> None:
        graph = self.graph
        answers = graph.worker if worker is None else worker
        box = Mailbox(graph.context, work, answers, limits, output, spinning=spinning)
        title = name or box.item.title
        owners = (graph.status.owner, *box.owners)
        graph.add_pair(
            self.name,
            ("request", f"request: {title}", box.port(graph.state, title, owners), box.request),
            ("wait", f"answer: {title}", keep(owners), box.wait),
        )

    def record_event(self, event: Event, *, name: str | None = None) -> None:
        """Add a node that records an event in every replay, for who waits outside of this graph."""
        self._event("event record", event, cu.cuGraphAddEventRecordNode, name)

    def wait_event(self, event: Event, *, name: str | None = None) -> None:
        """Add a node that waits for what an event named when the replay was launched."""
        self._event("event wait", event, cu.cuGraphAddEventWaitNode, name)

    def _event(self, kind: str, event: Event, add: Callable[..., tuple], name: str | None) -> None:
        if not isinstance(event, Event):
            raise OptionError(f"lane {self.name!r} needs an Event, not {type(event).__name__}")
        handle = event.handle
        self._add(
            kind,
            name or event.name,
            (event.owner,),
            lambda graph, after, _: nodes.add_event(add, graph, after, handle),
        )

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

    def _add(self, kind: str, name: str, owners: tuple[object, ...], make: Make) -> None:
        self.graph.add(kind, name, self.name, keep(owners), make)

    def __repr__(self) -> str:
        return f"<GraphLane {self.name!r} of {self.graph!r}>"
