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
from graft.cudagraph.ranks import Ranks
from graft.cudagraph.streams import Stream

_ID_BYTES = 128


class NcclGather:
    """Brings what every rank has to all of them. NCCL only moves: a kernel adds up, in rank order.

    Parameters
    ----------
    most : elements of the largest array that one rank has.

    Raises
    ------
    OptionError
        nccl4py is missing.
    """

    def __init__(self, context: Context, ranks: Ranks, most: int) -> None:
        try:
            from nccl import core
        except ImportError as error:
            raise OptionError("several ranks on CUDA devices need nccl4py: pip install "
                              f"'graft-cuda[nccl]' ({error})") from error  # fmt: skip
        self._core: Any = core
        self._communicator: Any = None
        self._context, self._ranks = context, ranks
        self._own = DeviceArray(context, (most,), "float32")
        self._all = DeviceArray(context, (ranks.size * most,), "float32")
        self._stream = Stream(context, "nccl")

    def connect(self) -> None:
        """Meet the other ranks, who all call this, before the first gather."""
        core, ranks, name = self._core, self._ranks, np.zeros(_ID_BYTES, np.uint8)
        if ranks.rank == 0:
            name[:] = np.frombuffer(bytes(core.get_unique_id()), np.uint8)
            ranks.send(ranks.others, name)
        else:
            ranks.receive(0, name, timeout_s=ranks.deadline_s)
        met = core.UniqueId.from_bytes(name.tobytes())
        self._communicator = core.Communicator.init(ranks.size, ranks.rank, met)

    def own(self, rows: int, columns: int) -> DeviceArray:
        """Where this rank leaves its float32[rows, columns]; the next one takes its place."""
        return self._own[: rows * columns].reshape(rows, columns)

    def gather(self, lane: Lane, own: DeviceArray) -> DeviceArray:
        """float32[ranks, rows, columns] of all ranks' `own`, until the next call."""
        shape = (self._ranks.size, *own.shape)
        everyones = self._all[: self._ranks.size * own.size].reshape(shape)
        if isinstance(lane, StreamLane):
            self._communicator.allgather(own, everyones, stream=lane.stream.handle)
        elif isinstance(lane, GraphLane):
            child, stream = Graph(self._context, "sums of ranks"), self._stream.handle
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
