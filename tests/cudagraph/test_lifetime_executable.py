"""The executable goes first: the definition keeps its records and makes another one."""

from __future__ import annotations

import weakref

import pytest
from lifetime_util import Step, add_steps, released, settled

from graft import native
from graft.cudagraph.device import Device, Stream
from graft.cudagraph.graph import Graph


@pytest.mark.parametrize("everything", [False, True])
def test_definitions_outlive_their_executables(
    device: Device, stream: Stream, everything: bool
) -> None:
    """Records stay with the definition; each executable counts its replays from 1."""
    step = Step()
    watch = weakref.ref(step)
    before, live = settled(), native.live_records()
    graph = Graph(device, "executable")
    calls = add_steps(graph, step, everything)
    records = native.live_records() - live
    for _ in range(3):
        executable = graph.instantiate()
        executable.launch(stream)
        executable.close()
    stream.synchronize(60)
    assert step.calls == 3 * calls and native.released_records() == before
    del step
    assert watch() is not None
    graph.close()
    released(before + records)
    assert watch() is None
