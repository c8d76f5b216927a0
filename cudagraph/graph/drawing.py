"""Conversion of a graph to Graphviz's DOT language. Edges between lanes are highlighted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graft.cudagraph.graph.nodes import Node

#: Fill and stroke colours, by node kind.
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
OTHER_COLOURS = ("#ffffff", "#374151")
_LANE_CROSSING = "#dc2626"


def dot(
    name: str, lanes: Sequence[str], nodes: Sequence[Node], edges: Sequence[tuple[int, int]]
) -> str:
    """Return a graph in Graphviz's DOT language.

    Each lane becomes a cluster. The ids of nodes are ``n<index>``; edges are pairs of node indices.
    """
    lines = [f"digraph {_quoted(name)} {{", '  node [shape=box, style="filled,rounded"];']
    for i, lane in enumerate(lanes):
        lines.append(f"  subgraph cluster_{i} {{")
        lines.append(f"    label={_quoted(lane)};")
        lines.extend(_node_line(node) for node in nodes if node.lane == lane)
        lines.append("  }")
    for start, end in edges:
        crosses = nodes[start].lane != nodes[end].lane
        style = f' [color="{_LANE_CROSSING}", penwidth=2]' if crosses else ""
        lines.append(f"  n{start} -> n{end}{style};")
    lines.append("}")
    return "\n".join(lines) + "\n"


def _node_line(node: Node) -> str:
    fill, stroke = COLOURS.get(node.kind, OTHER_COLOURS)
    attributes = ", ".join(
        [
            f"label={_quoted(node.name)}",
            f"tooltip={_quoted(node.kind)}",
            f'fillcolor="{fill}"',
            f'color="{stroke}"',
        ]
    )
    return f"    n{node.index} [{attributes}];"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
