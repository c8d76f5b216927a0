"""Shared by the tests of lifetimes: a step to watch, and waiting for what is freed late."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Callable

from graft import native
from graft.cudagraph.conditional import condition, if_, switch
from graft.cudagraph.device import Device
from graft.cudagraph.driver import call, cu, is_current
from graft.cudagraph.graph import Graph
from graft.native import _native

LIMIT_S = 60.0


class Step:
    """A callable that counts its calls and can be watched."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1


def settled() -> int:
    """Return the number of released records once nothing of earlier tests is being freed.

    What was dropped goes to the reaper, which destroys graphs, whose destructors may run late on a
    thread of the driver's and hand their records to the reaper again. A token sent the same way
    comes out behind everything else.
    """
    gc.collect()
    if is_current():
        for _ in range(2):
            assert _native.flush(LIMIT_S)
            token = Step()
            watch = weakref.ref(token)
            graph = int(call(cu.cuGraphCreate, 0))
            assert _native.attach_keep(graph, (token,))[0] == 0
            del token
            call(cu.cuGraphDestroy, graph)
            end = time.monotonic() + LIMIT_S
            while watch() is not None:
                assert time.monotonic() < end, "a record was not released"
                time.sleep(0.001)
        assert _native.flush(LIMIT_S)
    return native.released_records()


def released(count: int) -> None:
    """Wait until `count` records were released; a driver may run destructors late."""
    end = time.monotonic() + LIMIT_S
    while native.released_records() < count:
        assert time.monotonic() < end, (native.released_records(), count)
        time.sleep(0.002)


def add_steps(
    device: Device, graph: Graph, step: Callable[..., object], everything: bool
) -> int:
    """Put a host step on a graph's lane, or one of each kind between events and conditionals.

    Returns how often a replay calls the step.
    """
    lane = graph.lane("main")
    lane.host(step)
    if not everything:
        return 1
    event, data = device.event("lifetime"), device.zeros((4,), "int32")
    lane.wait_event(event)
    lane.mailbox(step)
    if_(lane, condition(graph, 1), name="if").lane("inside").fill(data)
    lane.record_event(event)
    lane.spin(step)
    bodies = switch(lane, condition(graph, 1), 2, name="switch")
    bodies[1].lane("inside").fill(data, 1)
    return 3


def resident_kib() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024
