"""Executable graphs: upload, launch, update, wait, and the errors of their host steps."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from graft.cudagraph.cells import Cell, address_of
from graft.cudagraph.driver import NOT_READY, call, check_code, cu, enter
from graft.cudagraph.errors import DeadlineError, DeviceError, OptionError
from graft.cudagraph.hostwork import raise_failure
from graft.cudagraph.kernels import Kernel
from graft.cudagraph.lanes import Dims, check_launch
from graft.cudagraph.memory import PinnedArray
from graft.cudagraph.nodes import Node, kernel_params
from graft.cudagraph.stacks import describe_running
from graft.cudagraph.streams import Stream
from graft.native import _native

CLOSED = -1
#: Replaced operand sets that may wait for launches in flight before an update waits for these.
MOST_REPLACED = 256
UPDATE_FAILURE = 910


@runtime_checkable
class Definition(Protocol):
    """What an executable needs of a graph."""

    name: str
    nodes: list[Node]
    status: PinnedArray
    state: _native.GraphState
    cells: list[Cell]
    lent: list[PinnedArray]

    @property
    def handle(self) -> int: ...
    @property
    def executable(self) -> GraphExec | None: ...
    def editing(self) -> AbstractContextManager[int]: ...
    def node_index(self, handle: int) -> int | None: ...
    def find(self, node: Node | str, what: str, kind: str) -> int: ...
    def adopted_by(self, executable: GraphExec) -> None: ...


class GraphExec:
    """What is launched. Made by :meth:`Graph.instantiate`; it may outlive the Graph object.

    Launches of one executable run one after another, on whichever streams they are enqueued.
    After a host step failed, later replays stand down (their host steps do nothing, and the
    graph's ``status`` says so to kernels) until :meth:`clear`.

    Attributes
    ----------
    status : PinnedArray
        The status words of the definition that runs now; see :class:`Graph`.
    """

    def __init__(self, graph: Definition, priorities: bool = False) -> None:
        self.name = graph.name
        self._state = graph.state
        self.status = graph.status
        flag = cu.CUgraphInstantiate_flags.CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY
        handle = call(cu.cuGraphInstantiate, graph.handle, int(flag) if priorities else 0)
        try:
            event = call(cu.cuEventCreate, cu.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        except BaseException:
            call(cu.cuGraphExecDestroy, handle)
            raise
        self._native = _native.Exec(int(handle), int(event), graph.state)
        self._closed = False
        self._definition = weakref.ref(graph)
        self._cells = graph.cells
        self._lent = graph.lent
        for cell in self._cells:
            cell.native.restart()  # replays of this executable count from 1
        # The driver copies a changed node's parameters and takes no ownership of what they refer
        # to: the present operands by node, and those that were replaced, until it is seen idle.
        self._operands: tuple[dict[int, object], list[object]] = ({}, [])
        self._native.keep(self._operands)

    def runs(self, state: _native.GraphState) -> bool:
        """Is it open and running the definition that has this state?"""
        return not self._closed and self._state is state

    @property
    def handle(self) -> int:
        """The CUgraphExec as an integer."""
        self._require_open()
        return self._native.handle

    @property
    def launches(self) -> int:
        """Launches so far; replay i is the i-th, from 1."""
        return self._native.launches

    def upload(self, stream: Stream) -> None:
        """Prepare the device, so that the first launch costs what later ones do."""
        self._require_open()
        enter("cuGraphUpload")
        self._check(self._native.upload(stream.handle))

    def launch(self, stream: Stream) -> None:
        """Enqueue one replay; raises HostWorkError instead where a host step of an earlier one
        failed."""
        self.check()
        self._require_open()
        enter("cuGraphLaunch")
        self._check(self._native.launch(stream.handle))

    def update(self, graph: Definition, timeout_s: float | None = None) -> None:
        """Let this executable run another definition of the same topology.

        Waits for what was launched before, since records of both definitions are numbered by
        replay. The old definition's records are released, and ``graph`` counts as instantiated.

        Raises
        ------
        OptionError
            The definition runs in another executable, or cannot be updated to; names the node.
        DeadlineError
            After ``timeout_s`` seconds; nothing is updated.
        """
        self._require_open()
        if not isinstance(graph, Definition):
            raise OptionError(f"executable {self.name!r} is updated to a Graph, not {graph!r}")
        if graph.executable not in (None, self):
            raise OptionError(f"graph {graph.name!r} has an open executable of its own")
        self.synchronize(timeout_s)
        enter("cuGraphExecUpdate")
        with graph.editing() as handle:
            code, result, node = self._native.update(handle, graph.state)
        if code == UPDATE_FAILURE:
            index = graph.node_index(node)
            where = "" if index is None else f" at node {index} {graph.nodes[index].name!r}"
            why = cu.CUgraphExecUpdateResult(result).name.rpartition("ERROR_")[2]
            why = why.lower().replace("_", " ")
            raise OptionError(f"{self.name!r} cannot be updated to {graph.name!r}{where}: {why}")
        self._check((code, "cuGraphExecUpdate"))
        self._cells = graph.cells
        self._lent = graph.lent
        self._state = graph.state
        self.status = graph.status
        self.name = graph.name
        graph.adopted_by(self)

    def set(self, cell: Cell, value: object) -> None:
        """Give a cell of this graph another value, for the launches from now on."""
        self._require_open()
        if cell not in self._cells:
            raise OptionError(f"{cell.name!r} is no cell of graph {self.name!r}")
        self._native.set_payload(cell.native, value, address_of(value))

    def update_kernel(
        self,
        node: Node | str,
        kernel: Kernel,
        grid: Dims,
        block: Dims,
        args: Iterable[object],
        *,
        shared: int = 0,
        within: Definition | None = None,
    ) -> None:
        """Change a kernel node of the definition (or of a body, ``within``) for later launches."""
        handle = self._find(node, within)
        dims = check_launch(kernel, grid, block, shared)
        packed = kernel.pack(args)
        kernel.allow_shared(shared)
        params = kernel_params(kernel.function, *dims, shared, packed)
        # Held before the change is made, so that a launch from another thread is safe.
        self._hold(handle, packed.owners)
        enter("cuGraphExecKernelNodeSetParams")
        self._check(self._native.set_kernel(handle, params.getPtr()))
        del packed, params  # not before the call has returned
        self._let_go()

    def set_enabled(
        self, node: Node | str, enabled: bool, *, within: Definition | None = None
    ) -> None:
        """Let a kernel node do its work in later launches, or nothing.

        The driver knows no such switch for host steps: one that should rest reads a flag in its
        cell.
        """
        handle = self._find(node, within)
        enter("cuGraphNodeSetEnabled")
        self._check(self._native.set_enabled(handle, enabled))

    def _find(self, node: Node | str, within: Definition | None) -> int:
        self._require_open()
        graph = within or self._definition()
        if graph is None:
            raise OptionError(
                f"cannot change a node of {self.name!r}: the definition, which names it, is gone"
            )
        return graph.find(node, "change the", "kernel")

    def _hold(self, node: int, owners: object) -> None:
        present, replaced = self._operands
        if node in present:
            replaced.append(present[node])
        present[node] = owners

    def _let_go(self) -> None:
        """Drop replaced operands that no launch uses any more: later ones have the new."""
        _, replaced = self._operands
        if len(replaced) > MOST_REPLACED:
            self._wait(None)
            replaced.clear()
        elif replaced and self.query():
            replaced.clear()

    def query(self) -> bool:
        """Return whether every launch has finished."""
        self._require_open()
        enter("cuEventQuery")
        code, api = self._native.query()
        if code != NOT_READY:
            self._check((code, api))
        return bool(code != NOT_READY)

    def finished(self, timeout_s: float | None = None) -> bool:
        """Wait for what was launched before the call; False where it takes longer."""
        self._require_open()
        enter("cuEventQuery")
        finished, code = self._native.wait(timeout_s)
        if finished:
            self._check((code, "cuEventQuery"))
        return bool(finished)

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Wait for what was launched before the call, and raise what host steps raised.

        Raises
        ------
        DeadlineError
            After ``timeout_s`` seconds; names the host steps that are running. The replay goes
            on: a running graph cannot be stopped.
        HostWorkError
            A host step failed.
        DeviceError
            The device failed.
        """
        self._wait(timeout_s)
        self.check()

    def check(self) -> None:
        """Raise HostWorkError when a host step of an earlier replay failed."""
        failure = self._state.pending() if self._state.failed else None
        if failure is not None:
            raise_failure(failure, f"of graph {self.name!r}")

    def clear(self, timeout_s: float | None = None) -> None:
        """Wait until every launch has finished, forget the failure and let replays run again.

        DeadlineError when a launch has not finished, or work whose mailbox was released is still
        running: it may write into what the next replay reads.
        """
        begun = time.monotonic()
        self._wait(timeout_s)
        while self._state.overrun:
            if timeout_s is not None and time.monotonic() - begun > timeout_s:
                raise DeadlineError(
                    f"work of graph {self.name!r} that was given up is still "
                    f"running{describe_running()}"
                )
            time.sleep(0.001)
        self._state.clear()

    def close(self) -> None:
        """Drop the executable; launches in flight finish."""
        if not self._closed:
            self._closed = True
            self._native.close()
            _native.flush(1.0)

    def _wait(self, timeout_s: float | None) -> None:
        if not self.finished(timeout_s):
            raise DeadlineError(
                f"graph {self.name!r} was busy for {timeout_s:g} s{describe_running()}"
            )

    def _require_open(self) -> None:
        if self._closed:
            raise OptionError(f"the executable of graph {self.name!r} is closed")

    def _check(self, outcome: tuple[int, str]) -> None:
        code, api = outcome
        if code == CLOSED:
            raise OptionError(f"the executable of graph {self.name!r} is closed")
        try:
            check_code(api, code)
        except DeviceError as error:
            error.add_note(f"graph {self.name!r}")
            raise

    def __repr__(self) -> str:
        state = " (closed)" if self._closed else f", {self.launches} launches"
        return f"<GraphExec {self.name!r}{state}>"
