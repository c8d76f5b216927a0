"""Executable graphs: upload, launch, update, synchronization and errors of host steps."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from graft.cudagraph.driver.driver import (
    NOT_READY,
    call,
    check_code,
    check_timeout,
    cu,
    prepare_driver_call,
)
from graft.cudagraph.driver.handles import StreamLike, stream_handle
from graft.cudagraph.driver.memory import PinnedArray
from graft.cudagraph.driver.stacks import describe_running
from graft.cudagraph.errors import DeadlineError, DeviceError, OptionError
from graft.cudagraph.graph.nodes import KernelLaunch, Node, kernel_params
from graft.cudagraph.host.hostwork import raise_failure
from graft.cudagraph.host.payload import Payload, native_address
from graft.cudagraph.kernels.kernels import Kernel
from graft.cudagraph.lanes import Dims, check_launch
from graft.native import _native

#: Code that methods of the native executable return after it was closed.
CLOSED = -1
#: Maximum number of operand sets of changed kernel nodes that are kept alive because launches in
#: flight still use them. If there are more, `update_kernel` waits for these launches.
MAX_REPLACED = 256
#: Result of cuGraphExecUpdate if it rejects the new graph (CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE).
UPDATE_FAILURE = 910
#: Interval at which `clear` checks whether work that missed its deadline has returned.
OVERRUN_POLL_S = 0.001


class NodeTable(Protocol):
    """A graph or a conditional body whose nodes can be changed in an executable."""

    name: str

    def find(self, node: Node | str, action: str, kind: str) -> int: ...


@runtime_checkable
class Definition(NodeTable, Protocol):
    """The attributes of :class:`Graph` that :class:`GraphExec` uses."""

    nodes: list[Node]
    status: PinnedArray
    state: _native.GraphState
    payloads: list[Payload]
    child_status: list[PinnedArray]

    @property
    def handle(self) -> int: ...
    @property
    def executable(self) -> GraphExec | None: ...
    def editing(self) -> AbstractContextManager[int]: ...
    def node_index(self, handle: int) -> int | None: ...
    def place_launch_counter(self) -> None: ...
    def set_executable(self, executable: GraphExec) -> None: ...


class GraphExec:
    """An executable graph. Created by :meth:`Graph.instantiate`; it may outlive the Graph object.

    Each launch is one replay. Launches of one executable run one after another, even if they are
    enqueued on different streams. After a host step has failed, all later host steps are skipped
    until :meth:`clear` is called. Kernels can read the failure in the graph's ``status``. `name`
    and `status` are those of the current definition, which :meth:`update` replaces.
    """

    def __init__(self, graph: Definition, priorities: bool = False) -> None:
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
        self._use_definition(graph)
        for payload in self._payloads:
            payload.native.restart()  # replays of this executable are numbered from 1

        # The driver copies the parameters of a changed node but does not keep alive the memory to
        # which the parameters refer. The executable therefore holds the owners of the current
        # operands by node, and the owners of replaced operands until no launch is in flight.
        self._operands: dict[int, object] = {}
        self._replaced_operands: list[object] = []
        self._native.keep((self._operands, self._replaced_operands))

    def _use_definition(self, graph: Definition) -> None:
        """Make `graph` the definition of all later launches, after instantiation or an update.

        Later launches use the graph's state (replay numbers and first failure), its status words,
        from which kernels read the failure, and its payloads.
        """
        self.name = graph.name
        self.status = graph.status
        self._state = graph.state
        self._payloads = graph.payloads
        self._child_status = graph.child_status

    def is_running(self, state: _native.GraphState) -> bool:
        """Return whether the executable is open and ``state`` belongs to its current definition."""
        return not self._closed and self._state is state

    @property
    def handle(self) -> int:
        """The CUgraphExec as an integer."""
        self._check_open()
        return self._native.handle

    @property
    def launches(self) -> int:
        """Number of launches so far. Replay i is launch i, counted from 1."""
        return self._native.launches

    def upload(self, stream: StreamLike) -> None:
        """Enqueue an upload of the graph, so that the first launch is as fast as later ones."""
        self._check_open()
        handle = stream_handle(stream, "upload()")
        prepare_driver_call("cuGraphUpload")
        self._check_outcome(self._native.upload(handle))

    def launch(self, stream: StreamLike) -> None:
        """Enqueue one replay on a stream of graft or of another library.

        If a host step of an earlier replay has failed, nothing is launched and HostWorkError is
        raised.
        """
        self.check()
        self._check_open()
        handle = stream_handle(stream, "launch()")
        prepare_driver_call("cuGraphLaunch")
        self._check_outcome(self._native.launch(handle))

    def update(self, graph: Definition, timeout_s: float | None = None) -> None:
        """Update this executable to another definition of the same topology.

        The call first waits for earlier launches. Afterwards this executable belongs to `graph`:
        the old definition can be instantiated again, and `graph` cannot. Replay numbers continue,
        because they count the launches of this executable under both definitions.

        Raises
        ------
        OptionError
            The definition has another open executable, or its topology differs; the message names
            the node.
        DeadlineError
            The earlier launches did not finish within ``timeout_s`` seconds; nothing was updated.
        """
        self._check_open()
        if not isinstance(graph, Definition):
            raise OptionError(
                f"executable {self.name!r} can only be updated to a Graph, not {graph!r}"
            )
        if graph.executable not in (None, self):
            raise OptionError(
                f"graph {graph.name!r} has an open executable of its own; close it first"
            )
        self.synchronize(timeout_s)
        graph.place_launch_counter()
        prepare_driver_call("cuGraphExecUpdate")
        with graph.editing() as handle:
            code, result, node = self._native.update(handle, graph.state)
        if code == UPDATE_FAILURE:
            index = graph.node_index(node)
            where = "" if index is None else f" at node {index} {graph.nodes[index].name!r}"
            reason = cu.CUgraphExecUpdateResult(result).name.rpartition("ERROR_")[2]
            reason = reason.lower().replace("_", " ")
            raise OptionError(f"{self.name!r} cannot be updated to {graph.name!r}{where}: {reason}")
        self._check_outcome((code, "cuGraphExecUpdate"))
        self._use_definition(graph)
        graph.set_executable(self)

    def set_payload(self, payload: Payload, value: object) -> None:
        """Set the value of a payload for all later launches; see :class:`Payload`.

        The payload must have been created by the graph that this executable runs: the graph that
        was instantiated, or the one that :meth:`update` was last called with.
        """
        self._check_open()
        if not isinstance(payload, Payload):
            raise OptionError(f"set_payload() needs the Payload of a graph, not {payload!r}")
        if payload not in self._payloads:
            raise OptionError(f"payload {payload.name!r} does not belong to graph {self.name!r}")
        self._native.set_payload(payload.native, value, native_address(value))

    def update_kernel(
        self,
        node: Node | str,
        kernel: Kernel,
        grid: Dims,
        block: Dims,
        args: Iterable[object],
        *,
        shared: int = 0,
        within: NodeTable | None = None,
    ) -> None:
        """Change the parameters of a kernel node for later launches; see :meth:`GraphLane.kernel`.

        `node` is the Node that a lane of the definition returned, or its name. If the node is given
        by name and is in the body of a conditional, pass the body as `within`.
        """
        handle = self._find_kernel_node(node, within)
        dims = check_launch(kernel, grid, block, shared)
        packed = kernel.pack(args)
        kernel.allow_shared(shared)
        params = kernel_params(KernelLaunch(kernel.function, *dims, shared, packed))
        # Store the owners of the new operands before the node is changed, because another thread
        # may launch right after the change.
        self._hold_operands(handle, packed.owners)
        prepare_driver_call("cuGraphExecKernelNodeSetParams")
        self._check_outcome(self._native.set_kernel(handle, params.getPtr()))
        del packed, params  # must live until the call has returned
        self._release_replaced_operands()

    def set_enabled(
        self, node: Node | str, enabled: bool, *, within: NodeTable | None = None
    ) -> None:
        """Enable or disable a kernel node for later launches. A disabled node does nothing.

        The driver cannot disable host nodes. If a host step should do nothing in some replays, pass
        it a payload and let the step check the payload's value. `node` and `within` have the same
        meaning as in :meth:`update_kernel`.
        """
        handle = self._find_kernel_node(node, within)
        prepare_driver_call("cuGraphNodeSetEnabled")
        self._check_outcome(self._native.set_enabled(handle, enabled))

    def _find_kernel_node(self, node: Node | str, within: NodeTable | None) -> int:
        self._check_open()
        table = within or self._definition()
        if table is None:
            raise OptionError(
                f"cannot change a node of {self.name!r}: its definition no longer exists; keep the "
                "Graph object alive"
            )
        return table.find(node, "change the", "kernel")

    def _hold_operands(self, node: int, owners: object) -> None:
        if node in self._operands:
            self._replaced_operands.append(self._operands[node])
        self._operands[node] = owners

    def _release_replaced_operands(self) -> None:
        """Drop the owners of kernel operands that updates have replaced, if no launch is in flight.

        If there are more than `MAX_REPLACED` sets of owners, wait for the launches and then drop
        them.
        """
        replaced = self._replaced_operands
        if len(replaced) > MAX_REPLACED:
            self._wait_or_raise(None)
            replaced.clear()
        elif replaced and self.query():
            replaced.clear()

    def query(self) -> bool:
        """Return whether every launch has finished."""
        self._check_open()
        prepare_driver_call("cuEventQuery")
        code, api = self._native.query()
        if code == NOT_READY:
            return False
        self._check_outcome((code, api))
        return True

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the launches made before this call; return False after `timeout_s` seconds.

        Unlike :meth:`synchronize`, this method does not raise the errors of host steps.
        """
        self._check_open()
        check_timeout(timeout_s)
        prepare_driver_call("cuEventQuery")
        finished, code = self._native.wait(timeout_s)
        if finished:
            self._check_outcome((code, "cuEventQuery"))
        return bool(finished)

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Wait for the launches made before this call and raise the error of a failed host step.

        Raises
        ------
        DeadlineError
            The launches did not finish within ``timeout_s`` seconds. The message names the host
            steps that are running. The replay continues: a running graph cannot be stopped.
        HostWorkError
            A host step failed.
        DeviceError
            The device failed.
        """
        self._wait_or_raise(timeout_s)
        self.check()

    def check(self) -> None:
        """Raise HostWorkError if a host step of an earlier replay has failed."""
        failure = self._state.pending() if self._state.failed else None
        if failure is not None:
            raise_failure(failure, f"of graph {self.name!r}")

    def clear(self, timeout_s: float | None = None) -> None:
        """Wait until every launch has finished, then discard the failure and enable replays again.

        DeadlineError is raised if a launch has not finished within ``timeout_s`` seconds, or
        mailbox work that missed its deadline is still running. Such work could write to data that
        the next replay reads.
        """
        start = time.monotonic()
        self._wait_or_raise(timeout_s)
        while self._state.overrun:
            if timeout_s is not None and time.monotonic() - start > timeout_s:
                raise DeadlineError(
                    f"work of graph {self.name!r} that missed its deadline is still "
                    f"running{describe_running()}"
                )
            time.sleep(OVERRUN_POLL_S)
        self._state.clear()

    def close(self) -> None:
        """Release the executable. Launches in flight finish."""
        if not self._closed:
            self._closed = True
            self._native.close()
            _native.flush(1.0)

    def _wait_or_raise(self, timeout_s: float | None) -> None:
        if not self.wait(timeout_s):
            raise DeadlineError(
                f"graph {self.name!r} was busy for {timeout_s:g} s{describe_running()}"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise OptionError(f"the executable of graph {self.name!r} is closed")

    def _check_outcome(self, outcome: tuple[int, str]) -> None:
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
