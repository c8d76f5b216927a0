"""Graph definitions, built explicitly node by node on lanes.

:class:`GraphBase` stores nodes and edges and is what a :class:`GraphLane` adds nodes to. Its
subclasses are :class:`Graph`, which is instantiated and launched, and :class:`GraphBody`, the body
of a conditional node inside a graph.

Lifetime: the owner of every address and handle that a node uses is held by a CUDA user object. The
user object is retained on the graph before the node is added. It lives as long as the definition,
its executables or launches in flight, and is released with the last of them.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from graft.cudagraph import drawing, nodes
from graft.cudagraph.context import Context
from graft.cudagraph.driver import call, check_code, cu, prepare_driver_call
from graft.cudagraph.errors import OptionError
from graft.cudagraph.exec import GraphExec
from graft.cudagraph.hostwork import HostWork, Spin, as_work, resolve_spin
from graft.cudagraph.kernels import Kernel
from graft.cudagraph.lanes import Array, Dims, check_copy, check_launch
from graft.cudagraph.mailbox import Limits, Mailbox, MailboxWorker
from graft.cudagraph.memory import PinnedArray, check_byte
from graft.cudagraph.nodes import Node
from graft.cudagraph.payload import Payload
from graft.cudagraph.streams import Event
from graft.native import _native

STATUS_WORDS = 16
#: Version of CUDA since which a graph can be moved into another one: 12.9.
CHILD_MOVE_MIN_CUDA = 12090
#: Compute capability (major) and version of CUDA that programmatic edges require: 9.0 and 12.3.
PROGRAMMATIC_MIN_CAPABILITY = 9
PROGRAMMATIC_MIN_CUDA = 12030
#: Kinds of nodes that the driver allows in the body of a conditional, at any depth.
BODY_NODE_KINDS = frozenset({"kernel", "copy", "fill", "child", "if", "while"})


class Attached(NamedTuple):
    """What the driver node is created with besides the graph and its dependencies.

    Attributes
    ----------
    user_object
        CUuserObject that holds the owners of the node's operands.
    host_function, host_data
        Function and data of a host node; 0 for other nodes.
    programmatic
        Whether the node depends on the previous kernel by a programmatic edge.
    """

    user_object: int
    host_function: int = 0
    host_data: int = 0
    programmatic: bool = False


#: Retains the owners of a node's operands on a CUgraph. Returns (code, api, user object) and, for
#: host nodes, function and data.
Attach = Callable[[int], tuple]
#: Creates the driver node from a CUgraph, the CUgraphNodes that it depends on, and `Attached`.
Make = Callable[[int, list[Any], Attached], Any]


class NodeSpec(NamedTuple):
    """A node to be added by :meth:`GraphBase.add_pair`."""

    kind: str
    name: str
    attach: Attach
    make: Make


def keep_owners(owners: tuple[object, ...]) -> Attach:
    """Return the function that retains ``owners`` on a graph."""
    return lambda graph: _native.attach_keep(graph, owners)


class GraphBase(ABC):
    """Nodes and edges of a graph or of a conditional body; lanes add to it.

    Parameters
    ----------
    context
        Device.
    name
        Name for error messages and drawings.
    status
        Status words, see :class:`Graph`.
    state
        Native state that the host steps of the whole graph share.

    Attributes
    ----------
    nodes : list of Node
    edges : list of (int, int)
        Indices of the nodes: from, to.
    programmatic : bool
        Whether kernels may depend on the previous kernel by a programmatic edge.
    child_graphs : dict of int to Graph
        Graphs that were moved in as child nodes, by node index.
    """

    def __init__(
        self, context: Context, name: str, status: PinnedArray, state: _native.GraphState
    ) -> None:
        self.context = context
        self.name = name
        self.status = status
        self.state = state
        self.nodes: list[Node] = []
        self.edges: list[tuple[int, int]] = []
        self.programmatic = False
        self.child_graphs: dict[int, Graph] = {}
        self._node_handles: list[Any] = []
        # By lane name: the nodes that the lane's next node depends on. GraphLane objects only refer
        # to this table, so that a dropped graph is freed at once and forms no reference cycle.
        self._tails: dict[str, tuple[int, ...]] = {}
        # Lanes whose next node depends on exactly one kernel of the lane and on no mark.
        self._kernel_tails: set[str] = set()
        # Nodes at either end of a programmatic edge.
        self._programmatic_nodes: set[int] = set()
        # Serialises edits of the definition. Never held while waiting for host work.
        self._lock = threading.RLock()

    @property
    @abstractmethod
    def handle(self) -> int:
        """The CUgraph as an integer."""

    @property
    @abstractmethod
    def root(self) -> Graph:
        """The graph that contains this body; for a graph, itself."""

    @abstractmethod
    def check_node_kind(self, kind: str, name: str, child: Graph | None = None) -> None:
        """Raise OptionError if a node is not allowed here.

        Parameters
        ----------
        kind
            Kind of the node.
        name
            Name of the node.
        child
            The graph to be moved in, if the node is a child graph.
        """

    def check_open(self) -> None:
        """Raise OptionError if the graph is closed or was moved into another one."""
        _ = self.handle

    def lane(self, name: str) -> GraphLane:
        """Return the lane with this name. A new lane starts at the start of the graph."""
        with self._lock:
            self._tails.setdefault(name, ())
        return GraphLane(self, name)

    @property
    def lanes(self) -> list[str]:
        """Names of the lanes, in the order of their creation."""
        return list(self._tails)

    @contextlib.contextmanager
    def editing(self) -> Iterator[int]:
        """Lock the definition and return its CUgraph."""
        with self._lock:
            yield self.handle

    def node_index(self, handle: int) -> int | None:
        """Return the index of the node with this CUgraphNode handle; None if there is none."""
        for index, node_handle in enumerate(self._node_handles):
            if int(node_handle) == handle:
                return index
        return None

    def find(self, node: Node | str, action: str, kind: str) -> int:
        """Return the CUgraphNode of a node.

        Parameters
        ----------
        node
            Entry of `nodes`, or the name of a node.
        action
            What the node is needed for; used in error messages.
        kind
            Required kind of the node.

        Raises
        ------
        OptionError
            The node does not exist, its name is ambiguous, it has another kind, or it has a
            programmatic edge.
        """
        if isinstance(node, str):
            found = [n for n in self.nodes if n.name == node]
            if len(found) != 1:
                raise OptionError(f"graph {self.name!r} has {len(found)} nodes named {node!r}")
            node = found[0]
        if node.index >= len(self.nodes) or self.nodes[node.index] != node:
            raise OptionError(f"{node} is not a node of graph {self.name!r}")
        if node.kind != kind:
            raise OptionError(
                f"cannot {action} {node.kind} node {node.name!r} of graph {self.name!r}: only "
                f"{kind} nodes"
            )
        if node.index in self._programmatic_nodes:
            raise OptionError(
                f"cannot {action} node {node.name!r} of graph {self.name!r}: its edge is "
                "programmatic"
            )
        self._check_nodes_exist()
        return int(self._node_handles[node.index])

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
    ) -> int:
        """Add a node at the end of a lane.

        The owners of the node's operands are retained first, and released if the driver rejects
        the node.

        Parameters
        ----------
        kind, name
            Kind and name of the node.
        lane
            Name of the lane.
        attach
            Retains the owners of the operands.
        make
            Creates the driver node.
        waits_for_previous
            Whether the node is a kernel that calls ``wait_for_previous_kernel()`` and may therefore
            depend on the previous kernel by a programmatic edge.

        Returns
        -------
        int
            Index of the node.
        """
        self.check_node_kind(kind, name)
        with self.editing() as graph:
            prepare_driver_call("cuGraphAddNode")
            depends = self._tails[lane]
            # User objects are retained on the root, which also owns the bodies.
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
            self.nodes.append(Node(name, kind, lane, index))
            self.edges.extend((i, index) for i in depends)
            self._tails[lane] = (index,)
            if programmatic:
                self._programmatic_nodes.update((*depends, index))
            if kind == "kernel":
                self._kernel_tails.add(lane)
            else:
                self._kernel_tails.discard(lane)
            return index

    def add_pair(self, lane: str, first: NodeSpec, second: NodeSpec) -> None:
        """Add two nodes at the end of a lane, or none if one of them is rejected."""
        with self._lock:
            tail = self._tails[lane]
            self.add(first.kind, first.name, lane, first.attach, first.make)
            try:
                self.add(second.kind, second.name, lane, second.attach, second.make)
            except BaseException:
                call(cu.cuGraphDestroyNode, self._node_handles.pop())
                index = self.nodes.pop().index
                self.edges = [edge for edge in self.edges if edge[1] != index]
                self._tails[lane] = tail
                raise

    def add_child(self, child: Graph, lane: str, name: str | None) -> None:
        """Move another graph into this one as one node; see :meth:`GraphLane.child`."""
        if not isinstance(child, Graph):
            raise OptionError(f"{child!r} is not a Graph")
        name = name or child.name
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
        with child.editing(), self.editing():
            # The child's kernels read its status words, which report failures of the parent from
            # now on.
            index = self.add(
                "child",
                name,
                lane,
                keep_owners((child.status.owner,)),
                lambda graph, dependencies, _: nodes.move_child(graph, dependencies, child.handle),
            )
            child.moved_into(self, root)
            self.child_graphs[index] = child

    def tail(self, lane: str) -> tuple[int, ...]:
        """Return the nodes that the next node of a lane depends on, and mark this point."""
        with self._lock:
            self._kernel_tails.discard(lane)
            return self._tails[lane]

    def add_dependencies(self, lane: str, nodes: Iterable[int]) -> None:
        """Make the next node of a lane depend on further nodes."""
        with self._lock:
            self._kernel_tails.discard(lane)
            self._tails[lane] = tuple(sorted({*self._tails[lane], *nodes}))

    def dot(self) -> str:
        """Return the graph in Graphviz's DOT language, with lanes as clusters."""
        return drawing.dot(self.name, self.lanes, self.nodes, self.edges)

    def __repr__(self) -> str:
        kind = type(self).__name__
        return f"<{kind} {self.name!r}, {len(self.nodes)} nodes on {len(self._tails)} lanes>"


def _driver_moves_graphs() -> bool:
    """Return whether driver and bindings can move a graph into another one."""
    if not hasattr(cu, "CUgraphChildGraphNodeOwnership"):
        return False
    return int(call(cu.cuDriverGetVersion)) >= CHILD_MOVE_MIN_CUDA


class Graph(GraphBase):
    """A graph definition that is instantiated and launched.

    Parameters
    ----------
    context
        Device.
    name
        Name for error messages and drawings.
    programmatic
        Enable programmatic dependent launch: a kernel whose source calls
        ``wait_for_previous_kernel()`` is launched while the previous kernel of its lane still runs.
        This applies only if no mark or other node is between the two kernels. Kernel nodes at such
        an edge cannot be changed in executables.

    Raises
    ------
    OptionError
        ``programmatic`` is set and the device or the driver does not support it.

    Attributes
    ----------
    status : PinnedArray
        int32 [16]. Word 0 is 0, or the reason why a replay failed: 1 a Python host step raised, 2 a
        native host step failed, 3 the interpreter is shutting down, 4 a mailbox missed its
        deadline. Word 1 is the number of that replay. The words stay set until
        ``GraphExec.clear()``. Kernels that must do nothing in a failed replay read them.
    payloads : list of Payload
        Payloads of the graph and of the graphs that were moved into it.
    child_status : list of PinnedArray
        Status words of the graphs that were moved into this one.
    unused_conditions : dict of int to str
        Names of conditions without a conditional node, by handle.
    """

    def __init__(
        self, context: Context, name: str = "graph", *, programmatic: bool = False
    ) -> None:
        if programmatic:
            _check_programmatic(context, name)
        status = PinnedArray(context, (STATUS_WORDS,), "int32")
        super().__init__(context, name, status, _native.GraphState(status.host_ptr))
        self.programmatic = programmatic
        self.payloads: list[Payload] = []
        self.child_status: list[PinnedArray] = []
        self.unused_conditions: dict[int, str] = {}
        self._resource: _native.Resource | None = None
        self._worker: MailboxWorker | None = None
        self._parent_name: str | None = None
        self._exec: weakref.ref[GraphExec] | None = None
        self.adopt_handle(int(call(cu.cuGraphCreate, 0)))

    def adopt_handle(self, handle: int) -> None:
        """Take ownership of a CUgraph, such as a captured one, and use it for this definition."""
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
        # The nodes of a moved graph live on in its parent.
        if self._parent_name is None:
            self.check_open()

    def moved_into(self, parent: GraphBase, root: Graph) -> None:
        """Hand ownership and host-side state over to the graph that contains this one now."""
        if self._resource is not None:
            self._resource.disown()
        _native.adopt_state(self.state, root.state)
        root.payloads.extend(self.payloads)
        root.unused_conditions.update(self.unused_conditions)
        root.child_status.extend((self.status, *self.child_status))
        self._resource = None
        self._parent_name = parent.name

    def payload(self, value: object = None, *, name: str = "payload") -> Payload:
        """Create a per-replay value for host steps of this graph.

        Parameters
        ----------
        value
            Initial value; see :class:`Payload`.
        name
            Name for error messages.
        """
        payload = Payload(self.state, value, name)
        self.payloads.append(payload)
        return payload

    def wait_for_earlier_launches(self) -> None:
        """Wait for launches of an earlier executable: their host steps are still being counted."""
        if self._exec is not None:
            self.context.synchronize()

    @property
    def worker(self) -> MailboxWorker:
        """The thread for mailboxes that were added without a worker; started on first use."""
        with self._lock:
            if self._worker is None:
                self._worker = MailboxWorker(name="mailbox")
            return self._worker

    def instantiate(self, *, priorities: bool = False) -> GraphExec:
        """Create the executable. A definition has at most one open executable.

        Parameters
        ----------
        priorities
            Whether kernel nodes run with the priorities they were added with. Default: all nodes
            run with the priority of the stream that the graph is launched on.

        Raises
        ------
        OptionError
            An executable of this definition is still open (two executables would share the status
            words), or a condition has no conditional node.
        DeviceError
            The driver rejected the graph.
        """
        self._check_no_executable()
        self.wait_for_earlier_launches()  # without the lock: host work may take arbitrarily long
        with self._lock:
            self._check_no_executable()
            for name in self.unused_conditions.values():
                raise OptionError(
                    f"condition {name!r} of graph {self.name!r} controls no conditional node"
                )
            executable = GraphExec(self, priorities)
            self._exec = weakref.ref(executable)
            return executable

    def _check_no_executable(self) -> None:
        if self.executable is not None:
            raise OptionError(f"graph {self.name!r} has an open executable; close it first")

    def set_executable(self, executable: GraphExec) -> None:
        """Record that an executable was updated to this definition."""
        self._exec = weakref.ref(executable)

    @property
    def executable(self) -> GraphExec | None:
        """The open executable that runs this definition; None if there is none."""
        executable = self._exec() if self._exec is not None else None
        if executable is None or not executable.is_running(self.state):
            return None
        return executable

    def close(self) -> None:
        """Release the definition. Executables and launches in flight are not affected."""
        with self._lock:
            self._resource = None
        _native.flush(1.0)


def _check_programmatic(context: Context, name: str) -> None:
    major = context.attribute("COMPUTE_CAPABILITY_MAJOR")
    cuda = call(cu.cuDriverGetVersion)
    if major < PROGRAMMATIC_MIN_CAPABILITY or cuda < PROGRAMMATIC_MIN_CUDA:
        raise OptionError(
            f"graph {name!r} cannot have programmatic edges: they need compute capability 9.0 and "
            f"CUDA 12.3; this device has {major}.x and {cuda // 1000}.{cuda % 1000 // 10}"
        )


class GraphBody(GraphBase):
    """The body of a conditional node. Created by ``if_``, ``if_else`` and ``while_``.

    It has lanes like a graph. Only kernels, copies, fills, child graphs and further conditionals
    can be added. Everything that its nodes use lives as long as the graph that contains it.

    Parameters
    ----------
    root
        Graph that contains the conditional node.
    name
        Name for error messages and drawings.
    handle
        CUgraph of the body, which the driver owns.
    """

    def __init__(self, root: Graph, name: str, handle: int) -> None:
        super().__init__(root.context, name, root.status, root.state)
        self._root = root
        self._handle = handle

    @property
    def handle(self) -> int:
        """The CUgraph of the body as an integer."""
        self._root.check_open()
        return self._handle

    @property
    def root(self) -> Graph:
        """The graph that contains the conditional node."""
        return self._root

    def check_node_kind(self, kind: str, name: str, child: Graph | None = None) -> None:
        """Raise OptionError for a node, also of a child graph, that a body cannot contain."""
        if kind not in BODY_NODE_KINDS:
            raise OptionError(
                f"{kind} node {name!r} is not allowed in the body of conditional {self.name!r}: "
                "the driver allows kernels, copies, fills, child graphs and conditionals there"
            )
        if child is None:
            return
        for node in child.nodes:
            nested = child.child_graphs.get(node.index)
            self.check_node_kind(node.kind, f"{name}/{node.name}", nested)


@dataclass(frozen=True)
class GraphMark:
    """A point in a lane of a graph that other lanes can wait for.

    Attributes
    ----------
    graph
        Graph or body of the lane.
    name
        Name for error messages.
    nodes
        Indices of the nodes that a waiting lane depends on.
    """

    graph: GraphBase
    name: str
    nodes: tuple[int, ...]


class GraphLane:
    """A lane that adds nodes to a graph. Created by :meth:`GraphBase.lane`."""

    def __init__(self, graph: GraphBase, name: str) -> None:
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
        """Add a kernel node. Argument values are copied now.

        Parameters
        ----------
        kernel
            Kernel to launch.
        grid, block
            Dimensions: an int, or a triple of ints.
        args
            Arguments, see :meth:`Kernel.pack`.
        shared
            Bytes of dynamic shared memory.
        name
            Node name. Default: that of the kernel.
        priority
            Launch priority; lower values run first. It takes effect in executables that were
            instantiated with ``priorities=True``.
        """
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

        self.graph.add(
            "kernel",
            name or kernel.name,
            self.name,
            keep_owners(packed.owners),
            make,
            kernel.waits_for_previous,
        )

    def copy(self, dst: Array, src: Array, *, name: str | None = None) -> None:
        """Add a copy node between device and pinned arrays of the same size in bytes."""
        to, source = check_copy(dst, src)
        self._add(
            "copy",
            name or "copy",
            (to.owner, source.owner),
            lambda graph, dependencies, _: nodes.add_copy(graph, dependencies, to, source),
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
            lambda graph, dependencies, _: nodes.add_fill(
                graph, dependencies, address, value, nbytes
            ),
        )

    def child(self, child: Graph, *, name: str | None = None) -> None:
        """Move another graph into this one as a single node.

        The child's host steps are numbered, fail and are skipped together with those of this graph.
        The child can no longer be edited or instantiated. It must not have an open executable.
        Requires CUDA 12.9, driver and bindings.
        """
        self.graph.add_child(child, self.name, name)

    def host(
        self,
        work: HostWork,
        *,
        name: str | None = None,
        spin: Spin = False,
        payload: Payload | None = None,
    ) -> None:
        """Add a host node; see :mod:`graft.cudagraph.hostwork`.

        Parameters
        ----------
        work
            Callable, PythonWork or NativeWork.
        name
            Node name. Default: that of the work.
        spin
            Whether the driver thread spins while it waits, see
            :func:`~graft.cudagraph.hostwork.hostfunc`.
        payload
            Payload of this graph. Python work receives its value before the other arguments, native
            work in place of ``data``.
        """
        item = as_work(work)
        spinning = resolve_spin(spin)
        graph = self.graph
        if payload is not None and payload.state is not graph.state:
            raise OptionError(f"payload {payload.name!r} does not belong to graph {graph.name!r}")
        title = name or item.title
        native_payload = None if payload is None else payload.native
        owners = (graph.status.owner, item.keep)
        graph.add(
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
    ) -> None:
        """Add host work that a worker thread runs: a request node and a node that waits for it.

        The wait is a batch memory operation of the driver. Use :meth:`spinkernel` on devices
        without memory operations in graphs.

        Parameters
        ----------
        work
            Callable, PythonWork or NativeWork.
        worker
            Thread that runs the work. Default: one thread per graph.
        deadline_s
            Maximum seconds from the request to the end of the work. After the deadline the device
            wait is released and the replay fails with the name of this step. The executable then
            accepts no launch until the work has returned.
        replay_deadline_s
            Maximum seconds from the launch to the request; the replay fails if they pass. None: no
            limit.
        output
            Array for the results. The work fills a private buffer (the last argument of a callable,
            ``current_output()`` of native work), which is copied to ``output`` only if the work
            ends before the deadline.
        name
            Node name. Default: that of the work.
        """
        limits = Limits(deadline_s, replay_deadline_s, deadline_s)
        self._add_mailbox(work, worker, limits, output, name, spinkernel=False)

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
    ) -> None:
        """Add host work like :meth:`mailbox`, with a spinning one-thread kernel as the wait.

        The kernel ends after ``device_deadline_s`` seconds of the device's clock (default: twice
        ``deadline_s``), even if no host thread runs any more. It occupies a block slot of a
        multiprocessor while it waits. The other parameters are those of :meth:`mailbox`.
        """
        device_s = 2.0 * deadline_s if device_deadline_s is None else device_deadline_s
        limits = Limits(deadline_s, replay_deadline_s, device_s)
        self._add_mailbox(work, worker, limits, output, name, spinkernel=True)

    def _add_mailbox(
        self,
        work: HostWork,
        worker: MailboxWorker | None,
        limits: Limits,
        output: PinnedArray | None,
        name: str | None,
        *,
        spinkernel: bool,
    ) -> None:
        graph = self.graph
        thread = graph.root.worker if worker is None else worker
        box = Mailbox(graph.context, work, thread, limits, output, spinkernel=spinkernel)
        title = name or box.item.title
        owners = (graph.status.owner, *box.owners)
        graph.add_pair(
            self.name,
            NodeSpec(
                "request",
                f"request: {title}",
                box.attach_port(graph.state, title, owners),
                box.add_request,
            ),
            NodeSpec("wait", f"answer: {title}", keep_owners(owners), box.add_wait),
        )

    def record_event(self, event: Event, *, name: str | None = None) -> None:
        """Add a node that records an event in every replay, for waits outside this graph."""
        self._add_event("event record", event, cu.cuGraphAddEventRecordNode, name)

    def wait_event(self, event: Event, *, name: str | None = None) -> None:
        """Add a node that waits for the event as it was recorded before the replay's launch."""
        self._add_event("event wait", event, cu.cuGraphAddEventWaitNode, name)

    def _add_event(
        self, kind: str, event: Event, add_node: Callable[..., tuple], name: str | None
    ) -> None:
        if not isinstance(event, Event):
            raise OptionError(f"lane {self.name!r} needs an Event, not {type(event).__name__}")
        handle = event.handle
        self._add(
            kind,
            name or event.name,
            (event.owner,),
            lambda graph, dependencies, _: nodes.add_event(add_node, graph, dependencies, handle),
        )

    def record(self, name: str | None = None) -> GraphMark:
        """Mark this point of the lane; on an empty lane it is the start of the graph."""
        return GraphMark(self.graph, name or f"mark on {self.name}", self.graph.tail(self.name))

    def wait(self, mark: Any) -> None:
        """Make the next node of this lane depend on a mark of this graph as well."""
        if not isinstance(mark, GraphMark) or mark.graph is not self.graph:
            name = getattr(mark, "name", mark)
            raise OptionError(
                f"lane {self.name!r} of graph {self.graph.name!r} cannot wait for {name!r}, "
                "which is not a mark of this graph"
            )
        self.graph.add_dependencies(self.name, mark.nodes)

    def _add(self, kind: str, name: str, owners: tuple[object, ...], make: Make) -> None:
        self.graph.add(kind, name, self.name, keep_owners(owners), make)

    def __repr__(self) -> str:
        return f"<GraphLane {self.name!r} of {self.graph!r}>"
