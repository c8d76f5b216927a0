"""All-gather over NCCL (nccl4py).

On a stream lane, NCCL enqueues its work on the stream. On a graph lane, the work that NCCL enqueues
is captured and becomes a child graph.

An NCCL kernel waits for the other ranks without a deadline. The host therefore limits its wait for
a forward pass (``forward_limit_s``). A rank that exceeds the limit raises an error, and its exit
terminates the processes of all ranks.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from graft.cudagraph.driver.context import Context
from graft.cudagraph.driver.driver import call, cu, prepare_driver_call
from graft.cudagraph.driver.memory import DeviceArray
from graft.cudagraph.errors import DeadlineError, OptionError
from graft.cudagraph.graph.graph import Graph, GraphLane
from graft.cudagraph.lanes import Lane, StreamLane
from graft.cudagraph.ranks.ranks import AllGather, RankGroup
from graft.cudagraph.streams import Stream

_UNIQUE_ID_BYTES = 128


class NcclAllGather(AllGather):
    """All-gather over NCCL. The constructor raises OptionError if nccl4py is not installed.

    NCCL only moves data. Partial sums are added by a kernel in rank order, so that all ranks have
    bit-identical results.
    """

    def __init__(self, context: Context, ranks: RankGroup, max_elements: int) -> None:
        try:
            from nccl import core
        except ImportError as error:
            raise OptionError(
                "tensor parallelism on CUDA devices needs NCCL: pip install 'nccl4py[cu13]' "
                f"({error})"
            ) from error
        self.forward_limit_s = ranks.deadline_s
        self._core: Any = core
        self._communicator: Any = None
        super().__init__(context, ranks, max_elements)
        self._context = context
        self._stream = Stream(context, "nccl")

    def connect(self) -> None:
        """Create the NCCL communicator. Before that, rank 0 sends its unique id to the other ranks.

        DeadlineError is raised if a rank does not connect within the deadline of the group.
        """
        core = self._core
        ranks = self._ranks
        data = np.zeros(_UNIQUE_ID_BYTES, np.uint8)
        if ranks.rank == 0:
            data[:] = np.frombuffer(bytes(core.get_unique_id()), np.uint8)
            ranks.send(ranks.peers, data)
        else:
            ranks.receive(0, data, timeout_s=ranks.deadline_s)
        self._communicator = self._create_communicator(data.tobytes())

    def _create_communicator(self, unique_id: bytes) -> Any:
        """Create the communicator on another thread, because NCCL waits without a deadline.

        If NCCL does not create it within the deadline of the rank group, raise DeadlineError.
        """
        core = self._core
        ranks = self._ranks
        created: list[Any] = []
        errors: list[BaseException] = []

        def create() -> None:
            try:
                prepare_driver_call("ncclCommInitRank")
                name = core.UniqueId.from_bytes(unique_id)
                created.append(core.Communicator.init(ranks.size, ranks.rank, name))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=create, name="graft NCCL connection", daemon=True)
        thread.start()
        thread.join(ranks.deadline_s)
        if errors:
            raise errors[0]
        if not created:
            raise DeadlineError(
                f"rank {ranks.rank}: the NCCL communicator of {ranks.size} ranks was not created "
                f"within {ranks.deadline_s:g} s"
            )
        return created[0]

    def all_gather(self, lane: Lane, local: DeviceArray) -> DeviceArray:
        gathered = self._gathered_like(local)
        if isinstance(lane, StreamLane):
            self._communicator.allgather(local, gathered, stream=lane.handle)
        elif isinstance(lane, GraphLane):
            lane.child(self._capture(local, gathered))
        else:
            raise OptionError(f"NCCL needs a StreamLane or a GraphLane, not {lane!r}")
        return gathered

    def _capture(self, local: DeviceArray, gathered: DeviceArray) -> Graph:
        """Capture the work that NCCL enqueues for an all-gather, and return it as a graph."""
        stream = self._stream.handle
        mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        call(cu.cuStreamBeginCapture, stream, mode)
        try:
            self._communicator.allgather(local, gathered, stream=stream)
        finally:
            captured = call(cu.cuStreamEndCapture, stream)
        return Graph.from_capture(self._context, captured, name="all-gather")
