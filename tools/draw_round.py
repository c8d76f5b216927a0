"""Draw the graph of one round of guided speculation as graft itself sees it. Usage::

    python -m graft.tools.draw_round OUT.svg|OUT.dot [--fold] [--batch 1] [--draft-length 3]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from graft.cudagraph import drawing
from graft.cudagraph.errors import GraftError
from graft.cudagraph.graph import Graph, Node
from graft.models.engine import Engine
from graft.tools.demo_model import demo_model

#: Longest label that a box of the drawing shows in full.
LABEL = 34
#: The lanes of a round, as columns.
LANES = ("model", "grammar")


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
    left, entered = {a for a, _ in crossing}, {b for _, b in crossing}
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


def draw(path: Path, batch: int, draft_length: int, masked: bool, folded: bool) -> int:
    """Write the picture and return its number of boxes; the suffix chooses SVG or DOT."""
    target, drafter = demo_model()
    with Engine(target, drafter, max_batch_size=batch, draft_length=draft_length,
                mask_drafts=masked, grammar_transport="native") as engine:
        graph = engine.rounds[batch].graph
        nodes, edges = fold(graph) if folded else (graph.nodes, graph.edges)
        title = f"a round: {len(graph.nodes)} nodes"
        write = drawing.dot if path.suffix == ".dot" else drawing.svg
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(write(title, LANES, nodes, edges))
        return len(nodes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw a round of the demo model."""
    parser = argparse.ArgumentParser(description="Draw one round's graph.")
    parser.add_argument("out", type=Path, help="file to write, .svg or .dot")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--draft-length", type=int, default=3)
    parser.add_argument("--unmasked", action="store_true", help="draft without the grammar")
    parser.add_argument("--fold", action="store_true", help="one box per run of nodes")
    options = parser.parse_args(arguments)
    if options.out.suffix not in (".svg", ".dot"):
        parser.error(f"{options.out}: the name must end in .svg or .dot")
    try:
        boxes = draw(options.out, options.batch, options.draft_length, not options.unmasked,
                     options.fold)
    except GraftError as error:
        print(f"graft: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(f"{options.out}: {boxes} boxes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
