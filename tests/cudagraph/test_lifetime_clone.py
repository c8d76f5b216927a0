"""A clone outlives its original, and the other way round."""

from __future__ import annotations

import gc

import pytest
from lifetime_util import Step, released, settled

from graft import native
from graft.cudagraph.device import Device, Stream
from graft.cudagraph.errors import OptionError
from graft.cudagraph.graph import Graph


def test_clones_own_their_records(device: Device, stream: Stream) -> None:
    """Whichever goes first releases its own records only; the other one runs on."""
    for first in (0, 1):
        step, marked = Step(), device.event("marked")
        before = settled()
        original = Graph(device, "original")
        original.lane("main").host(step)
        original.lane("main").record_event(marked)
        graphs = [original, original.clone()]
        del original
        executables = [g.instantiate() for g in graphs]
        graphs.pop(first).close()
        executables.pop(first).close()
        gc.collect()
        released(before + 2)
        executables[0].launch(stream)
        executables[0].synchronize(60)
        assert step.calls == 1 and native.released_records() == before + 2
        assert marked.query()
        graphs[0].close()
        executables[0].close()
        released(before + 4)


def test_what_has_no_copies_is_refused(device: Device) -> None:
    """Mailboxes and conditionals allow no clone: refused by name, and nothing is left behind."""
    before = settled()
    step = Step()
    for kind in ("mailbox", "spin", "if_"):
        graph = Graph(device, "original")
        lane = graph.lane("main")
        lane.host(step)
        if kind == "if_":
            lane.if_(graph.condition(1), name="choice").lane("x").fill(device.zeros((1,), "int32"))
        else:
            getattr(lane, kind)(step, name="choice")
        live = native.live_records()
        with pytest.raises(OptionError, match=r"'original' cannot be cloned: its .*choice'"):
            graph.clone()
        assert native.live_records() == live
        graph.close()
    del graph, lane
    assert settled() > before
