"""Every Python reference goes while a launch is in flight: the launch ends as it would have."""

from __future__ import annotations

import gc
import threading
import weakref

from lifetime_util import Step, released, settled

from graft import native
from graft.cudagraph.device import Device
from graft.cudagraph.graph import Graph


def test_launches_keep_what_they_run(device: Device) -> None:
    """Steps behind a blocked one run after graph, executable, stream and callables were dropped."""
    gate, done = threading.Event(), threading.Event()
    step = Step()
    watch = weakref.ref(step)
    before = settled()
    stream = device.stream("flight")
    graph = Graph(device, "flight")
    lane = graph.lane("main")
    for work in (lambda: gate.wait(30), step, done.set):
        lane.host(work)
    executable = graph.instantiate()
    executable.launch(stream)
    executable.close()
    stream.close()
    del graph, lane, executable, stream, step, work
    gc.collect()
    assert native.released_records() == before and watch() is not None
    gate.set()
    assert done.wait(30)
    released(before + 3)
    assert watch() is None
