"""Drawings of a graph: DOT text for Graphviz, and an SVG of our own.

Lanes are columns, time runs downwards, every node has a row of its own (they are added in an order
in which the graph can run). Edges between lanes stand out: they are where the lanes meet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Protocol

__all__ = ["COLOURS", "dot", "svg"]

#: Node kind -> (fill, stroke).
COLOURS: Mapping[str, tuple[str, str]] = {
    "kernel": ("#dbeafe", "#2563eb"),
    "copy": ("#dcfce7", "#16a34a"),
    "fill": ("#f3f4f6", "#6b7280"),
    "host": ("#fef3c7", "#d97706"),
    "child": ("#ede9fe", "#7c3aed"),
    "if": ("#fce7f3", "#db2777"),
    "while": ("#fce7f3", "#db2777"),
    "request": ("#ffe4e6", "#e11d48"),
    "wait": ("#fce7f3", "#be185d"),
}
_OTHER = ("#ffffff", "#374151")
#: Kinds that a legend always explains; others where they occur.
_LEGEND_KINDS = ("kernel", "copy", "fill", "host")
_PLAIN, _CROSS = "#9ca3af", "#dc2626"

_BOX_HEIGHT, _ROW, _TOP, _MARGIN = 26, 40, 78, 24
_CHAR, _MIN_BOX, _MAX_BOX, _GAP, _LEGEND = 7.0, 110, 260, 90, 72


class _Node(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def lane(self) -> str: ...
    @property
    def index(self) -> int: ...


def dot(
    name: str, lanes: Sequence[str], nodes: Sequence[_Node], edges: Sequence[tuple[int, int]]
) -> str:
    """Return the graph as DOT text; node ids are ``n<index>``, lanes are clusters."""
    lines = [f"digraph {_quoted(name)} {{", '  node [shape=box, style="filled,rounded"];']
    for i, lane in enumerate(lanes):
        lines.append(f"  subgraph cluster_{i} {{")
        lines.append(f"    label={_quoted(lane)};")
        for node in nodes:
            if node.lane == lane:
                fill, stroke = COLOURS.get(node.kind, _OTHER)
                lines.append(
                    f"    n{node.index} [label={_quoted(node.name)}, tooltip={_quoted(node.kind)}, "
                    f'fillcolor="{fill}", color="{stroke}"];'
                )
        lines.append("  }")
    for start, end in edges:
        crosses = nodes[start].lane != nodes[end].lane
        style = f' [color="{_CROSS}", penwidth=2]' if crosses else ""
        lines.append(f"  n{start} -> n{end}{style};")
    lines.append("}")
    return "\n".join(lines) + "\n"


def svg(
    name: str, lanes: Sequence[str], nodes: Sequence[_Node], edges: Sequence[tuple[int, int]]
) -> str:
    """Return the graph as an SVG document."""
    layout = _Layout(name, lanes, nodes)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{layout.width:.0f}" '
        f'height="{layout.height:.0f}" viewBox="0 0 {layout.width:.0f} {layout.height:.0f}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12">',
        f"<title>{escape(name)}</title>",
        '<rect width="100%" height="100%" fill="white"/>',
        "<defs>",
        _arrow("plain", _PLAIN),
        _arrow("cross", _CROSS),
        "</defs>",
        f'<text x="{_MARGIN}" y="28" font-size="16" font-weight="bold">{escape(name)}</text>',
        *_legend(layout.width, layout.kinds),
    ]
    for lane in lanes:
        x = layout.centre[lane]
        parts.append(
            f'<line x1="{x:.1f}" y1="{_TOP - 8}" x2="{x:.1f}" y2="{layout.height - _MARGIN:.1f}" '
            'stroke="#e5e7eb" stroke-width="10" stroke-linecap="round"/>'
            f'<text x="{x:.1f}" y="{_TOP - 20}" text-anchor="middle" font-weight="bold" '
            f'fill="#374151">{escape(lane)}</text>'
        )
    parts += [layout.edge(start, end) for start, end in edges]
    parts += [layout.box(node) for node in nodes]
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


class _Layout:
    """Where things are: one column per lane, one row per node."""

    def __init__(self, name: str, lanes: Sequence[str], nodes: Sequence[_Node]) -> None:
        self.nodes = nodes
        used = {node.kind for node in nodes}
        self.kinds = [kind for kind in COLOURS if kind in used or kind in _LEGEND_KINDS]
        self.box_width: dict[str, float] = {}
        self.centre: dict[str, float] = {}
        x = float(_MARGIN)
        for lane in lanes:
            longest = max((len(n.name) for n in nodes if n.lane == lane), default=0)
            width = min(max(_CHAR * longest + 22, _MIN_BOX), _MAX_BOX)
            self.box_width[lane] = width
            self.centre[lane] = x + width / 2
            x += width + _GAP
        title = 2.0 * _MARGIN + 10 * len(name) + _LEGEND * len(self.kinds)
        self.width = max(x - _GAP + _MARGIN, title)
        self.height = float(_TOP + _ROW * max(len(nodes), 1) + _MARGIN)

    def y(self, index: int) -> float:
        return _TOP + _ROW * index + _BOX_HEIGHT / 2

    def box(self, node: _Node) -> str:
        fill, stroke = COLOURS.get(node.kind, _OTHER)
        width = self.box_width[node.lane]
        x, y = self.centre[node.lane] - width / 2, self.y(node.index) - _BOX_HEIGHT / 2
        room = int((width - 18) / _CHAR)
        label = node.name if len(node.name) <= room else node.name[: room - 1] + "…"
        return (
            f"<g><title>{escape(f'{node.index}: {node.kind} {node.name}')}</title>"
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{_BOX_HEIGHT}" rx="6" '
            f'fill="{fill}" stroke="{stroke}" stroke-width="1.4"/>'
            f'<text x="{self.centre[node.lane]:.1f}" y="{y + 17:.1f}" text-anchor="middle">'
            f"{escape(label)}</text></g>"
        )

    def edge(self, start: int, end: int) -> str:
        a, b = self.nodes[start], self.nodes[end]
        xa, xb = self.centre[a.lane], self.centre[b.lane]
        half = _BOX_HEIGHT / 2
        if a.lane != b.lane:
            side = 1 if xb > xa else -1
            x1 = xa + side * self.box_width[a.lane] / 2
            x2 = xb - side * self.box_width[b.lane] / 2 - side * 2
            y1, y2 = self.y(start) + 5, self.y(end) - 5  # out below, in above: they never touch
            bend = side * max(abs(x2 - x1) / 2, 30)
            path = f"M{x1:.1f},{y1:.1f} C{x1 + bend:.1f},{y1:.1f} {x2 - bend:.1f},{y2:.1f}"
            path += f" {x2:.1f},{y2:.1f}"
            return self._path(path, "cross", _CROSS, 1.8)
        y1, y2 = self.y(start) + half, self.y(end) - half - 2
        skipped = any(n.lane == a.lane for n in self.nodes[start + 1 : end])
        if not skipped:
            return self._path(f"M{xa:.1f},{y1:.1f} L{xb:.1f},{y2:.1f}", "plain", _PLAIN, 1.4)
        # An edge past other nodes of its lane goes around them on the left.
        left = xa - self.box_width[a.lane] / 2
        path = f"M{left:.1f},{self.y(start):.1f} C{left - 28:.1f},{self.y(start):.1f}"
        path += f" {left - 28:.1f},{self.y(end):.1f} {left - 2:.1f},{self.y(end):.1f}"
        return self._path(path, "plain", _PLAIN, 1.4)

    @staticmethod
    def _path(path: str, style: str, colour: str, width: float) -> str:
        return (
            f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width}" '
            f'marker-end="url(#{style})"/>'
        )


def _arrow(name: str, colour: str) -> str:
    return (
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        f'markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{colour}"/></marker>'
    )


def _legend(width: float, kinds: Sequence[str]) -> list[str]:
    parts = []
    x = width - _MARGIN - _LEGEND * len(kinds)
    for kind in kinds:
        fill, stroke = COLOURS[kind]
        parts.append(
            f'<rect x="{x:.1f}" y="18" width="12" height="12" rx="3" fill="{fill}" '
            f'stroke="{stroke}"/><text x="{x + 17:.1f}" y="28" fill="#374151">{kind}</text>'
        )
        x += _LEGEND
    return parts


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
