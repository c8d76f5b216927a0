"""Event nodes of explicit graphs and captures: what leaves a graph, and what it waits for."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
from cuda.bindings import driver as cu
from cudagraph_util import replay

from graft.cudagraph.conditional import condition, if_
from graft.cudagraph.device import Device, Stream
from graft.cudagraph.errors import DeadlineError, OptionError
from graft.cudagraph.graph import Graph
from graft.cudagraph.lanes import StreamLane

LIMIT_S = 60.0


def test_the_host_goes_on_at_a_record_node(device: Device, stream: Stream) -> None:
    """The event is there while the rest of its replay still runs, and again in every replay."""
    go = threading.Event()
    data, result = device.zeros((4,), "int32"), device.pinned((4,), "int32")
    ready = device.event("ready")
    graph = Graph(device, "leaves early")
    lane = graph.lane("main")
    lane.fill(data, 1)
    lane.copy(result, data)
    lane.record_event(ready)
    lane.host(lambda: go.wait(LIMIT_S))
    assert [n.kind for n in graph.nodes] == ["fill", "copy", "event record", "host"]
    run = graph.instantiate()
    for _ in range(3):
        result.array[:] = 0
        run.launch(stream)
        ready.synchronize(LIMIT_S)
        assert result.array.tolist() == [0x01010101] * 4 and not run.query() and ready.query()
        go.set()
        run.synchronize(LIMIT_S)
        go.clear()
    run.close()


def test_two_graphs_hand_over_by_events(device: Device, stream: Stream) -> None:
    """Launches on two streams run in the order of their event nodes, round by round."""
    order: list[str] = []
    there, back = device.event("there"), device.event("back")
    other = device.stream("other")
    runs = []
    for name, before, after in (("ping", back, there), ("pong", there, back)):
        graph = Graph(device, name)
        lane = graph.lane("main")
        lane.wait_event(before)
        lane.host(lambda name=name: order.append(name))
        lane.record_event(after)
        runs.append(graph.instantiate())
    del graph, lane, before, after, there, back
    gc.collect()  # the graphs keep their events
    for _ in range(20):
        runs[0].launch(stream)
        runs[1].launch(other)
    for run in runs:
        run.synchronize(LIMIT_S)
        run.close()
    assert order == ["ping", "pong"] * 20
    other.close()


def test_a_wait_that_is_not_over_meets_its_deadline(device: Device, stream: Stream) -> None:
    """synchronize() of an event names it and ends in time; one never recorded is complete."""
    go = threading.Event()
    lane, late = StreamLane(stream), device.event("late")
    assert late.query()
    late.synchronize(LIMIT_S)
    lane.host(lambda: go.wait(LIMIT_S))
    lane.record_event(late)
    with pytest.raises(DeadlineError, match=r"'late' was not reached in 0\.05 s"):
        late.synchronize(0.05)
    go.set()
    late.synchronize(LIMIT_S)


def test_events_keep_time_where_asked(device: Device, stream: Stream) -> None:
    """Seconds between two nodes of a replay; refused by name for events without timing."""
    begun, ended = device.event("begun", timing=True), device.event("ended", timing=True)
    data = device.zeros((1 << 20,), "uint8")
    graph = Graph(device, "timed")
    lane = graph.lane("main")
    lane.record_event(begun)
    lane.fill(data, 7)
    lane.record_event(ended)
    run = replay(graph, stream)
    assert ended.elapsed_s(begun) >= 0 >= begun.elapsed_s(ended)
    with pytest.raises(OptionError, match="'silent' keeps no time"):
        ended.elapsed_s(device.event("silent"))
    run.close()


def test_event_nodes_are_refused_in_bodies(device: Device) -> None:
    """A body takes none, not in a child graph either; what is no event is refused by its type."""
    first = device.event("first")
    graph = Graph(device, "around")
    lane = graph.lane("main")
    with pytest.raises(OptionError, match="needs an Event, not int"):
        lane.record_event(3)  # type: ignore[arg-type]
    body = if_(graph.lane("main"), condition(graph, 1), name="branch").lane("inside")
    for add in (body.record_event, body.wait_event):
        with pytest.raises(OptionError, match=r"event (record|wait) node 'first'.*'branch'"):
            add(first)
    inner = Graph(device, "inner")
    inner.lane("main").record_event(first, name="deep")
    with pytest.raises(OptionError, match=r"event record node 'inner/deep'.*'branch'"):
        body.child(inner)


def test_a_capture_takes_events_as_nodes(device: Device, stream: Stream) -> None:
    """On a capturing stream lane both calls become nodes that keep their event."""
    data, event = device.zeros((1,), "int32"), device.event("captured")
    lane = StreamLane(stream)
    mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    assert int(cu.cuStreamBeginCapture(stream.handle, mode)[0]) == 0
    lane.wait_event(event)
    lane.fill(data, 3)
    lane.record_event(event)
    code, captured = cu.cuStreamEndCapture(stream.handle)
    assert int(code) == 0
    run = cu.cuGraphInstantiate(captured, 0)[1]
    assert int(cu.cuGraphDestroy(captured)[0]) == 0
    del event
    gc.collect()
    for _ in range(3):
        assert int(cu.cuGraphLaunch(run, stream.handle)[0]) == 0
    stream.synchronize(LIMIT_S)
    assert data.to_host()[0] == np.int32(0x03030303)
    assert int(cu.cuGraphExecDestroy(run)[0]) == 0
