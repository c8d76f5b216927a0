"""The executable goes first: the definition keeps its records and makes another one."""

from __future__ import annotations

import weakref

from lifetime_util import Step, released, settled

from graft import native
from graft.cudagraph.device import Device, Stream
from graft.cudagraph.graph import Graph


def test_definitions_outlive_their_executables(device: Device, stream: Stream) -> None:
    """Records stay with the definition; each executable counts its replays from 1."""
    step = Step()
    watch = weakref.ref(step)
    before = settled()
    graph = Graph(device, "executable")
    graph.lane("main").host(step)
    for _ in range(3):
        executable = graph.instantiate()
        executable.launch(stream)
        executable.close()
    stream.synchronize(60)
    assert step.calls == 3 and native.released_records() == before
    del step
    assert watch() is not None
    graph.close()
    released(before + 1)
    assert watch() is None
