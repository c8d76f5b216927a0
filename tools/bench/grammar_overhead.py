"""Benchmark of grammar overhead: round time with a grammar relative to the time without one.

    python -m graft.tools.bench.grammar_overhead [--batches 1 4 8 64] [--pairs 20] [--tokens 64]
        [--json FILE]

An engine with the demo model and its EAGLE-3 head runs pairs of batches, one with a grammar and one
without, in random order. The grammar runs on the host. The round time of a batch is the median time
from the beginning of a round to that of the next one by the device's clock. A round is measured
only if it contains all requests of the batch: rounds with fewer requests are shorter, and a batch
without grammars has more of them. The overhead is the mean ratio of the two round times of a pair,
with a 95 % confidence interval that treats pairs as independent samples. Times measured on the soft
device say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from graft.cudagraph.device import open_device
from graft.cudagraph.errors import GraftError
from graft.grammar import GrammarSpec
from graft.models.engine.engine import Engine
from graft.models.engine.options import InternalOptions
from graft.models.request import Request
from graft.tools.bench.generation import Intervals, run
from graft.tools.bench.harness import add_counts, finish, make_parser, number_from
from graft.tools.bench.speculation_metrics import MIN_SAMPLES, estimate_mean
from graft.tools.console import program, table
from graft.tools.demo_model import demo_model

GRAMMAR = GrammarSpec.regex("([a-z]{1,9} )+")


def make_requests(batch: int, tokens: int) -> list[Request]:
    """Return requests without grammar. Their outputs have `tokens` tokens."""
    requests = []
    for seed in range(batch):
        request = Request(
            tokens=[300 + seed],
            max_tokens=tokens,
            min_tokens=tokens,
            closing="off",
            temperature=1.0,
            seed=seed,
            verify="coupled",
        )
        requests.append(request)
    return requests


def round_time(engine: Engine, requests: list[Request]) -> float:
    """Run requests and return the median time of a round with all of them, in microseconds."""
    intervals = Intervals(min_requests=len(requests))
    run(engine, requests, intervals)
    if not intervals.times:
        raise GraftError("too few rounds contain all requests; increase --tokens")
    return intervals.percentiles()["p50"]


def measure_batch(batch: int, pairs: int, tokens: int) -> dict[str, Any]:
    """Measure pairs at one batch size. Return the ratio's estimate and the times of all pairs."""
    unguided = make_requests(batch, tokens)
    guided = [replace(request, grammar=GRAMMAR) for request in unguided]
    order = random.Random(batch)
    times = []
    with Engine(
        *demo_model(), max_batch_size=batch, internal=InternalOptions(device_automata=False)
    ) as engine:
        for requests in (guided, unguided):
            run(engine, requests, Intervals())  # compile kernels and the grammar
        for _ in tqdm(range(pairs), unit="pair", disable=None):
            if order.random() < 0.5:
                guided_us = round_time(engine, guided)
                unguided_us = round_time(engine, unguided)
            else:
                unguided_us = round_time(engine, unguided)
                guided_us = round_time(engine, guided)
            times.append((guided_us, unguided_us))
    ratio = estimate_mean([with_us / without_us for with_us, without_us in times])
    return {"batch": batch, "ratio": ratio, "guided_unguided_us": times}


def make_report(results: dict[str, Any]) -> str:
    """Return a table of the ratios."""
    rows: list[tuple[object, ...]] = [("batch", "guided / unguided", "95 % from", "to", "pairs")]
    for one in results["batches"]:
        ratio = one["ratio"]
        figures = [f"{ratio[name]:.3f}" for name in ("mean", "low", "high")]
        rows.append((one["batch"], *figures, ratio["n"]))
    return f"device: {results['device']}\n{table(rows)}"


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser("graft.tools.bench.grammar_overhead", __doc__)
    parser.add_argument("--batches", type=number_from(1), nargs="+", default=[1, 4, 8, 64])
    add_counts(
        parser,
        ("pairs", 20, f"pairs per batch size, at least {MIN_SAMPLES}"),
        ("tokens", 64, "tokens per output"),
    )
    options = parser.parse_args(arguments)
    if options.pairs < MIN_SAMPLES:
        parser.error(f"--pairs must be at least {MIN_SAMPLES}, not {options.pairs}")
    return options


@program
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    options = parse_options(arguments)
    batches = [measure_batch(batch, options.pairs, options.tokens) for batch in options.batches]
    results = {"device": open_device().describe(), "batches": batches}
    finish(options, results, make_report(results))


if __name__ == "__main__":
    sys.exit(main())
