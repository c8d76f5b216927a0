"""Trace rounds of the demo and write the timeline for Perfetto and as a picture. Usage::

    python -m graft.tools.timeline [OUT.json] [--requests 4] [--draft-length 3] [--unmasked]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from graft.cudagraph.errors import GraftError, OptionError
from graft.cudagraph.trace import Trace
from graft.models.engine import Engine
from graft.models.request import Request
from graft.models.tracing import trace_rounds
from graft.tools.demo_model import demo_model
from graft.tools.demo_prompts import demo_prompts

OUT = Path(__file__).resolve().parent / "results" / "timeline.json"


def check_trace_path(path: Path) -> None:
    """Refuse a path that could not be written later."""
    if path.suffix != ".json":
        raise OptionError(f"--trace {path}: the name must end in .json")
    if not path.parent.is_dir():
        raise OptionError(f"--trace {path}: there is no folder {path.parent}")


def typical(trace: Trace) -> Trace:
    """The replay of median length, of those with the most events."""
    parts = [trace.only(*which) for which in trace.replays()]
    most = max(len(part.events) for part in parts)
    full = [part for part in parts if len(part.events) == most]

    def length(part: Trace) -> int:
        return max(e.end_ns for e in part.events) - part.events[0].start_ns

    return sorted(full, key=length)[len(full) // 2]


def write_trace(trace: Trace, path: Path) -> None:
    """Write the whole trace as JSON and one typical round as a picture beside it."""
    path.write_text(trace.to_chrome())
    if trace.events:
        one = typical(trace)
        picture = one.to_svg(f"One {one.events[0].graph}, replay {one.events[0].replay}")
        path.with_suffix(".svg").write_text(picture)


def main(arguments: Sequence[str] | None = None) -> int:
    """Trace the demo's rounds; the JSON holds one typical round, the summary all of them."""
    parser = argparse.ArgumentParser(description="Trace rounds of the demo model.")
    parser.add_argument("out", type=Path, nargs="?", default=OUT, help="file to write, .json")
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--draft-length", type=int, default=3)
    parser.add_argument("--unmasked", action="store_true", help="draft without the grammar")
    options = parser.parse_args(arguments)
    try:
        check_trace_path(options.out)
        target, drafter = demo_model()
        requests = [
            Request(prompt=prompt.text, grammar=prompt.grammar, max_tokens=48)
            for prompt in demo_prompts()[: options.requests]
        ]
        with Engine(target, drafter, max_batch_size=len(requests),
                    draft_length=options.draft_length,
                    mask_drafts=not options.unmasked) as engine:
            engine.generate(requests)  # everything was used once before it is timed
            with trace_rounds(engine) as trace:
                engine.generate(requests)
        write_trace(trace, options.out)
        one = typical(trace)
        options.out.write_text(one.to_chrome())
    except GraftError as error:
        print(f"graft: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(json.dumps(trace.summary(), indent=1, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
