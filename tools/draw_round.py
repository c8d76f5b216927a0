"""Draw the graph of one round of guided speculation as graft itself sees it. Usage::

    python -m graft.tools.draw_round OUT.svg|OUT.dot [--batch 1] [--draft-length 3] [--unmasked]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from graft.cudagraph.errors import GraftError
from graft.models.engine import Engine
from graft.tools.demo_model import demo_model


def draw(path: Path, batch: int, draft_length: int, masked: bool) -> int:
    """Write the picture and return its number of nodes; the suffix chooses SVG or DOT."""
    target, drafter = demo_model()
    with Engine(target, drafter, max_batch_size=batch, draft_length=draft_length,
                mask_drafts=masked) as engine:
        graph = engine.rounds[batch].graph
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(graph.dot() if path.suffix == ".dot" else graph.svg())
        return len(graph.nodes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw a round of the demo model."""
    parser = argparse.ArgumentParser(description="Draw one round's graph.")
    parser.add_argument("out", type=Path, help="file to write, .svg or .dot")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--draft-length", type=int, default=3)
    parser.add_argument("--unmasked", action="store_true", help="draft without the grammar")
    options = parser.parse_args(arguments)
    if options.out.suffix not in (".svg", ".dot"):
        parser.error(f"{options.out}: the name must end in .svg or .dot")
    try:
        nodes = draw(options.out, options.batch, options.draft_length, not options.unmasked)
    except GraftError as error:
        print(f"graft: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(f"{options.out}: {nodes} nodes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
