"""A clone outlives its original, and the other way round."""

from __future__ import annotations

import gc

from lifetime_util import Step, released, settled

from graft import native
from graft.cudagraph.device import Device, Stream
from graft.cudagraph.graph import Graph


def test_clones_own_their_records(device: Device, stream: Stream) -> None:
    """Whichever goes first releases its own records only; the other one runs on."""
    for first in (0, 1):
        step = Step()
        before = settled()
        original = Graph(device, "original")
        original.lane("main").host(step)
        graphs = [original, original.clone()]
        del original
        executables = [g.instantiate() for g in graphs]
        graphs.pop(first).close()
        executables.pop(first).close()
        gc.collect()
        released(before + 1)
        executables[0].launch(stream)
        executables[0].synchronize(60)
        assert step.calls == 1 and native.released_records() == before + 1
        graphs[0].close()
        executables[0].close()
        released(before + 2)
