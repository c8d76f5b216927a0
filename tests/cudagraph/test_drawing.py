"""DOT and SVG drawings of graphs."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import dataclass

import pytest

from graft.cudagraph.device import Device
from graft.cudagraph.drawing import COLOURS, dot, svg
from graft.cudagraph.graph import Graph

SVG = "{http://www.w3.org/2000/svg}"


@dataclass
class Box:
    """A node to draw."""

    name: str
    kind: str
    lane: str
    index: int


def chain(count: int) -> tuple[list[Box], list[tuple[int, int]]]:
    """Nodes on two lanes, every third on the second, each after the one before."""
    kinds = list(COLOURS)
    nodes = [
        Box(f"node {i}", kinds[i % 4], "grammar" if i % 3 == 2 else "model", i)
        for i in range(count)
    ]
    return nodes, [(i, i + 1) for i in range(count - 1)]


def test_dot_names_every_node_and_edge(device: Device) -> None:
    """The DOT text of a graph has its nodes by name, its lanes as clusters and its edges."""
    graph = Graph(device, 'a "round"')
    data = device.zeros((1,), "int32")
    graph.lane("model").fill(data, name="clear")
    graph.lane("grammar").wait(graph.lane("model").record())
    graph.lane("grammar").host(lambda: None, name="fill row 0")
    text = graph.dot()
    assert text.startswith('digraph "a \\"round\\"" {')
    assert 'n0 [label="clear"' in text and 'n1 [label="fill row 0"' in text
    assert 'label="model"' in text and 'label="grammar"' in text
    assert re.search(r"n0 -> n1 \[", text), "edges between lanes are highlighted"
    assert text.count("{") == text.count("}")


def test_svg_is_xml_with_every_node_and_edge(device: Device) -> None:
    """The SVG parses, and has one titled box per node and one path per edge."""
    graph = Graph(device, "x < y & z")
    data = device.zeros((1,), "int32")
    for i in range(5):
        graph.lane("a" if i % 2 else "b").fill(data, name=f"<step {i}>")
    root = ET.fromstring(graph.svg())
    titles = [t.text for t in root.iter(f"{SVG}title")]
    assert titles[0] == "x < y & z"
    assert titles[1:] == [f"{i}: fill <step {i}>" for i in range(5)]
    drawn = [p for p in root.iter(f"{SVG}path") if p.get("marker-end")]
    assert len(drawn) == len(graph.edges)


@pytest.mark.parametrize("count", [0, 1, 100])
def test_boxes_do_not_overlap_and_stay_inside(count: int) -> None:
    """Boxes of a large graph are disjoint, within the page, and in their lane's column."""
    nodes, edges = chain(count)
    root = ET.fromstring(svg("large", ["model", "grammar"], nodes, edges))
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    boxes = []
    for group in root.iter(f"{SVG}g"):
        rect = group.find(f"{SVG}rect")
        assert rect is not None
        boxes.append([float(rect.get(k, "nan")) for k in ("x", "y", "width", "height")])
    assert len(boxes) == count
    for i, (x, y, w, h) in enumerate(boxes):
        assert x >= 0 and y >= 0 and x + w <= width and y + h <= height
        for x2, y2, w2, h2 in boxes[i + 1 :]:
            assert x + w <= x2 or x2 + w2 <= x or y + h <= y2 or y2 + h2 <= y
    columns = {n.lane: {b[0] for b, m in zip(boxes, nodes, strict=True) if m.lane == n.lane}
               for n in nodes}  # fmt: skip
    assert all(len(xs) == 1 for xs in columns.values())


def test_edges_between_lanes_stand_out() -> None:
    """Edges that cross lanes have another marker than edges within one."""
    nodes, edges = chain(9)
    root = ET.fromstring(svg("mixed", ["model", "grammar"], nodes, edges))
    crossing = sum(nodes[a].lane != nodes[b].lane for a, b in edges)
    markers = [p.get("marker-end") for p in root.iter(f"{SVG}path") if p.get("marker-end")]
    assert markers.count("url(#cross)") == crossing
    assert markers.count("url(#plain)") == len(edges) - crossing


def test_long_names_are_cut_but_kept_in_the_title() -> None:
    """A long name is shortened in its box; the title and the DOT text keep it whole."""
    name = "a kernel with a very long name that says everything about itself " * 2
    nodes = [Box(name, "kernel", "model", 0)]
    text = svg("long", ["model"], nodes, [])
    root = ET.fromstring(text)
    group = next(root.iter(f"{SVG}g"))
    label, title = group.find(f"{SVG}text"), group.find(f"{SVG}title")
    assert label is not None and title is not None
    assert label.text and label.text.endswith("…") and len(label.text) < 60
    assert title.text == f"0: kernel {name}"
    assert name in dot("long", ["model"], nodes, [])
