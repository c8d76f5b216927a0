"""Nodes that lanes return, the end of editing at instantiation, and the lifetime of graphs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from cudagraph_util import replay, wait_until_freed

from graft.cudagraph import (
    Device,
    Graph,
    GraphBody,
    GraphLane,
    MailboxWorker,
    Node,
    OptionError,
    Stream,
    condition,
    if_,
    switch_,
    while_,
)
from graft.native import _native

TEXT = """
#include "conditional.cuh"
extern "C" __global__ void add(int* data, int value) { *data += value; }
extern "C" __global__ void choose(unsigned long long condition, const int* value) {
  cudaGraphSetConditional(condition, (unsigned)*value);
}
extern "C" __global__ void below(unsigned long long condition, const int* data, int limit) {
  cudaGraphSetConditional(condition, *data < limit ? 1u : 0u);
}
"""


def test_lane_methods_return_nodes(device: Device, module) -> None:
    data = device.zeros((1,), "int32")
    event = device.event()
    child = Graph(device, "child")
    child.lane("x").fill(data)
    worker = MailboxWorker()
    graph = Graph(device)
    lane = graph.lane("main")
    nodes = [
        lane.kernel(module["add"], 1, 1, [data, 1], name="k"),
        lane.copy(device.pinned((1,), "int32"), data),
        lane.fill(data),
        lane.host(print),
        lane.record_event(event),
        lane.wait_event(event),
        lane.child(child),
        lane.mailbox(print, worker=worker),
        lane.spinkernel(print, worker=worker),
    ]
    assert all(isinstance(node, Node) and graph.nodes[node.index] is node for node in nodes)
    assert [node.kind for node in nodes] == [
        *("kernel", "copy", "fill", "host", "event record", "event wait", "child", "wait", "wait")
    ]


def test_executable_changes_returned_nodes(device: Device, stream: Stream, module) -> None:
    """A returned node is unambiguous, also in a body and if other nodes have its name."""
    data = device.zeros((3,), "int32")
    graph = Graph(device)
    lane = graph.lane("main")
    first = lane.kernel(module["add"], 1, 1, [data[0], 1])
    second = lane.kernel(module["add"], 1, 1, [data[1], 1])
    body = if_(lane, condition(graph, 1))
    inside = body.lane("main").kernel(module["add"], 1, 1, [data[2], 1])
    run = graph.instantiate()
    run.set_enabled(first, False)
    run.update_kernel(second, module["add"], 1, 1, [data[1], 10])
    replay(run, stream)
    assert data.to_host().tolist() == [0, 10, 1]
    for change in (
        lambda: run.update_kernel(inside, module["add"], 1, 1, [data[2], 100]),
        lambda: run.update_kernel(inside, module["add"], 1, 1, [data[2], 100], within=body),
    ):
        change()
        replay(run, stream)
    assert data.to_host()[2] == 201
    other = Graph(device).lane("main").fill(data)
    with pytest.raises(OptionError, match="is not a node of graph"):
        run.set_enabled(other, False)
    with pytest.raises(OptionError, match="None is neither a Node nor the name"):
        run.set_enabled(None, False)  # type: ignore[arg-type]


#: Edits of a graph, given its lane, its body and the lane of the body.
EDITS: dict[str, Callable[[GraphLane, GraphBody, GraphLane], object]] = {
    "kernel": lambda lane, body, inner: lane.fill(lane.graph.context.zeros((1,), "int32")),
    "host": lambda lane, body, inner: lane.host(print),
    "mailbox": lambda lane, body, inner: lane.mailbox(print),
    "child": lambda lane, body, inner: lane.child(Graph(lane.graph.context)),
    "count": lambda lane, body, inner: lane.count_completed(),
    "condition": lambda lane, body, inner: condition(lane.graph),
    "body": lambda lane, body, inner: inner.fill(lane.graph.context.zeros((1,), "int32")),
    "new lane": lambda lane, body, inner: body.lane("b").spinkernel(print),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_graph_with_executable_refuses_nodes(device: Device, stream: Stream, edit) -> None:
    """The executable would not run the node. After its end, the graph can be edited again."""
    data = device.zeros((1,), "int32")
    graph = Graph(device, "frozen")
    lane = graph.lane("main")
    lane.fill(data)
    body = if_(lane, condition(graph, 0))
    inner = body.lane("a")
    inner.fill(data)
    run = graph.instantiate()
    count = len(graph.nodes)
    with pytest.raises(OptionError, match=r"cannot be added to graph 'frozen'.*before instantiate"):
        edit(lane, body, inner)
    assert len(graph.nodes) == count and len(body.nodes) == 1
    replay(run, stream)
    run.close()
    lane.fill(data, 3)
    replay(graph, stream)
    assert data.to_host().tolist() == [0x03030303]


def test_graph_is_context_manager(device: Device, stream: Stream) -> None:
    """At the end of the block, also by an exception, the graph and its executable are closed."""
    wait_until_freed()
    live = _native.live_resources()
    with pytest.raises(KeyError), Graph(device, "block") as graph:
        graph.lane("main").fill(device.zeros((4,), "int32"))
        run = replay(graph, stream)
        raise KeyError
    with pytest.raises(OptionError, match="closed"):
        run.launch(stream)
    with pytest.raises(OptionError, match="closed"):
        graph.instantiate()
    del graph, run
    wait_until_freed()
    assert _native.live_resources() == live


def test_dropped_graph_with_bodies_is_freed_at_once(device: Device) -> None:
    """A graph refers to the contents of its bodies, which do not refer to the graph."""
    gc.disable()
    try:
        graph = Graph(device)
        body = while_(graph.lane("main"), condition(graph, 0))
        body.lane("inside").fill(device.zeros((1,), "int32"))
        watch = weakref.ref(graph)
        del body, graph
        assert watch() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("value", range(5))
def test_switch_runs_body_of_value(device: Device, stream: Stream, module, value: int) -> None:
    data = device.zeros((1,), "int32")
    given = device.from_host(np.array([value], np.int32))
    graph = Graph(device)
    lane = graph.lane("main")
    which = condition(graph)
    lane.kernel(module["choose"], 1, 1, [which, given])
    bodies = switch_(lane, which, 3, name="which")
    assert [body.name for body in bodies] == ["which/0", "which/1", "which/2"]
    for i, body in enumerate(bodies):
        body.lane("only").kernel(module["add"], 1, 1, [data, 10**i])
    lane.kernel(module["add"], 1, 1, [data, 1000])
    assert [(n.name, n.kind) for n in graph.nodes][1] == ("which", "switch")
    replay(graph, stream)
    assert data.to_host()[0] == 1000 + (10**value if value < 3 else 0)


@pytest.mark.parametrize("count", [0, -1, True, 1.5, 1 << 20])
def test_switch_rejects_number_of_bodies(device: Device, count) -> None:
    graph = Graph(device)
    with pytest.raises(OptionError, match="switch 'which' needs a number of bodies"):
        switch_(graph.lane("main"), condition(graph), count, name="which")


def test_switch_body_refuses_host_node(device: Device) -> None:
    graph = Graph(device)
    [body] = switch_(graph.lane("main"), condition(graph, 0), 1, name="one")
    with pytest.raises(OptionError, match=r"host node .* conditional 'one/0'"):
        body.lane("x").host(print)
