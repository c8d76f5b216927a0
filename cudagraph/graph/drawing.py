"""Pictures of graphs: Graphviz's DOT language and SVG. Edges between lanes are highlighted.

The bodies of conditional nodes and the graphs of child-graph nodes are drawn inside the picture.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from graft.cudagraph.graph import svg as elements
from graft.cudagraph.graph.nodes import Contents, Node

#: Seconds of each execution of a node, by node.
Times = Mapping[Node, Sequence[float]]

#: Fill and stroke colours, by node kind.
COLOURS: Mapping[str, tuple[str, str]] = {
    "kernel": ("#dbeafe", "#2563eb"),
    "copy": ("#dcfce7", "#16a34a"),
    "fill": ("#f3f4f6", "#6b7280"),
    "host": ("#fef3c7", "#d97706"),
    "child": ("#ede9fe", "#7c3aed"),
    "if": ("#fce7f3", "#db2777"),
    "while": ("#fce7f3", "#db2777"),
    "switch": ("#fce7f3", "#db2777"),
    "request": ("#ffe4e6", "#e11d48"),
    "wait": ("#fce7f3", "#be185d"),
}
OTHER_COLOURS = ("#ffffff", "#374151")
#: Colour of edges within a lane.
EDGE_COLOUR = "#9ca3af"
#: Colour of edges between lanes.
CROSSING_COLOUR = "#dc2626"
#: Sizes of the picture's boxes, and distances between them, in pixels.
LEFT = 40
TOP = 70
BOX_WIDTH = 260
BOX_HEIGHT = 26
ROW_GAP = 14
COLUMN_GAP = 90
#: Height of a line of text above the boxes of a body, and distance between a body and its frame.
HEADING = 22
PADDING = 30


def time_label(node: Node, times: Times | None) -> str:
    """Return the median time of a node and the number of its executions; "" if it has no times."""
    seconds = (times or {}).get(node, ())
    if not seconds:
        return ""
    label = f"{statistics.median(seconds) * 1e6:.1f} µs"
    return label if len(seconds) == 1 else f"{label} × {len(seconds)}"


# DOT ----------------------------------------------------------------------------------------------


def dot(contents: Contents, times: Times | None = None) -> str:
    """Return a graph in Graphviz's DOT language.

    Each lane and each body becomes a cluster. The id of a node is ``n<index>``; in the body number
    b of the node i, it is ``n<i>_<b>_<index>``. Dashed edges lead from a conditional node to the
    first nodes of its bodies.
    """
    lines = [f"digraph {_quoted(contents.name)} {{", '  node [shape=box, style="filled,rounded"];']
    lines += _dot_contents(contents, times, "n", "cluster", "  ")
    lines.append("}")
    return "\n".join(lines) + "\n"


def _dot_contents(
    contents: Contents, times: Times | None, prefix: str, cluster: str, indent: str
) -> Iterator[str]:
    nodes = contents.nodes
    for i, lane in enumerate(contents.tails):
        yield f"{indent}subgraph {cluster}_{i} {{"
        yield f"{indent}  label={_quoted(lane)};"
        for node in nodes:
            if node.lane == lane:
                yield indent + _node_line(node, times, prefix)
        yield f"{indent}}}"
    for index, inner in contents.inner.items():
        for number, body in enumerate(inner):
            path = f"{prefix}{index}_{number}_"
            yield f"{indent}subgraph {cluster}_body_{index}_{number} {{"
            yield f"{indent}  label={_quoted(body.name)}; style=dashed;"
            yield from _dot_contents(
                body, times, path, f"{cluster}_{index}_{number}", f"{indent}  "
            )
            yield f"{indent}}}"
            later = {end for _, end in body.edges}
            for node in body.nodes:
                if node.index not in later:
                    yield f"{indent}{prefix}{index} -> {path}{node.index} [style=dashed];"
    for start, end in contents.edges:
        crosses = nodes[start].lane != nodes[end].lane
        style = f' [color="{CROSSING_COLOUR}", penwidth=2]' if crosses else ""
        yield f"{indent}{prefix}{start} -> {prefix}{end}{style};"


def _node_line(node: Node, times: Times | None, prefix: str) -> str:
    fill, stroke = COLOURS.get(node.kind, OTHER_COLOURS)
    label = "\n".join(filter(None, (node.name, time_label(node, times))))
    attributes = ", ".join(
        [
            f"label={_quoted(label)}",
            f"tooltip={_quoted(node.kind)}",
            f'fillcolor="{fill}"',
            f'color="{stroke}"',
        ]
    )
    return f"  {prefix}{node.index} [{attributes}];"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


# SVG ----------------------------------------------------------------------------------------------


class _Rectangle(NamedTuple):
    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> float:
        return self.x + self.width / 2


class _Layout:
    """Positions of the boxes of a graph's or body's nodes: one column per lane, one row per node.

    `width` and `height` are the size of all boxes together, without the names of the lanes.
    """

    def __init__(self, contents: Contents) -> None:
        self.contents = contents
        self.inner = {
            index: [_Layout(body) for body in bodies] for index, bodies in contents.inner.items()
        }
        lanes = list(contents.tails)
        widths = dict.fromkeys(lanes, float(BOX_WIDTH))
        sizes = [self._size(node) for node in contents.nodes]
        for node, (width, _) in zip(contents.nodes, sizes, strict=True):
            widths[node.lane] = max(widths[node.lane], width)
        self.columns: dict[str, float] = {}
        x = 0.0
        for lane in lanes:
            self.columns[lane] = x + widths[lane] / 2
            x += widths[lane] + COLUMN_GAP
        self.width = max(x - COLUMN_GAP, float(BOX_WIDTH))
        self.rectangles: list[_Rectangle] = []
        y = 0.0
        for node, (width, height) in zip(contents.nodes, sizes, strict=True):
            left = self.columns[node.lane] - width / 2
            self.rectangles.append(_Rectangle(left, y, width, height))
            y += height + ROW_GAP
        self.height = max(y - ROW_GAP, 0.0)

    def _size(self, node: Node) -> tuple[float, float]:
        """Return width and height of the box of a node; bodies are inside, one below another."""
        bodies = self.inner.get(node.index, [])
        if not bodies:
            return BOX_WIDTH, BOX_HEIGHT
        width = max(body.width for body in bodies) + 2 * PADDING
        height = BOX_HEIGHT + sum(2 * HEADING + body.height + PADDING / 2 for body in bodies)
        return width, height

    def draw(self, x: float, y: float, times: Times | None) -> Iterator[str]:
        """Yield the elements of the picture; the upper left corner of the boxes is at (x, y)."""
        placed = [r._replace(x=r.x + x, y=r.y + y) for r in self.rectangles]
        nodes = self.contents.nodes
        for lane, middle in self.columns.items():
            yield elements.text(x + middle, y - 20, lane, "middle", "bold")
        frames = [node for node in nodes if node.index in self.inner]
        for node in frames:
            yield from self._draw_frame(node, placed[node.index], times)
        for start, end in self.contents.edges:
            if nodes[start].lane != nodes[end].lane:
                path = _path_between_lanes(placed[start], placed[end])
                marker, colour = "cross", CROSSING_COLOUR
            else:
                skips = any(node.lane == nodes[end].lane for node in nodes[start + 1 : end])
                path = _path_within_lane(placed[start], placed[end], skips)
                marker, colour = "plain", EDGE_COLOUR
            yield (
                f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6" '
                f'marker-end="url(#{marker})"/>'
            )
        for node in nodes:
            if node.index not in self.inner:
                yield _draw_box(node, placed[node.index], times)

    def _draw_frame(self, node: Node, frame: _Rectangle, times: Times | None) -> Iterator[str]:
        """Yield the box of a node with bodies: its name, and below it the bodies."""
        yield _draw_box(node, frame, None, label="")
        title = f"{node.kind}: {node.name}"
        yield elements.text(frame.x + 10, frame.y + 18, title, "start", "bold")
        y = frame.y + BOX_HEIGHT
        for body in self.inner[node.index]:
            yield elements.text(frame.x + 10, y + 14, body.contents.name)
            y += 2 * HEADING
            yield from body.draw(frame.middle - body.width / 2, y, times)
            y += body.height + PADDING / 2


def svg(contents: Contents, times: Times | None = None, note: str = "") -> str:
    """Return a graph as SVG. Lanes are columns, and each node is below its predecessors.

    The name of the graph is the heading, and `note` a line below it.
    """
    layout = _Layout(contents)
    top = TOP + (20 if note else 0)
    markers = _arrow("plain", EDGE_COLOUR) + _arrow("cross", CROSSING_COLOUR)
    parts = [f"<defs>{markers}</defs>"]
    if note:
        parts.append(elements.text(24, 44, note))
    parts += layout.draw(LEFT, top, times)
    height = top + layout.height + 27
    return elements.document(2 * LEFT + layout.width, height, contents.name, parts)


def _draw_box(node: Node, place: _Rectangle, times: Times | None, label: str | None = None) -> str:
    colours = COLOURS.get(node.kind, OTHER_COLOURS)
    time = time_label(node, times)
    hover = " ".join(filter(None, (f"{node.index}: {node.kind} {node.name}", time)))
    if label is None:
        label = f"{node.name}: {time}" if time else node.name
    return elements.box(place.x, place.y, place.width, place.height, label, colours, hover)


def _path_between_lanes(start: _Rectangle, end: _Rectangle) -> str:
    """Return a curve from the side of one box to the side of a box in another column.

    Edges leave a box below its middle and enter a box above its middle. Outgoing and incoming edges
    of a box therefore do not touch.
    """
    direction = 1 if end.middle > start.middle else -1
    x1 = start.middle + direction * start.width / 2
    x2 = end.middle - direction * (end.width / 2 + 2)
    y1 = start.y + start.height - 8
    y2 = end.y + 8
    bend = direction * COLUMN_GAP / 2
    return f"M{x1},{y1} C{x1 + bend},{y1} {x2 - bend},{y2} {x2},{y2}"


def _path_within_lane(start: _Rectangle, end: _Rectangle, skips: bool) -> str:
    """Return a line between two boxes of a column, or a curve if it skips boxes in between."""
    if skips:
        y1 = start.y + start.height / 2
        y2 = end.y + end.height / 2
        left = min(start.x, end.x)
        return f"M{start.x},{y1} C{left - 28},{y1} {left - 28},{y2} {end.x - 2},{y2}"
    return f"M{start.middle},{start.y + start.height} L{end.middle},{end.y - 2}"


def _arrow(name: str, colour: str) -> str:
    """Return the definition of an arrow head that edges refer to by name."""
    return (
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        f'markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{colour}"/></marker>'
    )
