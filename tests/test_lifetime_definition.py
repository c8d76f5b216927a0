"""The definition goes first: executables run on with everything they use."""

from __future__ import annotations

import gc
import weakref

from lifetime_util import Step, released, settled

from graft.cudagraph.device import Device, Stream
from graft.cudagraph.graph import Graph


def test_executables_outlive_their_definition(device: Device, stream: Stream) -> None:
    """Closed or dropped, a definition takes nothing from its executable."""
    for close in (True, False):
        step = Step()
        watch = weakref.ref(step)
        before = settled()
        graph = Graph(device, "definition")
        graph.lane("main").host(step)
        executable = graph.instantiate()
        if close:
            graph.close()
        del graph, step
        gc.collect()
        for _ in range(5):
            executable.launch(stream)
        executable.synchronize(60)
        living = watch()
        assert living is not None and living.calls == 5
        del living
        executable.close()
        released(before + 1)
        assert watch() is None
