"""Benchmark of the prefix cache: time to first token with a system prompt shared by all requests.

    python -m graft.tools.bench.prefix [--tokens 2048] [--calls 5] [--model FOLDER --draft FOLDER]

Two engines, one with and one without the prefix cache, get the same requests one at a time and in
alternation. The requests share a prefix and end with different questions. The default model is
SmolLM2-135M-Instruct with its EAGLE-3 head. The first request of each engine finds an empty cache
and is reported separately.
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

CACHED = "with prefix cache"
UNCACHED = "without"


def make_prompts(engine: Engine, tokens: int, calls: int) -> list[list[int]]:
    """Return `calls` prompts that share their first `tokens` tokens."""
    texts = [engine.tokenizer.encode(task.text) for task in held_out_tasks(calls + tokens)]
    shared = list(chain.from_iterable(texts[calls:]))[:tokens]
    return [shared + text for text in texts[:calls]]


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m graft.tools.bench.prefix", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--tokens", type=int, default=2048, help="shared tokens (default %(default)s)"
    )
    parser.add_argument(
        "--calls", type=int, default=5, help="measured requests (default %(default)s)"
    )
    parser.add_argument(
        "--model", type=Path, help="target folder (default: SmolLM2, downloaded once)"
    )
    parser.add_argument("--draft", type=Path, help="drafter folder (default: SmolLM2's EAGLE head)")
    options = parser.parse_args(arguments)
    if min(options.tokens, options.calls) < 1:
        parser.error("--tokens and --calls must be above 0")
    return options


def measure(options: argparse.Namespace) -> dict[str, list[Output]]:
    """Run all requests on both engines and return the outputs by engine.

    Raises
    ------
    GraftError
        If a request fails, or the engines' outputs differ.
    """
    model = options.model or smollm()
    drafter = options.draft
    if drafter is None and options.model is None:
        drafter = HEAD
    cache_bytes = {CACHED: None, UNCACHED: 0}
    outputs: dict[str, list[Output]] = {name: [] for name in cache_bytes}
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(
                Engine(model, drafter, max_batch_size=1, prefix_cache_bytes=nbytes)
            )
            for name, nbytes in cache_bytes.items()
        }
        prompts = make_prompts(engines[CACHED], options.tokens, options.calls + 1)
        for tokens in tqdm(prompts, unit="request", disable=None):
            for name, engine in engines.items():
                [output] = engine.generate([Request(tokens=tokens, max_tokens=8)])
                if output.error is not None:
                    raise GraftError(f"{name}: {output.error}")
                outputs[name].append(output)
            if outputs[CACHED][-1].tokens != outputs[UNCACHED][-1].tokens:
                raise GraftError("the prefix cache changed an output")
    return outputs


def make_report(outputs: dict[str, list[Output]], tokens: int) -> str:
    """Return a table of times to first token and the ratio of the two engines."""
    rows: list[tuple[object, ...]] = [
        ("TTFT in ms", "cached tokens", "first request", "p50", "min", "max")
    ]
    times: dict[str, list[float]] = {}
    for name, found in outputs.items():
        times[name] = [(output.first_token_s or 0.0) * 1e3 for output in found]
        first, *others = times[name]
        cached_tokens = statistics.median(output.cached_tokens for output in found[1:])
        figures = (cached_tokens, first, statistics.median(others), min(others), max(others))
        rows.append((name, *(f"{figure:.0f}" for figure in figures)))
    pairs = zip(times[CACHED], times[UNCACHED], strict=True)
    speedups = [uncached / cached for cached, uncached in pairs][1:]
    return (
        f"{table(rows)}\n{tokens} shared tokens: TTFT is {statistics.median(speedups):.1f} times "
        f"shorter ({min(speedups):.1f} to {max(speedups):.1f} by request)"
    )


@program
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print the report."""
    options = parse_options(arguments)
    print(make_report(measure(options), options.tokens))


if __name__ == "__main__":
    sys.exit(main())
