"""The definition goes first: executables run on with everything they use."""

from __future__ import annotations

import gc
import weakref

import pytest
from lifetime_util import Step, add_steps, released, settled

from graft import native
from graft.cudagraph.device import Device, Stream
from graft.cudagraph.graph import Graph


@pytest.mark.parametrize("everything", [False, True])
def test_executables_outlive_their_definition(
    device: Device, stream: Stream, everything: bool
) -> None:
    """Closed or dropped, a definition takes nothing from its executable."""
    for close in (True, False):
        step = Step()
        watch = weakref.ref(step)
        before, live = settled(), native.live_records()
        graph = Graph(device, "definition")
        calls = add_steps(graph, step, everything)
        records = native.live_records() - live
        executable = graph.instantiate()
        if close:
            graph.close()
        del graph, step
        gc.collect()
        for _ in range(5):
            executable.launch(stream)
        executable.synchronize(60)
        living = watch()
        assert living is not None and living.calls == 5 * calls
        del living
        executable.close()
        released(before + records)
        assert watch() is None
