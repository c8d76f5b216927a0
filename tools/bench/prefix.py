"""Benchmark of the prefix cache: TTFT of requests that share a long prompt prefix.

    python -m graft.tools.bench.prefix [--tokens 2048] [--calls 5] [--model FOLDER --draft FOLDER]

TTFT is the time to first token. Two engines, one with and one without the prefix cache, process the
same requests alternately, one request at a time. All requests share a prefix, as requests with the
same system prompt do, and end with different questions. The default model is SmolLM2-135M-Instruct
with its EAGLE-3 head. The first request of each engine finds an empty cache and is reported
separately.
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
    """Return token ids of `calls` prompts that share their first `tokens` tokens."""
    tasks = held_out_tasks(calls + tokens)
    texts = [engine.tokenizer.encode(task.text) for task in tasks]
    questions = texts[:calls]
    shared = list(chain.from_iterable(texts[calls:]))[:tokens]
    return [shared + question for question in questions]


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
    """Run all requests on both engines and return the outputs by the engine's name.

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
        engines = {}
        for name, nbytes in cache_bytes.items():
            engine = Engine(model, drafter, max_batch_size=1, prefix_cache_bytes=nbytes)
            engines[name] = stack.enter_context(engine)
        prompts = make_prompts(engines[CACHED], options.tokens, options.calls + 1)
        for tokens in tqdm(prompts, unit="request", disable=None):
            for name, engine in engines.items():
                [output] = engine.generate([Request(tokens=tokens, max_tokens=8)])
                if output.error is not None:
                    raise GraftError(f"{name}: {output.error}")
                outputs[name].append(output)
            cached_output = outputs[CACHED][-1]
            uncached_output = outputs[UNCACHED][-1]
            if cached_output.tokens != uncached_output.tokens:
                raise GraftError("the prefix cache changed an output")
    return outputs


def make_report(outputs: dict[str, list[Output]], tokens: int) -> str:
    """Return a table of the engines' TTFT, followed by the speedup from the prefix cache."""
    rows: list[tuple[object, ...]] = [
        ("TTFT in ms", "cached tokens", "first request", "p50", "min", "max")
    ]
    times: dict[str, list[float]] = {}
    for name, found in outputs.items():
        times[name] = [(output.first_token_s or 0.0) * 1e3 for output in found]
        first, *others = times[name]
        cached_tokens = statistics.median(output.cached_tokens for output in found[1:])
        median = statistics.median(others)
        figures = (cached_tokens, first, median, min(others), max(others))
        rows.append((name, *(f"{figure:.0f}" for figure in figures)))
    pairs = zip(times[CACHED], times[UNCACHED], strict=True)
    speedups = [uncached / cached for cached, uncached in pairs][1:]
    speedup = statistics.median(speedups)
    lowest = min(speedups)
    highest = max(speedups)
    return (
        f"{table(rows)}\n{tokens} shared tokens: TTFT is {speedup:.1f} times "
        f"shorter ({lowest:.1f} to {highest:.1f} by request)"
    )


@program
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print the report."""
    options = parse_options(arguments)
    print(make_report(measure(options), options.tokens))


if __name__ == "__main__":
    sys.exit(main())
