"""Gathers over NCCL, by nccl4py: enqueued on streams, and captured as child graphs of graphs."""

from __future__ import annotations

from typing import Any

import numpy as np

from graft.cudagraph.context import Context
from graft.cudagraph.driver import call, cu
from graft.cudagraph.errors import OptionError
from graft.cudagraph.graph import Graph, GraphLane
from graft.cudagraph.lanes import Lane, StreamLane
from graft.cudagraph.memory import DeviceArray
from graft.cudagraph.ranks import Gather, Ranks
from graft.cudagraph.streams import Stream

_ID_BYTES = 128


class NcclGather(Gather):
    """NCCL only moves: a kernel adds up, in rank order.

    Raises
    ------
    OptionError
        nccl4py is missing.
    """

    def __init__(self, context: Context, ranks: Ranks, most: int) -> None:
        try:
            from nccl import core
        except ImportError as error:
            raise OptionError(
                "several ranks on CUDA devices need nccl4py: pip install "
                f"'graft-cuda[nccl]' ({error})"
            ) from error
        self._core: Any = core
        self._communicator: Any = None
        super().__init__(context, ranks, most)
        self._context = context
        self._stream = Stream(context, "nccl")

    def connect(self) -> None:
        """See `Gather`."""
        core = self._core
        ranks = self._ranks
        name = np.zeros(_ID_BYTES, np.uint8)
        if ranks.rank == 0:
            name[:] = np.frombuffer(bytes(core.get_unique_id()), np.uint8)
            ranks.send(ranks.others, name)
        else:
            ranks.receive(0, name, timeout_s=ranks.deadline_s)
        met = core.UniqueId.from_bytes(name.tobytes())
        self._communicator = core.Communicator.init(ranks.size, ranks.rank, met)

    def gather(self, lane: Lane, own: DeviceArray) -> DeviceArray:
        """See `Gather`."""
        everyones = self._everyones(own)
        if isinstance(lane, StreamLane):
            self._communicator.allgather(own, everyones, stream=lane.stream.handle)
        elif isinstance(lane, GraphLane):
            child = Graph(self._context, "sums of ranks")
            stream = self._stream.handle
            mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
            call(cu.cuStreamBeginCapture, stream, mode)
            try:
                self._communicator.allgather(own, everyones, stream=stream)
            finally:
                child.become(int(call(cu.cuStreamEndCapture, stream)))
            lane.child(child)
        else:
            raise OptionError(f"NCCL gathers on streams and in graphs, not on {lane!r}")
        return everyones
