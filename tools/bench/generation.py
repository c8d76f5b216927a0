"""Benchmark of generation loops: time between rounds with a busy and an idle Python interpreter.

    python -m graft.tools.bench.generation [--tokens 200] [--runs 5] [--batch 1] [--kind free]
        [--model FOLDER --draft FOLDER]

Two engines process the same requests alternately: one launches each round, the other runs many
rounds per launch (``generation="graph"``). The time between rounds is the time between the
beginnings of two consecutive rounds of a batch by the device's clock. It does not contain the
time until a caller receives the tokens. In the busy runs, a thread executes Python bytecode without
a pause. On the soft device, all threads share the processor, so its times say nothing about GPUs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tqdm import tqdm

from graft.cudagraph.errors import GraftError
from graft.grammar import GrammarSpec
from graft.models.engine.engine import Engine
from graft.models.engine.replay import ReplayInFlight
from graft.models.request import Request
from graft.tools.demo_model import demo_model
from graft.tools.report import busy_python, program, table

#: Grammars by kind. "device" runs as an automaton on the device, "host" on the host.
KINDS = ("free", "device", "host")
_REGEX = "([a-z]{1,9} ){400}"
#: Values of the option `generation`.
MODES = ("rounds", "graph")
_INTERPRETERS = ("idle", "busy")


@dataclass
class Intervals:
    """Times between rounds of one engine under one condition, in nanoseconds.

    Attributes
    ----------
    times
        Time between the beginnings of consecutive rounds.
    rounds, launches
        Number of rounds, and of launches of graphs.
    """

    times: list[int] = field(default_factory=list)
    rounds: int = 0
    launches: int = 0
    _last: int = 0

    def begin(self) -> None:
        """Begin a run."""
        self._last = 0

    def record(self, flight: ReplayInFlight, stamps: list[int]) -> None:
        """Record a round, given the time stamps of its parts."""
        if flight.rows and self._last:
            self.times.append(stamps[0] - self._last)
        self._last = stamps[0] if flight.rows else 0


def make_requests(options: argparse.Namespace) -> list[Request]:
    """Return the requests of a run. Their outputs have equal lengths."""
    grammar = None if options.kind == "free" else GrammarSpec.regex(_REGEX)
    requests = []
    for seed in range(options.batch):
        requests.append(
            Request(
                tokens=[300 + seed],
                max_tokens=options.tokens,
                min_tokens=options.tokens,
                grammar=grammar,
                temperature=1.0,
                seed=seed,
                verify="coupled",
            )
        )
    return requests


def run(engine: Engine, requests: list[Request], intervals: Intervals) -> list[list[int]]:
    """Process the requests, record the intervals and return the tokens of the outputs."""
    engine.reset_stats()
    intervals.begin()
    engine._replays.on_parts = intervals.record
    outputs = engine.generate(requests)
    engine.synchronize()
    engine._replays.on_parts = None
    intervals.rounds += engine.stats.rounds
    intervals.launches += engine.stats.launches
    for output in outputs:
        if output.error is not None:
            raise GraftError(output.error)
    return [output.tokens for output in outputs]


def measure(options: argparse.Namespace) -> dict[tuple[str, str], Intervals]:
    """Return the intervals by value of the option `generation` and the state of the interpreter.

    Raises
    ------
    GraftError
        If a request fails, or the engines' outputs differ.
    """
    model, drafter = options.model, options.draft
    if model is None:
        model, drafter = demo_model()
    found = {(mode, python): Intervals() for mode in MODES for python in _INTERPRETERS}
    requests = make_requests(options)
    with ExitStack() as stack:
        engines = {}
        for mode in MODES:
            engine = Engine(
                model,
                drafter,
                max_batch_size=options.batch,
                generation=mode,
                device_automata=options.kind == "device",
            )
            engines[mode] = stack.enter_context(engine)
            run(engine, requests, Intervals())  # compiles the grammar
        for _ in tqdm(range(options.runs), unit="run", disable=None):
            for python in _INTERPRETERS:
                with busy_python(lambda: sum(range(100))) if python == "busy" else nullcontext():
                    tokens = [run(engines[mode], requests, found[mode, python]) for mode in MODES]
                if tokens[0] != tokens[1]:
                    raise GraftError("generation loops changed an output")
    return found


def make_report(found: dict[tuple[str, str], Intervals]) -> str:
    """Return a table of the times between rounds in microseconds."""
    rows: list[tuple[object, ...]] = [
        ("generation", "Python", "p50 in us", "p90", "p99", "max", "rounds", "launches")
    ]
    for (mode, python), intervals in found.items():
        times = np.percentile(np.array(intervals.times) * 1e-3, [50, 90, 99, 100])
        figures = (f"{time:.0f}" for time in times)
        rows.append((mode, python, *figures, intervals.rounds, intervals.launches))
    return table(rows, left=2)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m graft.tools.bench.generation", description=(__doc__ or "").splitlines()[0]
    )
    for name, default, text in (
        ("tokens", 200, "tokens per output"),
        ("runs", 5, "runs of each engine per state of the interpreter"),
        ("batch", 1, "requests that run together"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, help=f"{text} (default {default})"
        )
    parser.add_argument(
        "--kind",
        choices=KINDS,
        default="free",
        help="requests without grammar, or where their grammar runs (default %(default)s)",
    )
    parser.add_argument("--model", type=Path, help="target folder (default: the demo model)")
    parser.add_argument("--draft", type=Path, help="drafter folder")
    options = parser.parse_args(arguments)
    if min(options.tokens, options.runs, options.batch) < 1:
        parser.error("--tokens, --runs and --batch must be above 0")
    return options


@program
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print the report."""
    options = parse_options(arguments)
    print(make_report(measure(options)))


if __name__ == "__main__":
    sys.exit(main())
