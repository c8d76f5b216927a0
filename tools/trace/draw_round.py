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
from dataclasses import replace
from pathlib import Path

from graft.cudagraph.graph.drawing import dot, svg
from graft.cudagraph.graph.graph import Graph
from graft.cudagraph.graph.nodes import Contents, Node
from graft.models.engine.engine import Engine
from graft.models.engine.selection import GraphKey
from graft.tools.console import program
from graft.tools.demo_model import demo_model

#: Maximum number of characters of the text in a box.
MAX_LABEL = 34


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


def fold(graph: Graph) -> Contents:
    """Return the contents of a graph, in which each run of nodes is merged into one node.

    A run is a sequence of consecutive nodes of one lane that have the same kind. A node on which a
    node of another lane depends ends its run. A node that depends on a node of another lane begins
    a new run. The runs are in the order in which they begin.
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
    return Contents(graph.name, folded, sorted(edges), tails=dict.fromkeys(graph.lanes, ()))


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
        contents = fold(graph) if options.fold else graph.contents
    contents = replace(contents, name=f"a round: {len(graph.nodes)} nodes")
    draw = dot if options.out.suffix == ".dot" else svg
    options.out.write_text(draw(contents))
    print(f"{options.out}: {len(contents.nodes)} boxes")


if __name__ == "__main__":
    sys.exit(main())
