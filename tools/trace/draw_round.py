"""Draw the CUDA graph of a decoding round with speculation and structured output.

    python -m graft.tools.trace.draw_round OUT.svg|OUT.dot [--fold]

A round is one replay of the engine's graph: the target model verifies the drafts of the previous
round, tokens are sampled and committed, and the drafter proposes the next drafts. A lane is an
in-order sequence of graph nodes. A round has the lane "model" for its kernels and the lane
"grammar" for host steps and copies of token bitmasks.

With ``--fold``, consecutive nodes of a lane are merged into one box. The picture
``models/round.svg`` is written by this command:

    python -m graft.tools.trace.draw_round models/round.svg --fold
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

from graft.cudagraph.graph.drawing import COLOURS, OTHER_COLOURS, dot
from graft.cudagraph.graph.graph import Graph, Node
from graft.models.engine.engine import Engine
from graft.tools.console import program
from graft.tools.demo_model import demo_model

#: Maximum number of characters of the text in a box.
MAX_LABEL = 34
#: Lanes of a round, in the order of their columns in the picture.
LANES = ("model", "grammar")
#: Colour of edges within a lane.
EDGE_COLOUR = "#9ca3af"
#: Colour of edges between lanes.
CROSSING_COLOUR = "#dc2626"
#: Sizes and distances in pixels.
LEFT = 40
BOX_WIDTH = 260
BOX_HEIGHT = 26
ROW_HEIGHT = 40
COLUMN_GAP = 90
TOP = 70


# Folding ------------------------------------------------------------------------------------------


def run_label(names: Sequence[str]) -> str:
    """Return the label of a run of nodes.

    The label has the names of the first and the last node, and the number of nodes. The names skip
    nodes that write time stamps, unless the run has no other nodes.

    Parameters
    ----------
    names
        Names of the nodes of the run, in order.
    """
    if len(names) == 1:
        return names[0]
    named = [name for name in names if not name.startswith("stamp ")]
    if not named:
        named = list(names)
    if len(named) == 1:
        return named[0]
    count = len(names)
    label = f"{named[0]} … {named[-1]} ({count})"
    if len(label) > MAX_LABEL:
        label = f"{named[0]} … ({count})"
    return label


def _split_runs(graph: Graph) -> list[list[int]]:
    """Return the node indices of each run. A run is a sequence of nodes that `fold` merges."""
    nodes = graph.nodes
    run_ends = set()
    run_starts = set()
    for start, end in graph.edges:
        if nodes[start].lane != nodes[end].lane:
            run_ends.add(start)
            run_starts.add(end)
    runs: list[list[int]] = []
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
    return runs


def fold(graph: Graph) -> tuple[list[Node], list[tuple[int, int]]]:
    """Merge each run of nodes of a graph into one node.

    A run is a sequence of consecutive nodes of one lane that have the same kind. A node on which a
    node of another lane depends is the last node of its run. A node that depends on a node of
    another lane is the first node of its run.

    Returns
    -------
    runs : list of Node
        One node per run, in the order in which the runs begin.
    edges : list of (int, int)
        Edges between runs, as pairs of indices into `runs`.
    """
    folded = []
    run_of_node: dict[int, int] = {}
    for number, run in enumerate(_split_runs(graph)):
        first = graph.nodes[run[0]]
        label = run_label([graph.nodes[i].name for i in run])
        folded.append(Node(label, first.kind, first.lane, number))
        for i in run:
            run_of_node[i] = number
    edges = set()
    for start, end in graph.edges:
        edge = (run_of_node[start], run_of_node[end])
        if edge[0] != edge[1]:
            edges.add(edge)
    return folded, sorted(edges)


# Drawing ------------------------------------------------------------------------------------------


class _Layout:
    """Positions of the boxes: a column per lane and a row per node.

    Attributes
    ----------
    x
        Horizontal position of the middle of each lane's column, in pixels.
    width, height
        Size of the picture in pixels.
    """

    def __init__(self, lanes: Sequence[str], nodes: Sequence[Node]):
        self._nodes = nodes
        column_width = BOX_WIDTH + COLUMN_GAP
        self.x = {}
        for i, lane in enumerate(lanes):
            self.x[lane] = LEFT + BOX_WIDTH / 2 + i * column_width
        first_y = TOP + BOX_HEIGHT / 2
        self._y = [first_y + ROW_HEIGHT * i for i in range(len(nodes))]
        self.width = 2 * LEFT + len(lanes) * column_width - COLUMN_GAP
        self.height = TOP + ROW_HEIGHT * len(nodes) + 20

    def draw_edge(self, start: int, end: int) -> str:
        """Return the edge between two nodes as an SVG element."""
        nodes = self._nodes
        if nodes[start].lane != nodes[end].lane:
            path = self._path_between_lanes(start, end)
            marker = "cross"
            colour = CROSSING_COLOUR
        else:
            path = self._path_within_lane(start, end)
            marker = "plain"
            colour = EDGE_COLOUR
        return (
            f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6" '
            f'marker-end="url(#{marker})"/>'
        )

    def _path_between_lanes(self, start: int, end: int) -> str:
        """Return a curve from the side of one box to the side of a box in another column."""
        x1 = self.x[self._nodes[start].lane]
        x2 = self.x[self._nodes[end].lane]
        direction = 1 if x2 > x1 else -1
        x1 += direction * BOX_WIDTH / 2
        x2 -= direction * (BOX_WIDTH / 2 + 2)
        # Edges leave a box below its middle and enter a box above its middle, so that an edge that
        # leaves does not touch an edge that enters.
        y1 = self._y[start] + 5
        y2 = self._y[end] - 5
        bend = direction * COLUMN_GAP / 2
        bend1 = x1 + bend
        bend2 = x2 - bend
        return f"M{x1},{y1} C{bend1},{y1} {bend2},{y2} {x2},{y2}"

    def _path_within_lane(self, start: int, end: int) -> str:
        """Return a line between two boxes of a column, or a curve around the boxes in between."""
        lane = self._nodes[start].lane
        x = self.x[lane]
        y1 = self._y[start]
        y2 = self._y[end]
        if any(node.lane == lane for node in self._nodes[start + 1 : end]):
            left = x - BOX_WIDTH / 2
            bend = left - 28
            return f"M{left},{y1} C{bend},{y1} {bend},{y2} {left - 2},{y2}"
        bottom = y1 + BOX_HEIGHT / 2
        top = y2 - BOX_HEIGHT / 2 - 2
        return f"M{x},{bottom} L{x},{top}"

    def draw_node(self, node: Node) -> str:
        """Return the box of a node as an SVG element."""
        x = self.x[node.lane]
        y = self._y[node.index]
        left = x - BOX_WIDTH / 2
        top = y - BOX_HEIGHT / 2
        fill, stroke = COLOURS.get(node.kind, OTHER_COLOURS)
        title = escape(f"{node.index}: {node.kind} {node.name}")
        text = node.name
        if len(text) > MAX_LABEL:
            text = text[: MAX_LABEL - 1] + "…"
        return (
            f"<g><title>{title}</title>"
            f'<rect x="{left}" y="{top}" width="{BOX_WIDTH}" '
            f'height="{BOX_HEIGHT}" rx="6" fill="{fill}" stroke="{stroke}"/>'
            f'<text x="{x}" y="{y + 4}" text-anchor="middle">'
            f"{escape(text)}</text></g>"
        )


def _arrow(name: str, colour: str) -> str:
    """Return the definition of an arrow head that edges refer to by name."""
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
        Names of the lanes, from left to right.
    nodes
        Nodes by index.
    edges
        Pairs of node indices: the node that an edge leaves and the node that it enters.
    """
    layout = _Layout(lanes, nodes)
    title = escape(name)
    markers = _arrow("plain", EDGE_COLOUR) + _arrow("cross", CROSSING_COLOUR)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{layout.width}" '
        f'height="{layout.height}" font-family="Helvetica, Arial, sans-serif" font-size="12">',
        f"<title>{title}</title>",
        '<rect width="100%" height="100%" fill="white"/>',
        f"<defs>{markers}</defs>",
        f'<text x="24" y="24" font-size="16" font-weight="bold">{title}</text>',
    ]
    for lane in lanes:
        x = layout.x[lane]
        parts.append(
            f'<text x="{x:.0f}" y="50" text-anchor="middle" font-weight="bold">'
            f"{escape(lane)}</text>"
        )
    for start, end in edges:
        parts.append(layout.draw_edge(start, end))
    for node in nodes:
        parts.append(layout.draw_node(node))
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


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
        nodes = graph.nodes
        edges = graph.edges
        if options.fold:
            nodes, edges = fold(graph)
    draw = dot if options.out.suffix == ".dot" else svg
    title = f"a round: {len(graph.nodes)} nodes"
    options.out.write_text(draw(title, LANES, nodes, edges))
    print(f"{options.out}: {len(nodes)} boxes")


if __name__ == "__main__":
    sys.exit(main())
