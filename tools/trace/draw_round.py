"""Draw the graph of one round of guided speculation as graft itself sees it. Usage::

python -m graft.tools.trace.draw_round OUT.svg|OUT.dot [--fold]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

from graft.cudagraph.drawing import COLOURS, OTHER_COLOURS, dot
from graft.cudagraph.graph import Graph, Node
from graft.models.engine.engine import Engine
from graft.tools.demo_model import demo_model
from graft.tools.report import program

#: Longest label that a box of the drawing shows in full.
LABEL = 34
#: The lanes of a round, as columns.
LANES = ("model", "grammar")
PLAIN = "#9ca3af"
CROSS = "#dc2626"
BOX = 260
HEIGHT = 26
ROW = 40
GAP = 90
TOP = 70


def label(names: Sequence[str]) -> str:
    """Name of a run: its first and last node, time stamps aside, and how many there are."""
    telling = [name for name in names if not name.startswith("stamp ")] or list(names)
    if len(names) == 1:
        return names[0]
    if len(telling) == 1:
        return telling[0]
    whole = f"{telling[0]} … {telling[-1]} ({len(names)})"
    return whole if len(whole) <= LABEL else f"{telling[0]} … ({len(names)})"


def fold(graph: Graph) -> tuple[list[Node], list[tuple[int, int]]]:
    """Runs of a graph as nodes, in the order in which they begin, and the edges between them.

    A run is nodes of one lane and kind that follow each other. It ends where a node of another lane
    waits for it, and begins where it waits for one.
    """
    nodes = graph.nodes
    crossing = [(a, b) for a, b in graph.edges if nodes[a].lane != nodes[b].lane]
    left = {a for a, _ in crossing}
    entered = {b for _, b in crossing}
    groups: list[list[int]] = []
    latest: dict[str, list[int]] = {}
    for i, node in enumerate(nodes):
        run = latest.get(node.lane)
        if run is None or i in entered or run[-1] in left or nodes[run[-1]].kind != node.kind:
            run = latest[node.lane] = []
            groups.append(run)
        run.append(i)
    group_of = {i: number for number, run in enumerate(groups) for i in run}
    runs = []
    for number, run in enumerate(groups):
        first = nodes[run[0]]
        runs.append(Node(label([nodes[i].name for i in run]), first.kind, first.lane, number))
    pairs = {(group_of[a], group_of[b]) for a, b in graph.edges}
    return runs, sorted(pair for pair in pairs if pair[0] != pair[1])


def svg(
    name: str, lanes: Sequence[str], nodes: Sequence[Node], edges: Sequence[tuple[int, int]]
) -> str:
    """Return a graph as SVG: lanes are columns, time runs downwards, a node a row."""
    x = {lane: 40 + BOX / 2 + i * (BOX + GAP) for i, lane in enumerate(lanes)}
    y = [TOP + ROW * i + HEIGHT / 2 for i in range(len(nodes))]
    width = 80 + len(lanes) * (BOX + GAP) - GAP
    height = TOP + ROW * len(nodes) + 20
    arrow = (
        '<marker id="{0}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{1}"/></marker>'
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12">',
        f"<title>{escape(name)}</title>",
        '<rect width="100%" height="100%" fill="white"/>',
        f"<defs>{arrow.format('plain', PLAIN)}{arrow.format('cross', CROSS)}</defs>",
        f'<text x="24" y="24" font-size="16" font-weight="bold">{escape(name)}</text>',
    ]
    for lane in lanes:
        parts.append(
            f'<text x="{x[lane]:.0f}" y="50" text-anchor="middle" font-weight="bold">'
            f"{escape(lane)}</text>"
        )
    for a, b in edges:
        (xa, xb), (ya, yb) = (x[nodes[a].lane], x[nodes[b].lane]), (y[a], y[b])
        side = (xb > xa) - (xb < xa)
        if side:  # out below, in above: they never touch
            x1 = xa + side * BOX / 2
            x2 = xb - side * (BOX / 2 + 2)
            bend = side * GAP / 2
            path = f"M{x1},{ya + 5} C{x1 + bend},{ya + 5} {x2 - bend},{yb - 5} {x2},{yb - 5}"
        elif any(n.lane == nodes[a].lane for n in nodes[a + 1 : b]):  # around those between
            left = xa - BOX / 2
            path = f"M{left},{ya} C{left - 28},{ya} {left - 28},{yb} {left - 2},{yb}"
        else:
            path = f"M{xa},{ya + HEIGHT / 2} L{xb},{yb - HEIGHT / 2 - 2}"
        style, colour = ("cross", CROSS) if side else ("plain", PLAIN)
        parts.append(
            f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6" '
            f'marker-end="url(#{style})"/>'
        )
    for node in nodes:
        fill, stroke = COLOURS.get(node.kind, OTHER_COLOURS)
        text = node.name if len(node.name) <= LABEL else node.name[: LABEL - 1] + "…"
        parts.append(
            f"<g><title>{escape(f'{node.index}: {node.kind} {node.name}')}</title>"
            f'<rect x="{x[node.lane] - BOX / 2}" y="{y[node.index] - HEIGHT / 2}" width="{BOX}" '
            f'height="{HEIGHT}" rx="6" fill="{fill}" stroke="{stroke}"/>'
            f'<text x="{x[node.lane]}" y="{y[node.index] + 4}" text-anchor="middle">'
            f"{escape(text)}</text></g>"
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


@program
def main(arguments: Sequence[str] | None = None) -> None:
    """Draw a round of the demo model; the suffix chooses SVG or DOT."""
    parser = argparse.ArgumentParser(description="Draw one round's graph.")
    parser.add_argument("out", type=Path, help="file to write, .svg or .dot")
    parser.add_argument("--fold", action="store_true", help="one box per run of nodes")
    options = parser.parse_args(arguments)
    if options.out.suffix not in (".svg", ".dot"):
        parser.error(f"{options.out}: the name must end in .svg or .dot")
    target, drafter = demo_model()
    with Engine(
        target, drafter, max_batch_size=1, draft_length=3, grammar_transport="native", timeline=True
    ) as engine:
        graph = engine.round_graphs[1, 3].graphs[0]
        nodes, edges = fold(graph) if options.fold else (graph.nodes, graph.edges)
    write = dot if options.out.suffix == ".dot" else svg
    options.out.write_text(write(f"a round: {len(graph.nodes)} nodes", LANES, nodes, edges))
    print(f"{options.out}: {len(nodes)} boxes")


if __name__ == "__main__":
    sys.exit(main())
