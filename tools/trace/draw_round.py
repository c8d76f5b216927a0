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
from pathlib import Path

from graft.cudagraph.graph import svg
from graft.cudagraph.graph.drawing import COLOURS, OTHER_COLOURS, dot
from graft.cudagraph.graph.graph import Graph, Node
from graft.models.engine.engine import Engine
from graft.models.engine.selection import GraphKey
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
#: Sizes of the picture's boxes, and distances between them, in pixels.
LEFT = 40
BOX_WIDTH = 260
BOX_HEIGHT = 26
ROW_HEIGHT = 40
COLUMN_GAP = 90
TOP = 83


# Folding ------------------------------------------------------------------------------------------


def run_label(names: Sequence[str]) -> str:
    """Return the label of consecutive nodes, given their names in order.

    The label has the names of the first and the last node, and the number of nodes. Nodes that
    write time stamps are counted, but they are named only if all nodes write time stamps. If
    exactly one node writes no time stamp, the label is its name.
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
    node of another lane depends ends its run. A node that depends on a node of another lane begins
    a new run. Return one node per run, in the order in which the runs begin, and the edges between
    runs as pairs of indices into the returned nodes.
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


def draw(
    title: str, lanes: Sequence[str], nodes: Sequence[Node], edges: Sequence[tuple[int, int]]
) -> str:
    """Return a graph as SVG. Lanes are columns, and each node is below its predecessors."""
    column = {}
    for i, lane in enumerate(lanes):
        column[lane] = LEFT + BOX_WIDTH / 2 + i * (BOX_WIDTH + COLUMN_GAP)
    centres = [(column[node.lane], TOP + ROW_HEIGHT * i) for i, node in enumerate(nodes)]
    markers = _arrow("plain", EDGE_COLOUR) + _arrow("cross", CROSSING_COLOUR)
    parts = [f"<defs>{markers}</defs>"]
    parts += [svg.text(column[lane], 50, lane, "middle", "bold") for lane in lanes]
    for start, end in edges:
        if nodes[start].lane != nodes[end].lane:
            path = _path_between_lanes(centres[start], centres[end])
            marker, colour = "cross", CROSSING_COLOUR
        else:
            skips = any(node.lane == nodes[end].lane for node in nodes[start + 1 : end])
            path = _path_within_lane(centres[start], centres[end], skips)
            marker, colour = "plain", EDGE_COLOUR
        parts.append(
            f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6" '
            f'marker-end="url(#{marker})"/>'
        )
    for node, (x, y) in zip(nodes, centres, strict=True):
        left, top = x - BOX_WIDTH / 2, y - BOX_HEIGHT / 2
        colours = COLOURS.get(node.kind, OTHER_COLOURS)
        hover = f"{node.index}: {node.kind} {node.name}"
        parts.append(svg.box(left, top, BOX_WIDTH, BOX_HEIGHT, node.name, colours, hover))
    width = 2 * LEFT + len(lanes) * (BOX_WIDTH + COLUMN_GAP) - COLUMN_GAP
    return svg.document(width, TOP + ROW_HEIGHT * len(nodes), title, parts)


def _path_between_lanes(start: tuple[float, float], end: tuple[float, float]) -> str:
    """Return a curve from the side of one box to the side of a box in another column.

    Edges leave a box below its middle and enter a box above its middle. Outgoing and incoming edges
    of a box therefore do not touch.
    """
    direction = 1 if end[0] > start[0] else -1
    x1 = start[0] + direction * BOX_WIDTH / 2
    x2 = end[0] - direction * (BOX_WIDTH / 2 + 2)
    y1 = start[1] + 5
    y2 = end[1] - 5
    bend = direction * COLUMN_GAP / 2
    return f"M{x1},{y1} C{x1 + bend},{y1} {x2 - bend},{y2} {x2},{y2}"


def _path_within_lane(start: tuple[float, float], end: tuple[float, float], skips: bool) -> str:
    """Return a line between two boxes of a column, or a curve if it skips boxes in between."""
    (x, y1), (_, y2) = start, end
    if skips:
        left = x - BOX_WIDTH / 2
        return f"M{left},{y1} C{left - 28},{y1} {left - 28},{y2} {left - 2},{y2}"
    return f"M{x},{y1 + BOX_HEIGHT / 2} L{x},{y2 - BOX_HEIGHT / 2 - 2}"


def _arrow(name: str, colour: str) -> str:
    """Return the definition of an arrow head that edges refer to by name."""
    return (
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        f'markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{colour}"/></marker>'
    )


# Program ------------------------------------------------------------------------------------------


@program
def main(arguments: Sequence[str] | None = None) -> None:
    """Draw a round of the demo model as SVG or DOT, depending on the file name."""
    parser = argparse.ArgumentParser(
        prog="python -m graft.tools.trace.draw_round", description="Draw the graph of a round."
    )
    parser.add_argument("out", type=Path, help="output file, .svg or .dot")
    parser.add_argument(
        "--fold", action="store_true", help="merge consecutive nodes of a lane into one box"
    )
    options = parser.parse_args(arguments)
    if options.out.suffix not in (".svg", ".dot"):
        parser.error(f"{options.out}: the name must end in .svg or .dot")
    target, drafter = demo_model()
    with Engine(
        target, drafter, max_batch_size=1, draft_length=3, grammar_transport="native", timeline=True
    ) as engine:
        graph = engine.graphs[GraphKey(1, 3)].graphs[0]
        nodes = graph.nodes
        edges = graph.edges
        if options.fold:
            nodes, edges = fold(graph)
    write = dot if options.out.suffix == ".dot" else draw
    title = f"a round: {len(graph.nodes)} nodes"
    options.out.write_text(write(title, LANES, nodes, edges))
    print(f"{options.out}: {len(nodes)} boxes")


if __name__ == "__main__":
    sys.exit(main())
