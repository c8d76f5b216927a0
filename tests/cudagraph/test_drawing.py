"""Pictures of graphs as DOT and SVG, with bodies, child graphs and measured times."""

from __future__ import annotations

import itertools
import re
from xml.etree import ElementTree

import pytest
from cudagraph_util import LIMIT_S

from graft.cudagraph import Device, Graph, Stream, condition, if_, load_text, while_
from graft.tools.trace.record import record

TEXT = """
#include "conditional.cuh"
extern "C" __global__ void count(int* data, int limit, unsigned long long again) {
  cudaGraphSetConditional(again, ++*data % limit != 0 ? 1 : 0);
}
extern "C" __global__ void add(int* data, int value) { *data += value; }
"""


@pytest.fixture
def graph(device: Device) -> Graph:
    """A graph whose only node on the first lane is a loop; the loop has a nested condition."""
    module = load_text(device, TEXT, "drawing.cu")
    data = device.zeros((1,), "int32")
    child = Graph(device, "child")
    child.lane("inner").fill(data.reshape(1), 0)
    graph = Graph(device, "picture <1>")
    lane = graph.lane("main")
    again = condition(graph, 1)
    loop = while_(lane, again, name="loop")
    rounds = loop.lane("rounds")
    rounds.kernel(module["count"], 1, 1, [data, 7, again])
    side = loop.lane("side")
    side.wait(rounds.record())
    nested = if_(side, condition(graph, 1), name="nested")
    nested.lane("deep").kernel(module["add"], 1, 1, [data, 0])
    lane.kernel(module["add"], 1, 1, [data, 0], name="after")
    lane.child(child)
    return graph


def test_dot_contains_bodies_and_child_graphs(graph: Graph) -> None:
    dot = graph.dot()
    assert dot.count("{") == dot.count("}")
    for label in ("picture <1>", "main", "loop", "rounds", "side", "nested", "deep", "child"):
        assert f'label="{label}"' in dot or f'digraph "{label}"' in dot
    assert "n0 -> n1;" in dot and "n0_0_0 -> n0_0_1 [color=" in dot
    assert "n0 -> n0_0_0 [style=dashed];" in dot and "n0_0_1 -> n0_0_1_0_0 [style=dashed];" in dot
    assert "n2 -> n2_0_0 [style=dashed];" in dot


def test_svg_places_bodies_inside_their_nodes(graph: Graph) -> None:
    """Every node has one box, and the boxes of a body are inside the box of its node."""
    root = ElementTree.fromstring(graph.svg())
    boxes = {}
    for group in root.findall("{*}g"):
        title = group.find("{*}title")
        rectangle = group.find("{*}rect")
        boxes[title.text] = [float(rectangle.get(k)) for k in ("x", "y", "width", "height")]
    assert set(boxes) == {
        *("0: while loop", "0: kernel count", "1: if nested", "0: kernel add"),
        *("1: kernel after", "2: child child", "0: fill fill"),
    }
    width, height = (float(root.get(k)) for k in ("width", "height"))

    def is_inside(inner: str, outer: str) -> bool:
        x, y, w, h = boxes[inner]
        left, top, wide, high = boxes[outer]
        return left < x and x + w < left + wide and top < y and y + h < top + high

    assert is_inside("0: kernel count", "0: while loop") and is_inside(
        "1: if nested", "0: while loop"
    )
    assert is_inside("0: kernel add", "1: if nested") and is_inside(
        "0: fill fill", "2: child child"
    )
    assert not is_inside("1: kernel after", "0: while loop")
    for x, y, w, h in boxes.values():
        assert x > 0 and y > 0 and x + w < width and y + h < height
    texts = {element.text for element in root.iter() if element.tag.endswith("text")}
    assert {"picture <1>", "while: loop", "rounds", "side", "deep", "child: child"} <= texts


def test_recorded_times_include_iterations_of_loops(
    device: Device, stream: Stream, graph: Graph
) -> None:
    """Nodes of a WHILE body have one time per iteration, also if the loop is the first node."""
    if device.kind != "soft":
        pytest.skip("only the soft device's driver reports when a node runs")
    run = graph.instantiate()
    with record(device, {run: graph}) as trace:
        for _ in range(3):
            run.launch(stream)
        run.synchronize(LIMIT_S)
    counts = {f"{node.kind} {node.name}": len(found) for node, found in trace.times().items()}
    assert counts == {
        **{"kernel count": 21, "kernel add": 21, "while loop": 3, "kernel after": 3},
        **{"fill fill": 3, "child child": 3},
    }
    assert trace.replays() == [("picture <1>", 1), ("picture <1>", 2), ("picture <1>", 3)]
    second = trace.select("picture <1>", 2)
    [loop] = [event for event in second.events if event.name == "loop"]
    rounds = [event for event in second.events if event.lane == "loop/rounds"]
    assert len(rounds) == 7 and {event.lane for event in second.events} >= {"main", "nested/deep"}
    assert all(loop.start_ns <= e.start_ns <= e.end_ns <= loop.end_ns for e in rounds)
    assert all(a.end_ns <= b.start_ns for a, b in itertools.pairwise(rounds))
    svg = graph.svg(trace.times(), trace.device)
    assert re.search(r"count: [0-9.]+ µs × 21<", svg) and device.describe() in svg
    assert re.search(r'label="after\\n[0-9.]+ µs × 3"', graph.dot(trace.times()))
