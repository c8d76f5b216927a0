"""Graph definitions, built explicitly node by node on lanes.

A :class:`GraphLane` adds nodes to a :class:`Graph`, which is instantiated and launched, or to a
:class:`GraphBody`, the body of a conditional node inside a graph. Their common base class
:class:`GraphBase` stores the nodes and edges.

Lifetime: a node stores raw addresses and handles. The Python object that keeps such an address or
handle valid is called its owner. Before a node is added, a CUDA user object that holds the owners
of the node's operands is retained on the graph. The driver releases the user object after the
definition, its executables and all launches in flight are gone.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from graft.cudagraph.driver.context import Context
from graft.cudagraph.driver.driver import call, check_code, cu, prepare_driver_call
from graft.cudagraph.driver.memory import PinnedArray, check_byte
from graft.cudagraph.errors import OptionError
from graft.cudagraph.graph import drawing, foreign_graph, nodes
from graft.cudagraph.graph.exec import GraphExec
from graft.cudagraph.graph.mailbox import KERNELS as MAILBOX_KERNELS
from graft.cudagraph.graph.mailbox import Limits, Mailbox, MailboxWorker
from graft.cudagraph.graph.nodes import Contents, Node
from graft.cudagraph.host.hostwork import HostWork, Spin, as_work, resolve_spin
from graft.cudagraph.host.payload import Payload
from graft.cudagraph.kernels.kernels import Kernel, load
from graft.cudagraph.lanes import Dims, check_copy, check_launch, fill_span
from graft.cudagraph.streams import Event
from graft.native import _native

STATUS_WORDS = 16
#: Minimum CUDA version for moving a graph into another graph: 12.9.
CHILD_MOVE_MIN_CUDA = 12090
#: Minimum compute capability (major) and CUDA version for programmatic edges: 9.0 and 12.3.
PROGRAMMATIC_MIN_CAPABILITY = 9
PROGRAMMATIC_MIN_CUDA = 12030
#: Kinds of nodes that the driver allows in the body of a conditional, at any depth.
BODY_NODE_KINDS = frozenset({"kernel", "copy", "fill", "child", "if", "while", "switch"})
#: Kinds of the two nodes of a `Mailbox`. Both are kernel nodes if `GraphLane.spinkernel` adds them.
_MAILBOX_NODE_KINDS = frozenset({"request", "wait"})
#: Kinds of conditional nodes. The driver allows none in a child graph, at any depth.
_CONDITIONAL_KINDS = frozenset({"if", "while", "switch", "conditional"})
#: Lane of the node that counts completed launches.
_COUNTER_LANE = "completed launches"


class Attached(NamedTuple):
    """Last argument of a `Make` function: the node's user object, host function and edge type."""

    user_object: int  # CUuserObject that holds the owners of the node's operands
    host_function: int = 0  # function and data of a host node; 0 for other nodes
    host_data: int = 0
    programmatic: bool = False  # whether the edge from the previous kernel is programmatic


#: Function that makes a CUgraph keep the owners of a node's operands alive (in a CUDA user object).
#: It returns the result code, the name of the driver function that failed, and the first three
#: fields of `Attached`: user object, host function and its data.
Attach = Callable[[int], tuple]
#: Function that creates a driver node and returns its CUgraphNode. Its arguments are the CUgraph,
#: the CUgraphNodes that the node depends on, and `Attached`.
Make = Callable[[int, list[Any], Attached], Any]


class NodeSpec(NamedTuple):
    """A node to be added by :meth:`GraphBase.add_pair`."""

    kind: str
    name: str
    attach: Attach
    make: Make


def keep_owners(owners: tuple[object, ...]) -> Attach:
    """Return a function that makes a CUgraph keep ``owners`` alive, with a CUDA user object."""
    return lambda graph: _native.attach_keep(graph, owners)


class GraphBase(ABC):
    """Base class of graphs and conditional bodies, which stores their nodes, edges and lanes.

    A body has the status words and the native `state` of the graph that contains it. The state
    numbers the replays of the graph and stores its first failure.

    Attributes
    ----------
    nodes
        Nodes in the order in which they were added.
    edges
        Pairs of node indices. The second node of a pair depends on the first one.
    programmatic
        Whether edges between kernels may use programmatic dependent launch.
    child_graphs
        Graphs that were moved into this one, by the index of their child-graph node.
    contents
        Nodes, edges, and the contents of bodies and child graphs.
    """

    def __init__(
        self, context: Context, name: str, status: PinnedArray, state: _native.GraphState
    ) -> None:
        self.context = context
        self.name = name
        self.status = status
        self.state = state
        self.contents = Contents(name)
        self.nodes = self.contents.nodes
        self.edges = self.contents.edges
        self.programmatic = False
        self.child_graphs: dict[int, Graph] = {}
        self._node_handles = self.contents.handles
        # GraphLane does not store the tails: a graph that referred to its lanes would be part of a
        # reference cycle and would not be freed as soon as it is dropped.
        self._tails = self.contents.tails
        # Names of lanes whose next node depends on exactly one kernel of the lane, which has not
        # been marked, and on no mark of another lane. Only in these lanes can the next edge be
        # programmatic.
        self._kernel_tails: set[str] = set()
        # Serializes edits of the definition. Never held while waiting for host work.
        self._lock = threading.RLock()

    @property
    @abstractmethod
    def handle(self) -> int:
        """The CUgraph as an integer."""

    @property
    @abstractmethod
    def root(self) -> Graph:
        """The outermost graph: this graph, or the graph that contains this body."""

    @abstractmethod
    def check_node_kind(self, kind: str, name: str, child: Graph | None = None) -> None:
        """Raise OptionError if a node of this kind is not allowed in this graph or body.

        For a child-graph node, also check the nodes of the graph `child`.
        """

    def check_open(self) -> None:
        """Raise OptionError if the graph is closed or was moved into another graph."""
        _ = self.handle

    def lane(self, name: str, *, urgent: bool = False) -> GraphLane:
        """Return the lane with this name; create it if it does not exist.

        The first node of a lane depends only on marks for which the lane waits. With `urgent`, the
        kernels that are added to the returned lane have the highest priority by default, so that in
        executables instantiated with ``priorities=True`` they do not have to wait for the blocks of
        a large kernel. OptionError is raised for the name that is reserved for counting launches
        (`_COUNTER_LANE`).
        """
        if name == _COUNTER_LANE:
            raise OptionError(
                f"lane name {name!r} is reserved for the launch counter of graph {self.name!r}"
            )
        with self._lock:
            self._tails.setdefault(name, ())
        return GraphLane(self, name, urgent)

    @property
    def lanes(self) -> list[str]:
        """Names of the lanes, in the order of their creation."""
        return list(self._tails)

    @contextlib.contextmanager
    def editing(self) -> Iterator[int]:
        """Hold the lock of the definition and yield its CUgraph."""
        with self._lock:
            yield self.handle

    def node_index(self, handle: int) -> int | None:
        """Return the index of the node with this CUgraphNode handle, or None."""
        for index, node_handle in enumerate(self._node_handles):
            if int(node_handle) == handle:
                return index
        return None

    def find(self, node: Node | str, action: str, kind: str) -> int:
        """Return the CUgraphNode of a node, given by name or as the Node that a lane returned.

        A Node may be in a conditional body or child graph inside this graph; a name is searched in
        `nodes` only. OptionError is raised if the node does not exist, its name is ambiguous, it is
        not of `kind`, or it has a programmatic edge. `action` is the part of the message that says
        what the caller wanted to do, such as "change the".
        """
        if isinstance(node, str):
            found = [n for n in self.nodes if n.name == node]
            if len(found) != 1:
                raise OptionError(
                    f"graph {self.name!r} has {len(found)} nodes named {node!r}; pass the "
                    "Node object or the name of a single node"
                )
            node = found[0]
        if not isinstance(node, Node):
            raise OptionError(f"{node!r} is neither a Node nor the name of one")
        contents = self.contents.owner_of(node)
        if contents is None:
            raise OptionError(f"{node} is not a node of graph {self.name!r}")
        if node.kind != kind:
            raise OptionError(
                f"cannot {action} {node.kind} node {node.name!r} of graph {self.name!r}: only "
                f"{kind} nodes"
            )
        if node.index in contents.programmatic:
            raise OptionError(
                f"cannot {action} node {node.name!r} of graph {self.name!r}: it has a "
                "programmatic edge; create the graph without programmatic=True"
            )
        self._check_nodes_exist()
        return int(contents.handles[node.index])

    def _check_nodes_exist(self) -> None:
        """Raise OptionError if the driver has destroyed the nodes of this definition."""
        self.check_open()

    def add(
        self,
        kind: str,
        name: str,
        lane: str,
        attach: Attach,
        make: Make,
        waits_for_previous: bool = False,
    ) -> Node:
        """Add a node at the end of a lane and return it.

        `attach` retains the owners of the node's operands on the graph before `make` creates the
        driver node. They are released if the driver rejects the node. `waits_for_previous` says
        that the node is a kernel that calls ``wait_for_previous_kernel()``: only then can the edge
        from the previous kernel be programmatic. OptionError is raised while the graph has an
        executable.
        """
        self.check_editable(f"node {name!r}")
        self.check_node_kind(kind, name)
        with self.editing() as graph:
            prepare_driver_call("cuGraphAddNode")
            depends = self._tails[lane]
            # User objects are retained on the root graph, because it owns the CUgraphs of its
            # bodies.
            keeper = self.root.handle
            code, api, *attached = attach(keeper)
            check_code(api, code)
            user_object = attached[0]
            programmatic = waits_for_previous and self.programmatic and lane in self._kernel_tails
            try:
                node = make(
                    graph,
                    [self._node_handles[i] for i in depends],
                    Attached(*attached)._replace(programmatic=programmatic),
                )
            except BaseException:
                _native.detach(keeper, user_object)
                raise
            index = len(self.nodes)
            self._node_handles.append(node)
            added = Node(name, kind, lane, index)
            self.nodes.append(added)
            self.edges.extend((i, index) for i in depends)
            self._tails[lane] = (index,)
            if programmatic:
                self.contents.programmatic.update((*depends, index))
            if kind == "kernel":
                self._kernel_tails.add(lane)
            else:
                self._kernel_tails.discard(lane)
            return added

    def check_editable(self, subject: str) -> None:
        """Raise OptionError while the graph has an executable, which would not run a new node.

        `subject` names what the caller wants to add.
        """
        root = self.root
        if root.executable is not None:
            raise OptionError(
                f"{subject} cannot be added to graph {root.name!r}, because its executable would "
                "not run it: add it before instantiate(), or close the executable and call "
                "instantiate() again"
            )

    def add_pair(self, lane: str, first: NodeSpec, second: NodeSpec) -> Node:
        """Add two nodes at the end of a lane, or none if one of them is rejected.

        Return the second node.
        """
        with self._lock:
            tail = self._tails[lane]
            self.add(first.kind, first.name, lane, first.attach, first.make)
            try:
                return self.add(second.kind, second.name, lane, second.attach, second.make)
            except BaseException:
                call(cu.cuGraphDestroyNode, self._node_handles.pop())
                index = self.nodes.pop().index
                self.edges[:] = [edge for edge in self.edges if edge[1] != index]
                self._tails[lane] = tail
                raise

    def add_child(self, child: Graph, lane: str, name: str | None) -> Node:
        """Move another graph into this one as a single node; see :meth:`GraphLane.child`."""
        if not isinstance(child, Graph):
            raise OptionError(f"{child!r} is not a Graph")
        name = name or child.name
        for node in child.nodes:
            if node.kind in _CONDITIONAL_KINDS:
                raise OptionError(
                    f"graph {child.name!r} cannot be moved into {self.name!r}: it contains the "
                    f"conditional node {node.name!r}, which CUDA does not allow in child graphs; "
                    "add the conditional to the parent"
                )
        self.check_editable(f"child graph {name!r}")
        self.check_node_kind("child", name, child)
        root = self.root
        reason = ""
        if child.executable is not None:
            reason = "it has an open executable"
        elif child.handle == root.handle:
            reason = "it is the same graph, or contains it"
        elif not _driver_moves_graphs():
            reason = "that needs CUDA 12.9, driver and bindings"
        if reason:
            raise OptionError(f"graph {child.name!r} cannot be moved into {self.name!r}: {reason}")
        child.wait_for_earlier_launches()
        child.place_launch_counter()
        with child.editing(), self.editing():
            # Keep the child's status words (`status`, where kernels read the first failure) alive:
            # the child's kernels still read them. From now on, the native code also stores failures
            # of this graph in them.
            node = self.add(
                "child",
                name,
                lane,
                keep_owners((child.status.owner,)),
                lambda graph, dependencies, _: nodes.move_child(graph, dependencies, child.handle),
            )
            child.moved_into(self, root)
            self.child_graphs[node.index] = child
            self.contents.inner[node.index] = [child.contents]
            return node

    def tail(self, lane: str) -> tuple[int, ...]:
        """Return the indices of the last nodes of a lane, for a mark (`GraphLane.record`).

        Lanes that wait for the mark depend on these nodes, and so does the next node of this lane.
        After this call, the edge to this next node cannot be programmatic.
        """
        with self._lock:
            self._kernel_tails.discard(lane)
            return self._tails[lane]

    def add_dependencies(self, lane: str, nodes: Iterable[int]) -> None:
        """Make the next node of a lane also depend on the given nodes."""
        with self._lock:
            self._kernel_tails.discard(lane)
            self._tails[lane] = tuple(sorted({*self._tails[lane], *nodes}))

    def dot(self, times: drawing.Times | None = None) -> str:
        """Return the graph in Graphviz's DOT language, with lanes and bodies as clusters.

        `times` has the same meaning as in :meth:`svg`.
        """
        return drawing.dot(self.contents, times)

    def svg(self, times: drawing.Times | None = None, note: str = "") -> str:
        """Return a picture of the graph as SVG, with the bodies of conditionals and child graphs.

        Parameters
        ----------
        times
            Seconds of each execution of a node, by node. The median and the number of executions
            are written into the box of the node. ``Trace.times()`` of
            :mod:`graft.tools.trace.record` returns the times that the soft device has recorded.
        note
            Line of text below the title, such as the description of the device on which the times
            were measured.
        """
        return drawing.svg(self.contents, times, note)

    def __repr__(self) -> str:
        kind = type(self).__name__
        return f"<{kind} {self.name!r}, {len(self.nodes)} nodes on {len(self._tails)} lanes>"


def _driver_moves_graphs() -> bool:
    """Return whether the driver and ``cuda.bindings`` support moving a graph into another graph."""
    if not hasattr(cu, "CUgraphChildGraphNodeOwnership"):
        return False
    return int(call(cu.cuDriverGetVersion)) >= CHILD_MOVE_MIN_CUDA


class Graph(GraphBase):
    """A graph definition that is instantiated and launched.

    Parameters
    ----------
    programmatic
        Enable programmatic dependent launch: a kernel whose source calls
        ``wait_for_previous_kernel()`` is launched while the previous kernel of its lane still runs.
        This applies only if no mark or other node is between the two kernels. The edge between them
        is then programmatic, and neither kernel node can be changed in executables. OptionError is
        raised if the device or the driver does not support it. In the bodies of conditionals, edges
        are programmatic if the driver accepts such bodies.

    Attributes
    ----------
    status
        int32 [16]. Word 0 is 0, or the reason why a replay failed: 1 a Python host step raised an
        exception, 2 a native host step failed, 3 the interpreter is shutting down, 4 a mailbox
        missed its deadline. Word 1 is the number of that replay. The words stay set until
        ``GraphExec.clear()``. Kernels that must do nothing in a failed replay read them.
    payloads
        Payloads of the graph and of the graphs that were moved into it.
    child_status
        Status words of the graphs that were moved into this one.
    unused_conditions
        Names of the conditions that no conditional node uses yet, by handle.
    completed
        uint32 [1], number of completed launches, if the graph counts them; see
        :meth:`GraphLane.count_completed`.
    """

    def __init__(
        self, context: Context, name: str = "graph", *, programmatic: bool = False
    ) -> None:
        if not isinstance(context, Context):
            raise OptionError(f"Graph() needs a device, see open_device(), not {context!r}")
        if programmatic:
            _check_programmatic(context, name)
        status = PinnedArray(context, (STATUS_WORDS,), "int32")
        super().__init__(context, name, status, _native.GraphState(status.host_ptr))
        self.programmatic = programmatic
        self.payloads: list[Payload] = []
        self.child_status: list[PinnedArray] = []
        self.unused_conditions: dict[int, str] = {}
        self.completed: PinnedArray | None = None
        self._launch_counter: int | None = None  # index of the node that increments `completed`
        self._resource: _native.Resource | None = None
        self._worker: MailboxWorker | None = None
        self._parent_name: str | None = None
        self._exec: weakref.ref[GraphExec] | None = None
        self._own(int(call(cu.cuGraphCreate, 0)))

    @classmethod
    def from_capture(
        cls, context: Context, captured: Any, *, name: str = "captured", keep: object = ()
    ) -> Graph:
        """Make a graph from one that was captured or built with another library.

        The captured nodes form the lane "captured"; nodes that are added to this lane run after all
        captured nodes. Host steps that :func:`~graft.cudagraph.host.hostwork.hostfunc` added during
        the capture report their errors as in any captured graph, see
        :func:`~graft.cudagraph.host.hostwork.check_captured`.

        Parameters
        ----------
        captured
            A GraphDefinition or a finished GraphBuilder of cuda.core, a Graph of CuPy, or a
            CUDAGraph of torch that was created with ``keep_graph=True``. Such a graph is copied;
            the driver refuses to copy graphs with memory or conditional nodes. Or a CUgraph, as
            cuStreamEndCapture returns it; the new graph takes ownership of it without a copy.
        keep
            Objects, such as arrays whose memory the nodes use, that the graph keeps alive in
            addition to `captured`.

        Raises
        ------
        OptionError
            ``captured`` is none of these objects.
        DeviceError
            The graph cannot be copied.
        """
        handle, is_owned = foreign_graph.graph_handle(captured)
        if not is_owned:
            handle = int(call(cu.cuGraphClone, handle))
        graph = cls(context, name)
        graph._own(handle)
        code, api, _ = _native.attach_keep(handle, (captured, keep))
        check_code(api, code)
        lane = "captured"
        graph._tails[lane] = ()
        nodes, edges = foreign_graph.read_nodes(handle)
        for index, node in enumerate(nodes):
            graph._node_handles.append(node.handle)
            graph.nodes.append(Node(node.name, node.kind, lane, index))
        graph.edges.extend(edges)
        has_dependents = {before for before, _ in edges}
        graph._tails[lane] = tuple(i for i in range(len(nodes)) if i not in has_dependents)
        return graph

    def _own(self, handle: int) -> None:
        """Take ownership of a CUgraph, in place of the previous CUgraph."""
        self._resource = _native.Resource(_native.ResourceKind.GRAPH, handle)

    @property
    def handle(self) -> int:
        """The CUgraph as an integer."""
        if self._parent_name is not None:
            raise OptionError(f"graph {self.name!r} was moved into {self._parent_name!r}")
        if self._resource is None:
            raise OptionError(f"graph {self.name!r} is closed")
        return self._resource.handle

    @property
    def root(self) -> Graph:
        """This graph."""
        return self

    def check_node_kind(self, kind: str, name: str, child: Graph | None = None) -> None:
        """Accept nodes of every kind."""

    def _check_nodes_exist(self) -> None:
        # A graph that was moved into a parent is not open, but its nodes still exist, as nodes of
        # the parent.
        if self._parent_name is None:
            self.check_open()

    def moved_into(self, parent: GraphBase, root: Graph) -> None:
        """Pass the CUgraph and the host-side state of this graph to `root`.

        Called after this graph was moved into `parent` as a child-graph node. `parent` is `root` or
        a body inside `root`.
        """
        if self._resource is not None:
            self._resource.disown()
        _native.adopt_state(self.state, root.state)
        root.payloads.extend(self.payloads)
        root.unused_conditions.update(self.unused_conditions)
        root.child_status.extend((self.status, *self.child_status))
        self._resource = None
        self._parent_name = parent.name

    def payload(self, value: object = None, *, name: str = "payload") -> Payload:
        """Create a per-replay value for host steps of this graph; see :class:`Payload`."""
        payload = Payload(self.state, value, name)
        self.payloads.append(payload)
        return payload

    def wait_for_earlier_launches(self) -> None:
        """Wait for the launches of an earlier executable.

        The host steps of a definition count their runs. A new executable derives its replay numbers
        from these counts, so no earlier launch may change them any more.
        """
        if self._exec is not None:
            self.context.synchronize()

    @property
    def worker(self) -> MailboxWorker:
        """Worker thread of the mailboxes that were added without a worker; started on first use."""
        with self._lock:
            if self._worker is None:
                self._worker = MailboxWorker(name="mailbox")
            return self._worker

    def place_launch_counter(self) -> None:
        """Make the node that counts completed launches depend on all other nodes.

        Call this before the definition is instantiated or used for an update, because nodes may
        have been added since the last call. If the graph does not count launches, do nothing.
        """
        if self.completed is None:
            return
        with self._lock:
            counter = self._launch_counter
            has_dependents = {before for before, _ in self.edges}
            last = [i for i in range(len(self.nodes)) if i not in has_dependents and i != counter]
            if counter is None:
                kernel = load(self.context, MAILBOX_KERNELS)["mailbox_completed"]
                self._tails[_COUNTER_LANE] = tuple(last)
                lane = GraphLane(self, _COUNTER_LANE)
                lane.kernel(kernel, 1, 1, [self.completed], name="count completed launch")
                self._launch_counter = len(self.nodes) - 1
            else:
                nodes.add_dependencies(
                    self.handle, [self._node_handles[i] for i in last], self._node_handles[counter]
                )
                self.edges.extend((i, counter) for i in last)

    def instantiate(self, *, priorities: bool = False) -> GraphExec:
        """Create the executable. A definition has at most one open executable.

        With `priorities`, kernel nodes run with the priorities they were added with. By default all
        nodes run with the priority of the stream that the graph is launched on.

        Raises
        ------
        OptionError
            An executable of this definition is still open (both executables would share the status
            words), or a condition of the graph is not used by a conditional node.
        DeviceError
            The driver rejected the graph.
        """
        self._check_no_executable()
        # Do not hold the lock during this wait, because host work may take arbitrarily long.
        self.wait_for_earlier_launches()
        with self._lock:
            self._check_no_executable()
            for name in self.unused_conditions.values():
                raise OptionError(
                    f"condition {name!r} of graph {self.name!r} controls no conditional node; "
                    "use it in if_(), if_else(), while_() or switch_()"
                )
            self.place_launch_counter()
            executable = GraphExec(self, priorities)
            self._exec = weakref.ref(executable)
            return executable

    def _check_no_executable(self) -> None:
        if self.executable is not None:
            raise OptionError(f"graph {self.name!r} has an open executable; close it first")

    def set_executable(self, executable: GraphExec) -> None:
        """Set the open executable, which was updated to this definition."""
        self._exec = weakref.ref(executable)

    @property
    def executable(self) -> GraphExec | None:
        """The open executable of this definition, or None."""
        executable = self._exec() if self._exec is not None else None
        if executable is None or not executable.is_running(self.state):
            return None
        return executable

    def close(self) -> None:
        """Release the definition. Executables and launches in flight are not affected."""
        with self._lock:
            self._resource = None
        _native.flush(1.0)

    def __enter__(self) -> Graph:
        """Return the graph. At the end of the ``with`` block, it is closed with its executable."""
        return self

    def __exit__(self, *exception: object) -> None:
        executable = self.executable
        if executable is not None:
            executable.close()
        self.close()


def supports_programmatic_edges(context: Context) -> bool:
    """Return whether graphs of the device can be created with ``programmatic=True``."""
    major = context.attribute("COMPUTE_CAPABILITY_MAJOR")
    cuda = call(cu.cuDriverGetVersion)
    return major >= PROGRAMMATIC_MIN_CAPABILITY and cuda >= PROGRAMMATIC_MIN_CUDA


def _check_programmatic(context: Context, name: str) -> None:
    if not supports_programmatic_edges(context):
        major = context.attribute("COMPUTE_CAPABILITY_MAJOR")
        cuda = call(cu.cuDriverGetVersion)
        raise OptionError(
            f"graph {name!r} cannot have programmatic edges: they need compute capability 9.0 and "
            f"CUDA 12.3; this device has {major}.x and {cuda // 1000}.{cuda % 1000 // 10}"
        )


class GraphBody(GraphBase):
    """The body of a conditional node. Created by ``if_``, ``if_else`` and ``while_``.

    A body has lanes like a graph. Only kernels, copies, fills, child graphs, further conditionals
    and host work through :meth:`GraphLane.spinkernel` can be added to it. The owners of its nodes'
    operands are kept alive by `root`, the graph that contains the body.
    """

    def __init__(self, root: Graph, name: str, handle: int, *, programmatic: bool) -> None:
        super().__init__(root.context, name, root.status, root.state)
        self.programmatic = programmatic
        self._root = root
        self._handle = handle

    @property
    def handle(self) -> int:
        """The CUgraph of the body as an integer."""
        self._root.check_open()
        return self._handle

    @property
    def root(self) -> Graph:
        """The outermost graph, which contains the conditional node of this body at some depth."""
        return self._root

    def check_node_kind(self, kind: str, name: str, child: Graph | None = None) -> None:
        """Raise OptionError if a node is not allowed in the body of a conditional node.

        For a child-graph node, `child` is its graph, whose nodes are checked as well.
        """
        if kind not in BODY_NODE_KINDS and not (child is None and kind in _MAILBOX_NODE_KINDS):
            raise OptionError(
                f"{kind} node {name!r} is not allowed in the body of conditional {self.name!r}: "
                "the driver allows kernels, copies, fills, child graphs and conditionals there; "
                "use spinkernel() for host work"
            )
        if child is not None:
            self._check_child(child, name)

    def _check_child(self, child: Graph, path: str) -> None:
        """Raise OptionError if `child` contains a node of a kind that is not allowed in a body.

        `path` is the name of the child-graph node, for the error message.
        """
        for node in child.nodes:
            name = f"{path}/{node.name}"
            if node.kind not in BODY_NODE_KINDS:
                raise OptionError(
                    f"{node.kind} node {name!r} is not allowed in the body of conditional "
                    f"{self.name!r}, not even in a child graph"
                )
            nested = child.child_graphs.get(node.index)
            if nested is not None:
                self._check_child(nested, name)


@dataclass(frozen=True)
class GraphMark:
    """A point in a lane of a graph that other lanes can wait for.

    The next node of a waiting lane will depend on `nodes`, given by their indices.
    """

    graph: GraphBase
    name: str
    nodes: tuple[int, ...]


class GraphLane:
    """A lane that adds nodes to a graph. Created by :meth:`GraphBase.lane`.

    Methods that add nodes return the last :class:`Node` that they have added.
    """

    def __init__(self, graph: GraphBase, name: str, urgent: bool = False) -> None:
        self.graph = graph
        self.name = name
        self._urgent = urgent

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
    ) -> Node:
        """Add a kernel node. The argument values are copied during this call.

        Parameters
        ----------
        grid, block
            Dimensions: an int, or a triple of ints.
        args
            Arguments, see :meth:`Kernel.pack`.
        shared
            Bytes of dynamic shared memory.
        priority
            Launch priority; lower values run first. It takes effect in executables that were
            instantiated with ``priorities=True``. The default depends on the lane, see
            :meth:`GraphBase.lane`.
        """
        if priority is None and self._urgent:
            priority = nodes.highest_priority()
        dims = check_launch(kernel, grid, block, shared)
        packed = kernel.pack(args)
        kernel.allow_shared(shared)

        def make(graph: int, dependencies: list[Any], attached: Attached) -> Any:
            return nodes.add_kernel(
                graph,
                dependencies,
                nodes.KernelLaunch(kernel.function, *dims, shared, packed),
                priority,
                attached.programmatic,
            )

        return self.graph.add(
            "kernel",
            name or kernel.name,
            self.name,
            keep_owners(packed.owners),
            make,
            kernel.waits_for_previous,
        )

    def copy(self, dst: Any, src: Any, *, name: str | None = None) -> Node:
        """Add a node that copies between arrays of the same size in bytes; see :meth:`Lane.copy`.

        The graph keeps the arrays alive. If one of them is in pageable host memory, the driver may
        copy more slowly than with pinned memory.
        """
        to, source = check_copy(dst, src)
        return self._add(
            "copy",
            name or "copy",
            (to.owner, source.owner),
            lambda graph, dependencies, _: nodes.add_copy(graph, dependencies, to, source),
        )

    def fill(self, dst: Any, byte: int = 0, *, name: str | None = None) -> Node:
        """Add a node that sets every byte of an array to `byte`."""
        value = check_byte(byte)
        span = fill_span(dst)
        return self._add(
            "fill",
            name or "fill",
            (span.owner,),
            lambda graph, dependencies, _: nodes.add_fill(
                graph, dependencies, span.address, value, span.nbytes
            ),
        )

    def child(self, child: Graph, *, name: str | None = None) -> Node:
        """Move another graph into this one as a single node.

        The child's host steps become host steps of this graph: they run in its replays, and a
        failure in either graph skips the later host steps of both. The child must not have an open
        executable, and can no longer be edited or instantiated. Requires a driver and
        ``cuda.bindings`` of CUDA 12.9 or later.
        """
        return self.graph.add_child(child, self.name, name)

    def host(
        self,
        work: HostWork,
        *,
        name: str | None = None,
        spin: Spin = False,
        payload: Payload | None = None,
    ) -> Node:
        """Add a host node that runs a callable, PythonWork or NativeWork.

        Python work receives the value of `payload`, a payload of this graph, as its first argument;
        native work receives it in place of ``data``. `spin` has the same meaning as in
        :func:`~graft.cudagraph.host.hostwork.hostfunc`.
        """
        item = as_work(work)
        spinning = resolve_spin(spin)
        graph = self.graph
        if payload is not None and payload.state is not graph.state:
            raise OptionError(f"payload {payload.name!r} does not belong to graph {graph.name!r}")
        title = name or item.title
        native_payload = None if payload is None else payload.native
        owners = (graph.status.owner, item.keep)
        return graph.add(
            "host",
            title,
            self.name,
            lambda handle: _native.attach_host(
                handle, graph.state, title, item.native, owners, native_payload
            ),
            lambda handle, dependencies, attached: nodes.add_host(
                handle, dependencies, attached.host_function, attached.host_data, spinning
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
    ) -> Node:
        """Add host work that a worker thread runs.

        Two nodes are added: one posts a request to the worker thread, the other waits for the
        answer. The wait is a batch memory operation of the driver. Use :meth:`spinkernel` on
        devices that do not support memory operations in graphs.

        Parameters
        ----------
        work
            Callable, PythonWork or NativeWork.
        worker
            Thread that runs the work. Default: one thread per graph.
        deadline_s
            Maximum seconds from the request to the end of the work. If the work takes longer, the
            device stops waiting and the replay fails with the name of this step. The executable
            then accepts no launch until the work has returned.
        replay_deadline_s
            Maximum seconds from the launch to the request. If it takes longer, the replay fails.
            None: no limit.
        output
            Array for the results, or None. The work writes to a private buffer, which is copied to
            ``output`` only if the work ends before the deadline. A callable receives the buffer as
            its last argument; native work calls ``current_output()``.
        name
            Node name. Default: the name of the work.
        """
        limits = Limits(deadline_s, replay_deadline_s)
        return self._add_mailbox(work, worker, limits, output, name, spinkernel=False)

    def spinkernel(
        self,
        work: HostWork,
        *,
        worker: MailboxWorker | None = None,
        deadline_s: float = 10.0,
        replay_deadline_s: float | None = None,
        device_deadline_s: float | None = None,
        output: PinnedArray | None = None,
        name: str | None = None,
    ) -> Node:
        """Add host work like :meth:`mailbox`, but wait for the answer in a one-thread kernel.

        The kernel spins and occupies the place of a thread block on a multiprocessor. It ends after
        ``device_deadline_s`` seconds of the device's clock (default: twice ``deadline_s``; at most
        1 s on devices that limit the run time of kernels, such as GPUs with a display), even if
        no host thread runs any more. The other parameters are the same as for :meth:`mailbox`.
        """
        limits = Limits(deadline_s, replay_deadline_s, device_deadline_s)
        return self._add_mailbox(work, worker, limits, output, name, spinkernel=True)

    def count_completed(self) -> None:
        """Count the completed launches of the graph in ``Graph.completed``.

        :meth:`spinkernel` in the body of a conditional needs this count and calls this method
        itself. The node that counts is added when the graph is instantiated, after all other nodes,
        so the method may be called before or after the conditionals are added.
        """
        root = self.graph.root
        if root.completed is None:
            root.check_editable("the count of completed launches")
            root.completed = PinnedArray(root.context, (1,), "uint32")

    def _add_mailbox(
        self,
        work: HostWork,
        worker: MailboxWorker | None,
        limits: Limits,
        output: PinnedArray | None,
        name: str | None,
        *,
        spinkernel: bool,
    ) -> Node:
        graph = self.graph
        completed = None
        if isinstance(graph, GraphBody):
            if not spinkernel:
                raise OptionError(
                    f"mailbox {name!r} is not allowed in the body of conditional {graph.name!r}: "
                    "use spinkernel()"
                )
            self.count_completed()
            completed = graph.root.completed
            # The worker counts only launches from now on, so no earlier launch may be in flight.
            graph.root.wait_for_earlier_launches()
        thread = graph.root.worker if worker is None else worker
        box = Mailbox(
            graph.context, work, thread, limits, output, spinkernel=spinkernel, completed=completed
        )
        title = name or box.item.title
        owners = (graph.status.owner, *box.owners)
        return graph.add_pair(
            self.name,
            NodeSpec(
                "request",
                f"request: {title}",
                box.attach_port(graph.state, title, owners),
                box.add_request,
            ),
            NodeSpec("wait", f"answer: {title}", keep_owners(owners), box.add_wait),
        )

    def record_event(self, event: Event, *, name: str | None = None) -> Node:
        """Add a node that records an event in every replay, for waits outside this graph."""
        return self._add_event("event record", event, cu.cuGraphAddEventRecordNode, name)

    def wait_event(self, event: Event, *, name: str | None = None) -> Node:
        """Add a node that waits for the event record that was last enqueued before the replay."""
        return self._add_event("event wait", event, cu.cuGraphAddEventWaitNode, name)

    def _add_event(
        self, kind: str, event: Event, add_node: Callable[..., tuple], name: str | None
    ) -> Node:
        if not isinstance(event, Event):
            raise OptionError(f"lane {self.name!r} needs an Event, not {type(event).__name__}")
        handle = event.handle
        return self._add(
            kind,
            name or event.name,
            (event.owner,),
            lambda graph, dependencies, _: nodes.add_event(add_node, graph, dependencies, handle),
        )

    def record(self, name: str | None = None) -> GraphMark:
        """Return a mark at the end of the lane.

        If the lane has no node yet, the mark consists of the marks that the lane waits for. If
        there are none, the mark is the start of the graph.
        """
        return GraphMark(self.graph, name or f"mark on {self.name}", self.graph.tail(self.name))

    def wait(self, mark: Any) -> None:
        """Make the next node of this lane also depend on a mark of another lane of this graph."""
        if not isinstance(mark, GraphMark) or mark.graph is not self.graph:
            name = getattr(mark, "name", mark)
            raise OptionError(
                f"lane {self.name!r} of graph {self.graph.name!r} cannot wait for {name!r}, "
                "which is not a mark of this graph"
            )
        self.graph.add_dependencies(self.name, mark.nodes)

    def _add(self, kind: str, name: str, owners: tuple[object, ...], make: Make) -> Node:
        return self.graph.add(kind, name, self.name, keep_owners(owners), make)

    def __repr__(self) -> str:
        return f"<GraphLane {self.name!r} of {self.graph!r}>"
