"""Every Python reference goes while a launch is in flight: the launch ends as it would have."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
from lifetime_util import Step, add_steps, released, settled

from graft import native
from graft.cudagraph.device import Device
from graft.cudagraph.graph import Graph


@pytest.mark.parametrize("everything", [False, True])
def test_launches_keep_what_they_run(device: Device, everything: bool) -> None:
    """Steps behind a blocked one run after graph, executable, stream and callables were dropped."""
    gate, done = threading.Event(), threading.Event()
    step = Step()
    watch = weakref.ref(step)
    before, live = settled(), native.live_records()
    stream = device.stream("flight")
    graph = Graph(device, "flight")
    lane = graph.lane("main")
    lane.host(lambda: gate.wait(60))
    add_steps(graph, step, everything)
    lane.host(done.set)
    records = native.live_records() - live
    executable = graph.instantiate()
    executable.launch(stream)
    executable.close()
    stream.close()
    del graph, lane, executable, stream, step
    gc.collect()
    assert native.released_records() == before and watch() is not None
    gate.set()
    assert done.wait(60)
    released(before + records)
    assert watch() is None
