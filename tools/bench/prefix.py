"""What the prefix cache saves: time to first token behind a system prompt that all callers share.

    python -m graft.tools.bench.prefix [--tokens 2048] [--calls 5] [--model FOLDER --draft FOLDER]

Two engines, one without the cache, are asked the same by turns, one call at a time; each call has
another question behind the same beginning. The model is SmolLM2-135M-Instruct with its head. The
first call of each engine, which finds nothing, is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

from tqdm import tqdm

from graft.cudagraph.errors import GraftError
from graft.models.engine.engine import Engine
from graft.models.request import Output, Request
from graft.tools.demo_tasks import held_out_tasks
from graft.tools.report import program, table
from graft.tools.smollm import HEAD, smollm


def prompts(engine: Engine, tokens: int, calls: int) -> list[list[int]]:
    """Prompts that share so many tokens and go on by a question of their own."""
    texts = [engine.tokenizer.encode(task.text) for task in held_out_tasks(calls + tokens)]
    shared = list(chain.from_iterable(texts[calls:]))[:tokens]
    return [shared + text for text in texts[:calls]]


@program
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m graft.tools.bench.prefix", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--tokens", type=int, default=2048, help="shared (default %(default)s)")
    parser.add_argument("--calls", type=int, default=5, help="counted (default %(default)s)")
    parser.add_argument("--model", type=Path, help="target folder (default: SmolLM2, fetched once)")
    parser.add_argument("--draft", type=Path, help="drafter's folder (default: SmolLM2's, if any)")
    options = parser.parse_args(arguments)
    if min(options.tokens, options.calls) < 1:
        parser.error("--tokens and --calls must be above 0")
    model = options.model or smollm()
    drafter = options.draft or (None if options.model else HEAD)
    heard: dict[str, list[Output]] = {"with the cache": [], "without": []}
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(
                Engine(model, drafter, max_batch_size=1, prefix_cache_bytes=most)
            )
            for name, most in zip(heard, (None, 0), strict=True)
        }
        asked = prompts(next(iter(engines.values())), options.tokens, options.calls + 1)
        for tokens in tqdm(asked, unit="call", disable=None):
            for name, engine in engines.items():
                heard[name] += engine.generate([Request(tokens=tokens, max_tokens=8)])
                if (error := heard[name][-1].error) is not None:
                    raise GraftError(f"{name}: {error}")
            if len({tuple(outputs[-1].tokens) for outputs in heard.values()}) > 1:
                raise GraftError("the cache changed an output")
    rows = []
    ms = {
        name: [(o.first_token_s or 0.0) * 1e3 for o in outputs] for name, outputs in heard.items()
    }
    for name, (first, *more) in ms.items():
        found = statistics.median(output.cached_tokens for output in heard[name][1:])
        rows.append(
            (
                name,
                f"{found:.0f}",
                *(
                    f"{value:.0f}"
                    for value in (first, statistics.median(more), min(more), max(more))
                ),
            )
        )
    print(
        table([("ms to the first token", "found", "first call", "later", "least", "most"), *rows])
    )
    ratio = [without / cached for cached, without in zip(*ms.values(), strict=True)][1:]
    print(
        f"{options.tokens} shared tokens: {statistics.median(ratio):.1f} times shorter "
        f"({min(ratio):.1f} to {max(ratio):.1f}, call by call)"
    )


if __name__ == "__main__":
    sys.exit(main())
