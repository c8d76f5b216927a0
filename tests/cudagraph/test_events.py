"""Events: record and wait nodes of graphs, deadlines and timing."""

from __future__ import annotations

import gc
import threading

import pytest
from cudagraph_util import LIMIT_S, replay

from graft.cudagraph import (
    DeadlineError,
    Device,
    Graph,
    OptionError,
    Stream,
    StreamLane,
    condition,
    if_,
)


@pytest.mark.overlap
def test_event_record_node_is_reached_before_end_of_replay(device: Device, stream: Stream) -> None:
    """In every replay, a host wait for the event ends while the rest of the replay still runs."""
    go = threading.Event()
    data = device.zeros((4,), "int32")
    result = device.pinned((4,), "int32")
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


def test_event_nodes_order_two_graphs(device: Device, stream: Stream) -> None:
    order: list[str] = []
    ping_done = device.event("ping done")
    pong_done = device.event("pong done")
    other = device.stream("other")
    runs = []
    for name, before, after in (("ping", pong_done, ping_done), ("pong", ping_done, pong_done)):
        graph = Graph(device, name)
        lane = graph.lane("main")
        lane.wait_event(before)
        lane.host(lambda name=name: order.append(name))
        lane.record_event(after)
        runs.append(graph.instantiate())
    del graph, lane, before, after, ping_done, pong_done
    gc.collect()  # the graphs keep their events alive
    for _ in range(20):
        runs[0].launch(stream)
        runs[1].launch(other)
    for run in runs:
        run.synchronize(LIMIT_S)
        run.close()
    assert order == ["ping", "pong"] * 20


def test_event_synchronize_deadline_names_event(device: Device, stream: Stream) -> None:
    """A wait for an event that was never recorded returns at once."""
    go = threading.Event()
    lane = StreamLane(stream)
    late = device.event("late")
    assert late.query()
    late.synchronize(LIMIT_S)
    lane.host(lambda: go.wait(LIMIT_S))
    lane.record_event(late)
    with pytest.raises(DeadlineError, match=r"'late' was not reached in 0\.05 s"):
        late.synchronize(0.05)
    go.set()
    late.synchronize(LIMIT_S)


def test_event_elapsed_s_requires_timing(device: Device, stream: Stream) -> None:
    start = device.event("start", timing=True)
    end = device.event("end", timing=True)
    data = device.zeros((1 << 20,), "uint8")
    graph = Graph(device, "timed")
    lane = graph.lane("main")
    lane.record_event(start)
    lane.fill(data, 7)
    lane.record_event(end)
    replay(graph, stream)
    assert end.elapsed_s(start) >= 0 >= start.elapsed_s(end)
    with pytest.raises(OptionError, match="'silent' records no time"):
        end.elapsed_s(device.event("silent"))


def test_conditional_body_rejects_event_nodes(device: Device) -> None:
    """A conditional body rejects event nodes, also inside a child graph."""
    first = device.event("first")
    graph = Graph(device, "around")
    body = if_(graph.lane("main"), condition(graph, 1), name="branch").lane("inside")
    for add in (body.record_event, body.wait_event):
        with pytest.raises(OptionError, match=r"event (record|wait) node 'first'.*'branch'"):
            add(first)
    inner = Graph(device, "inner")
    inner.lane("main").record_event(first, name="deep")
    with pytest.raises(OptionError, match=r"event record node 'inner/deep'.*'branch'"):
        body.child(inner)
