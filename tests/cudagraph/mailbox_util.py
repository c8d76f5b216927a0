"""Shared by the tests of mailboxes."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

from graft.cudagraph.device import Device, Stream
from graft.cudagraph.errors import HostWorkError
from graft.cudagraph.graph import Graph, GraphExec, GraphLane

TRANSPORTS = ("mailbox", "spin")
LIMIT_S = 60.0
USLEEP = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p).value or 0


def add(lane: GraphLane, transport: str, work: object, **options: object) -> None:
    getattr(lane, transport)(work, **options)


def until(done: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    end = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < end, "what was waited for did not happen"
        time.sleep(0.001)


def answered(device: Device, transport: str, work: object, **options: object):
    """A graph of one mailbox whose output is copied to the device: (executable, result)."""
    graph = Graph(device, "one mailbox")
    output, result = device.pinned((4,), "int32"), device.zeros((4,), "int32")
    lane = graph.lane("main")
    add(lane, transport, work, output=output, name="answer", **options)
    lane.copy(result, output)
    return graph.instantiate(), result


def in_time(run: GraphExec, stream: Stream) -> None:
    """Replay until the worker kept its deadline: on a busy machine it may be late."""
    for _ in range(200):
        run.launch(stream)
        try:
            return run.synchronize(LIMIT_S)
        except HostWorkError:
            run.clear(LIMIT_S)
    raise AssertionError("the worker is always late")
