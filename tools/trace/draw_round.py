"""Draw the graph of a decoding round with speculation and structured output.

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

#: Maximum number of characters in a box.
MAX_LABEL = 34
#: Lanes of a round in the order of their columns.
LANES = ("model", "grammar")
#: Colours of edges within a lane and between lanes.
EDGE_COLOUR = "#9ca3af"
CROSSING_COLOUR = "#dc2626"
LEFT = 40
BOX_WIDTH = 260
BOX_HEIGHT = 26
ROW_HEIGHT = 40
COLUMN_GAP = 90
TOP = 70


# Folding ------------------------------------------------------------------------------------------


def run_label(names: Sequence[str]) -> str:
    """Return the label of a run: its first and last node and the number of nodes.

    Nodes that write time stamps are not named unless the run has no others.
    """
    if len(names) == 1:
        return names[0]
    named = [name for name in names if not name.startswith("stamp ")] or list(names)
    if len(named) == 1:
        return named[0]
    label = f"{named[0]} … {named[-1]} ({len(names)})"
    return label if len(label) <= MAX_LABEL else f"{named[0]} … ({len(names)})"


def fold(graph: Graph) -> tuple[list[Node], list[tuple[int, int]]]:
    """Merge the runs of a graph.

    A run is a sequence of nodes of the same lane and kind. It ends at a node that another lane
    waits for, and begins at a node that waits for another lane.

    Returns
    -------
    runs : list of Node
        Runs in the order in which they begin.
    edges : list of (int, int)
        Edges between runs.
    """
    nodes = graph.nodes
    crossing = [(a, b) for a, b in graph.edges if nodes[a].lane != nodes[b].lane]
    run_ends = {a for a, _ in crossing}
    run_starts = {b for _, b in crossing}
    runs: list[list[int]] = []
    run_of: dict[int, int] = {}
    current: dict[str, list[int]] = {}
    for i, node in enumerate(nodes):
        run = current.get(node.lane)
        if (
            run is None
            or i in run_starts
            or run[-1] in run_ends
            or nodes[run[-1]].kind != node.kind
        ):
            run = []
            current[node.lane] = run
            runs.append(run)
        run.append(i)
    folded = []
    for number, run in enumerate(runs):
        first = nodes[run[0]]
        label = run_label([nodes[i].name for i in run])
        folded.append(Node(label, first.kind, first.lane, number))
        for i in run:
            run_of[i] = number
    edges = {(run_of[a], run_of[b]) for a, b in graph.edges}
    return folded, sorted((a, b) for a, b in edges if a != b)


# Drawing ------------------------------------------------------------------------------------------


class _Layout:
    """Positions of nodes: a column per lane and a row per node."""

    def __init__(self, lanes: Sequence[str], nodes: Sequence[Node]):
        self._nodes = nodes
        self.x = {}
        for i, lane in enumerate(lanes):
            self.x[lane] = LEFT + BOX_WIDTH / 2 + i * (BOX_WIDTH + COLUMN_GAP)
        self._y = [TOP + ROW_HEIGHT * i + BOX_HEIGHT / 2 for i in range(len(nodes))]
        self.width = 2 * LEFT + len(lanes) * (BOX_WIDTH + COLUMN_GAP) - COLUMN_GAP
        self.height = TOP + ROW_HEIGHT * len(nodes) + 20

    def draw_edge(self, start: int, end: int) -> str:
        """Return an edge as an SVG element."""
        nodes = self._nodes
        lane = nodes[start].lane
        x1 = self.x[lane]
        x2 = self.x[nodes[end].lane]
        y1 = self._y[start]
        y2 = self._y[end]
        crosses = x1 != x2
        if crosses:
            # Edges leave below the middle of a box and enter above it, so that they do not touch.
            side = 1 if x2 > x1 else -1
            x1 += side * BOX_WIDTH / 2
            x2 -= side * (BOX_WIDTH / 2 + 2)
            bend = side * COLUMN_GAP / 2
            path = f"M{x1},{y1 + 5} C{x1 + bend},{y1 + 5} {x2 - bend},{y2 - 5} {x2},{y2 - 5}"
        elif any(node.lane == lane for node in nodes[start + 1 : end]):
            # Pass the boxes in between on their left.
            left = x1 - BOX_WIDTH / 2
            path = f"M{left},{y1} C{left - 28},{y1} {left - 28},{y2} {left - 2},{y2}"
        else:
            path = f"M{x1},{y1 + BOX_HEIGHT / 2} L{x2},{y2 - BOX_HEIGHT / 2 - 2}"
        marker, colour = ("cross", CROSSING_COLOUR) if crosses else ("plain", EDGE_COLOUR)
        return (
            f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6" '
            f'marker-end="url(#{marker})"/>'
        )

    def draw_node(self, node: Node) -> str:
        """Return a node as an SVG element."""
        x = self.x[node.lane]
        y = self._y[node.index]
        fill, stroke = COLOURS.get(node.kind, OTHER_COLOURS)
        text = node.name if len(node.name) <= MAX_LABEL else node.name[: MAX_LABEL - 1] + "…"
        return (
            f"<g><title>{escape(f'{node.index}: {node.kind} {node.name}')}</title>"
            f'<rect x="{x - BOX_WIDTH / 2}" y="{y - BOX_HEIGHT / 2}" width="{BOX_WIDTH}" '
            f'height="{BOX_HEIGHT}" rx="6" fill="{fill}" stroke="{stroke}"/>'
            f'<text x="{x}" y="{y + 4}" text-anchor="middle">'
            f"{escape(text)}</text></g>"
        )


def _arrow(name: str, colour: str) -> str:
    return (
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        f'markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{colour}"/></marker>'
    )


def svg(
    name: str, lanes: Sequence[str], nodes: Sequence[Node], edges: Sequence[tuple[int, int]]
) -> str:
    """Return a graph as SVG. Lanes are columns, and each node is below its predecessors.

    Parameters
    ----------
    name
        Title of the picture.
    lanes
        Names of the lanes.
    nodes
        Nodes by index.
    edges
        Indices of the nodes: from, to.
    """
    layout = _Layout(lanes, nodes)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{layout.width}" '
        f'height="{layout.height}" font-family="Helvetica, Arial, sans-serif" font-size="12">',
        f"<title>{escape(name)}</title>",
        '<rect width="100%" height="100%" fill="white"/>',
        f"<defs>{_arrow('plain', EDGE_COLOUR)}{_arrow('cross', CROSSING_COLOUR)}</defs>",
        f'<text x="24" y="24" font-size="16" font-weight="bold">{escape(name)}</text>',
    ]
    for lane in lanes:
        parts.append(
            f'<text x="{layout.x[lane]:.0f}" y="50" text-anchor="middle" font-weight="bold">'
            f"{escape(lane)}</text>"
        )
    parts += [layout.draw_edge(start, end) for start, end in edges]
    parts += [layout.draw_node(node) for node in nodes]
    return "\n".join([*parts, "</svg>"]) + "\n"


# Program ------------------------------------------------------------------------------------------


@program
def main(arguments: Sequence[str] | None = None) -> None:
    """Draw a round of the demo model as SVG or DOT, depending on the file name."""
    parser = argparse.ArgumentParser(
        prog="python -m graft.tools.trace.draw_round", description="Draw the graph of a round."
    )
    parser.add_argument("out", type=Path, help="output file, .svg or .dot")
    parser.add_argument("--fold", action="store_true", help="draw one box per run of nodes")
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
