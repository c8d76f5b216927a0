"""The lane that builds graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graft.cudagraph import nodes
from graft.cudagraph.cells import Cell
from graft.cudagraph.children import add_moved, child_maker
from graft.cudagraph.errors import OptionError
from graft.cudagraph.events import Event
from graft.cudagraph.hostwork import HostWork, NativeWork, Spin, as_work, use_spin
from graft.cudagraph.kernels import Kernel
from graft.cudagraph.lanes import Array, Dims, check_copy, check_launch
from graft.cudagraph.mailbox import Limits, MailboxWorker
from graft.cudagraph.mailbox_nodes import add_mailbox
from graft.cudagraph.memory import PinnedArray, check_byte
from graft.native import _native

if TYPE_CHECKING:
    from graft.cudagraph.conditional import Condition, GraphBody
    from graft.cudagraph.graph import Graph

__all__ = ["Again", "GraphLane", "GraphMark"]

MOST_CASES = 1024

#: A lane's method, its arguments and options: how a node is added to another graph.
Again = tuple[str, tuple[Any, ...], dict[str, Any]]


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

        ``priority`` (lower runs first, as for streams) counts in executables made with
        ``instantiate(priorities=True)``.
        """
        dims = check_launch(kernel, grid, block, shared)
        values = tuple(args)
        packed = kernel.pack(values)
        kernel.allow_shared(shared)

        def make(graph: int, after: list[Any], _: tuple) -> Any:
            node = nodes.add_kernel(graph, after, kernel.function, *dims, shared, packed)
            if priority is not None:
                nodes.set_priority(node, priority)
            return node

        again: Again = ("kernel", (kernel, *dims, values), {"shared": shared, "priority": priority})
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

    def child(
        self, child: Graph | object, *, name: str | None = None, move: bool = False
    ) -> None:
        """Add another graph as one node.

        Parameters
        ----------
        child : Graph, or a captured graph
            A Graph is copied as it is now; its copy's host steps count, fail and stand down with
            this graph. A captured graph is the CUgraph of a finished capture (or CuPy's Graph, or
            torch's CUDAGraph that kept its graph); the driver copies it, and its host work belongs
            to this graph from now on.
        move : bool
            Let the Graph itself become the node, also with mailboxes and conditionals, of which
            there are no copies. It belongs to this graph then: it is neither edited nor
            instantiated any more. Where driver or bindings cannot move (before CUDA 12.9) it is
            copied and dropped, or refused if there is no copy of it.

        Raises
        ------
        OptionError
            It is no graph, has a node of which there is no copy, or is part of another graph.
        DeviceError
            The driver refused, as it does for captured graphs with conditionals.
        """
        from graft.cudagraph.graph import Graph

        title = name or getattr(child, "name", None) or "child"
        self.graph.refuse("child", title, child if isinstance(child, Graph) else None)
        if move and isinstance(child, Graph):
            add_moved(self, child, title)
            return
        make, part = child_maker(self.graph, child, title)
        again: Again | None = None if part is None else ("child", (part,), {})
        self._add("child", title, (), make, again)

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
        if cell is not None and cell.graph_state is not graph.state:
            raise OptionError(f"{cell.name!r} is no cell of graph {graph.name!r}")
        payload = () if cell is None else (cell.native,)
        title = name or item.title
        keep = (graph.status.owner, item.keep if isinstance(item, NativeWork) else None)

        def attach(handle: int) -> tuple:
            if isinstance(item, NativeWork):
                return _native.attach_native(
                    handle, graph.state, title, item.address, item.data, keep, *payload
                )
            return _native.attach_python(
                handle, graph.state, title, item.fn, item.args, keep, *payload
            )

        def make(handle: int, after: list[Any], attached: tuple) -> Any:
            return nodes.add_host(handle, after, attached[3], attached[4], spinning)

        again: Again | None = ("host", (item,), {"spin": spin}) if cell is None else None
        graph.add("host", title, self.name, attach, make, again)

    def if_(self, condition: Condition, *, name: str = "if") -> GraphBody:
        """Add an IF node and return its body, which runs when the condition is not 0."""
        return self._conditional("if", condition, 1, name)[0]

    def if_else(self, condition: Condition, *, name: str = "if") -> tuple[GraphBody, GraphBody]:
        """Add an IF node with two bodies; the second runs when the condition is 0."""
        then, otherwise = self._conditional("if", condition, 2, name)
        return then, otherwise

    def while_(self, condition: Condition, *, name: str = "while") -> GraphBody:
        """Add a WHILE node and return its body, which runs as long as the condition is not 0."""
        return self._conditional("while", condition, 1, name)[0]

    def switch(self, condition: Condition, cases: int, *, name: str = "switch") -> list[GraphBody]:
        """Add a SWITCH node and return its bodies: body i runs when the condition is i.

        None of them runs for a condition of ``cases`` or more.
        """
        if not isinstance(cases, int) or not 1 <= cases <= MOST_CASES:
            raise OptionError(f"switch {name!r} must have 1 to {MOST_CASES} cases, not {cases!r}")
        return self._conditional("switch", condition, cases, name)

    def _conditional(
        self, kind: str, condition: Condition, bodies: int, name: str
    ) -> list[GraphBody]:
        from graft.cudagraph.conditional import add_conditional

        return add_conditional(self.graph, self.name, kind, condition, bodies, name)

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

    def record_event(self, event: Event, *, name: str | None = None) -> None:
        """Add a node that records an event in every replay, for who waits outside of this graph."""
        self._event("event record", event, nodes.add_event_record, "record_event", name)

    def wait_event(self, event: Event, *, name: str | None = None) -> None:
        """Add a node that waits for what an event named when the replay was launched."""
        self._event("event wait", event, nodes.add_event_wait, "wait_event", name)

    def _event(
        self, kind: str, event: Event, add: Callable[..., Any], method: str, name: str | None
    ) -> None:
        if not isinstance(event, Event):
            raise OptionError(f"lane {self.name!r} needs an Event, not {type(event).__name__}")
        handle = event.handle

        def make(graph: int, after: list[Any], _: tuple) -> Any:
            return add(graph, after, handle)

        self._add(kind, name or event.name, (event.owner,), make, (method, (event,), {}))

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
        again: Again | None,
    ) -> None:
        self.graph.add(kind, name, self.name, self.graph.keep(owners), make, again)

    def __repr__(self) -> str:
        return f"<GraphLane {self.name!r} of {self.graph!r}>"
