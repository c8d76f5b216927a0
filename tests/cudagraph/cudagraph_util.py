"""Shared by the room's tests: replays, steps to watch, what is freed late, other programs."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from graft import native
from graft.cudagraph.conditional import condition, if_, switch
from graft.cudagraph.device import Device, Stream
from graft.cudagraph.driver import call, cu, is_current
from graft.cudagraph.errors import HostWorkError
from graft.cudagraph.graph import Graph, GraphExec
from graft.native import _native

LIMIT_S = 60.0


def replay(what: Graph | GraphExec, stream: Stream, times: int = 1) -> GraphExec:
    """Launch an executable, or a graph's first one, some times, and wait for it."""
    run = what.instantiate() if isinstance(what, Graph) else what
    for _ in range(times):
        run.launch(stream)
    run.synchronize(LIMIT_S)
    return run


def until(done: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    """Wait until something is so; a driver may run destructors late, on a thread of its own."""
    end = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < end, (
            f"{native.live_records()} records live, {native.released_records()} released, "
            f"{native.live_resources()} handles"
        )
        time.sleep(0.001)


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
            until(lambda watch=watch: watch() is None)
        assert _native.flush(LIMIT_S)
    return native.released_records()


def released(count: int) -> None:
    """Wait until `count` records were released; a driver may run destructors late."""
    until(lambda: native.released_records() >= count)


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


def answered(device: Device, transport: str, work: object, **options: object):
    """A graph of one mailbox whose output is copied to the device: (executable, result)."""
    graph = Graph(device, "one mailbox")
    output, result = device.pinned((4,), "int32"), device.zeros((4,), "int32")
    lane = graph.lane("main")
    getattr(lane, transport)(work, output=output, name="answer", **options)
    lane.copy(result, output)
    return graph.instantiate(), result


def in_time(run: GraphExec, stream: Stream) -> None:
    """Replay until the worker kept its deadline: on a busy machine it may be late."""
    for _ in range(200):
        try:
            replay(run, stream)
            return
        except HostWorkError:
            run.clear(LIMIT_S)
    raise AssertionError("the worker is always late")


def run_python(
    code: str, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh process."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120,
        env={**os.environ, **environment},
    )  # fmt: skip


def compiled(source: str, folder: Path) -> ctypes.CDLL:
    """Load a library of C++ functions; skips where no compiler is found."""
    (folder / "work.cpp").write_text(source)
    command = [os.environ.get("CXX", "c++"), "-shared", "-fPIC", "-o", str(folder / "work.so"),
               str(folder / "work.cpp")]  # fmt: skip
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip(f"no C++ compiler ({command[0]})")
    return ctypes.CDLL(str(folder / "work.so"))
