"""An exception while a graph is built leaves neither half a node nor a record behind."""

from __future__ import annotations

import gc
import weakref

import pytest
from lifetime_util import Step, released, settled

from graft.cudagraph import graphlane
from graft.cudagraph.device import Device, Stream
from graft.cudagraph.errors import DeviceError
from graft.cudagraph.graph import Graph


def test_a_failed_build_leaves_nothing(
    device: Device, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that failed is gone, its record released once; the graph before it still runs."""
    good, bad = Step(), Step()
    watch = weakref.ref(bad)
    before = settled()
    graph = Graph(device, "build")
    lane = graph.lane("main")
    lane.host(good)
    with monkeypatch.context() as patch:
        patch.setattr(graphlane.nodes, "add_host", _refuse)
        with pytest.raises(DeviceError, match="refused"):
            lane.host(bad)
    del bad
    released(before + 1)
    gc.collect()
    assert watch() is None and len(graph.nodes) == 1
    lane.host(good)
    executable = graph.instantiate()
    executable.launch(stream)
    executable.synchronize(60)
    assert good.calls == 2


def _refuse(*_: object) -> None:
    raise DeviceError("the node was refused")
