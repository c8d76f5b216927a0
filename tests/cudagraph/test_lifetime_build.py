"""An exception while a graph is built leaves neither half a node nor a record behind."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
from lifetime_util import Step, released, settled

from graft import native
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


@pytest.mark.parametrize(
    ("refused", "kind"),
    [("add_answer_wait", "mailbox"), ("add_kernel", "spin"), ("add_event_record", "event"),
     ("add_conditional", "if")],
)  # fmt: skip
def test_every_kind_of_node_is_undone(
    device: Device, stream: Stream, monkeypatch: pytest.MonkeyPatch, refused: str, kind: str
) -> None:
    """A refused wait takes its request along; events and conditionals leave no record either."""
    good, bad = Step(), Step()
    watch = weakref.ref(bad)
    settled()
    graph = Graph(device, "build")
    lane = graph.lane("main")
    lane.host(good)
    live = native.live_records()
    with monkeypatch.context() as patch:
        patch.setattr(graphlane.nodes, refused, _refuse)
        with pytest.raises(DeviceError, match="refused"):
            if kind == "event":
                lane.record_event(device.event())
            elif kind == "if":
                lane.if_(graph.condition(1))
            else:
                getattr(lane, kind)(bad)
    del bad
    gc.collect()
    end = time.monotonic() + 60
    kept = 2 if kind == "mailbox" else 0  # the request's port and work, until the graph goes
    while native.live_records() > live + kept:
        assert time.monotonic() < end, native.live_records()
        time.sleep(0.002)
    assert [node.kind for node in graph.nodes] == ["host"]
    if kind != "mailbox":
        assert watch() is None
    if kind != "if":  # its condition steers no node
        executable = graph.instantiate()
        executable.launch(stream)
        executable.synchronize(60)
        assert good.calls == 1
        executable.close()
    graph.close()
    settled()
    assert watch() is None


def _refuse(*_: object) -> None:
    raise DeviceError("the node was refused")
