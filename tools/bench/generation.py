"""Benchmark of generation loops: time between rounds while Python bytecode is executed.

    python -m graft.tools.bench.generation [--tokens 200] [--runs 5] [--batch 1] [--kind free]
        [--device-core N] [--model FOLDER --draft FOLDER] [--json FILE]

Two engines process the same requests alternately: one launches each round, the other runs many
rounds per launch (``generation="graph"``). The time between rounds is the time between the
beginnings of two consecutive rounds of a batch by the device's clock. It does not include the
time until a caller receives the tokens.

Both engines are measured under three loads: without other work, while another process executes
Python bytecode without a pause, and while another thread of this process does so. The process and
the thread each occupy a processor, but the process has its own interpreter. The difference between
these two loads is therefore the effect of the GIL.

A GPU does not use the processors of the host. The threads of the soft device share them with all
other threads unless ``--device-core`` reserves a core for the device. With this option, the times
show how much the device waits for the host.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tqdm import tqdm

from graft.cudagraph.device import open_device
from graft.cudagraph.errors import GraftError, OptionError
from graft.grammar import GrammarSpec
from graft.models.engine.engine import Engine
from graft.models.engine.options import InternalOptions
from graft.models.engine.replay import ReplayInFlight
from graft.models.request import Request
from graft.tools.bench.harness import add_counts, finish, make_parser
from graft.tools.console import busy_python, program, table
from graft.tools.demo_model import demo_model

#: Kinds of requests: without a grammar, and with a grammar whose automaton runs on the device.
KINDS = ("free", "device")
_REGEX = "([a-z]{1,9} )+"
#: Values of the option `generation`.
MODES = ("rounds", "graph")

#: Loads: what executes Python bytecode during the measurement. This is nothing, another process, or
#: another thread of this process.
LOADS = ("idle", "process", "thread")
_PERCENTILES = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
#: Time limit in seconds for building the automaton of the grammar.
_AUTOMATON_S = 30.0


@dataclass
class Intervals:
    """Times between the beginnings of consecutive rounds of one engine under one load.

    Rounds with fewer than `min_requests` requests are not measured.
    """

    min_requests: int = 1
    times: list[int] = field(default_factory=list)  #: nanoseconds
    rounds: int = 0
    launches: int = 0
    _last: int = 0

    def begin(self) -> None:
        """Begin a run. The time since the last round of the previous run is not recorded."""
        self._last = 0

    def record(self, flight: ReplayInFlight, stamps: list[int]) -> None:
        """Record the replay `flight`, which runs one round.

        `stamps[0]` is the device time at which it began, in nanoseconds.
        """
        if flight.rows and self._last:
            self.times.append(stamps[0] - self._last)
        self._last = stamps[0] if len(flight.rows) >= self.min_requests else 0

    def percentiles(self) -> dict[str, float]:
        """Return percentiles of the times, in microseconds."""
        times = np.percentile(np.array(self.times) * 1e-3, list(_PERCENTILES.values()))
        return dict(zip(_PERCENTILES, times.tolist(), strict=True))


@contextmanager
def _busy_process() -> Iterator[None]:
    """Run another Python interpreter, which executes bytecode until the context ends."""
    with subprocess.Popen([sys.executable, "-S", "-c", "while True: sum(range(100))"]) as process:
        try:
            yield
        finally:
            process.kill()


def _apply_load(load: str) -> AbstractContextManager[None]:
    """Return a context that applies a load, one of `LOADS`, until the context ends."""
    if load == "process":
        return _busy_process()
    return busy_python(lambda: sum(range(100))) if load == "thread" else nullcontext()


def _reserve_core(core: int) -> None:
    """Run the threads of the soft device on one core, and all other threads on other cores.

    Call this function before a device is opened. The device starts its threads when it is opened,
    and a thread runs on the cores of the thread that starts it.
    """
    cores = os.sched_getaffinity(0)
    others = cores - {core}
    if core not in cores or not others:
        raise OptionError(
            f"--device-core must be one of at least two usable cores, got {core}; usable are "
            f"{sorted(cores)}"
        )
    os.sched_setaffinity(0, {core})
    try:
        device = open_device()
    finally:
        os.sched_setaffinity(0, others)
    if device.kind != "soft":
        raise OptionError(f"--device-core requires the soft device, but this is {device.kind}")


def make_requests(options: argparse.Namespace) -> list[Request]:
    """Return the requests that each run processes. Their outputs have equal lengths."""
    grammar = None if options.kind == "free" else GrammarSpec.regex(_REGEX)
    requests = []
    for seed in range(options.batch):
        requests.append(
            Request(
                tokens=[300 + seed],
                max_tokens=options.tokens,
                min_tokens=options.tokens,
                grammar=grammar,
                closing="off",
                temperature=1.0,
                seed=seed,
                verify="coupled",
            )
        )
    return requests


def run(engine: Engine, requests: list[Request], intervals: Intervals) -> list[list[int]]:
    """Process the requests, add the measured times to `intervals`, and return the output tokens."""
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


def _warm_up(engine: Engine, requests: list[Request], kind: str) -> None:
    """Run the requests until kernels are compiled and, for `kind` "device", automata are built.

    Automata count as built as soon as no round evaluates a grammar on the host.
    """
    run(engine, requests, Intervals())
    deadline = time.monotonic() + _AUTOMATON_S
    while kind == "device" and ("host" in engine.stats.rounds_by_kind or not engine.stats.rounds):
        if time.monotonic() > deadline:
            raise GraftError("the automaton of the grammar was not built in time")
        run(engine, requests, Intervals())


def measure(options: argparse.Namespace) -> dict[tuple[str, str], Intervals]:
    """Measure the times between rounds, and return them by (value of option `generation`, load).

    The tool creates one engine for each value of the option. Raise GraftError if their outputs
    differ.
    """
    if options.device_core is not None:
        _reserve_core(options.device_core)
    model, drafter = options.model, options.draft
    if model is None:
        model, drafter = demo_model()
    found = {(mode, load): Intervals() for mode in MODES for load in LOADS}
    requests = make_requests(options)
    with ExitStack() as stack:
        engines = {}
        for mode in MODES:
            engine = Engine(
                model,
                drafter,
                max_batch_size=options.batch,
                generation=mode,
                internal=InternalOptions(device_automata=options.kind == "device"),
            )
            engines[mode] = stack.enter_context(engine)
            _warm_up(engine, requests, options.kind)
        for _ in tqdm(range(options.runs), unit="run", disable=None):
            for load in LOADS:
                with _apply_load(load):
                    tokens = [run(engines[mode], requests, found[mode, load]) for mode in MODES]
                if tokens[0] != tokens[1]:
                    raise GraftError("generation loops changed an output")
    return found


def make_report(found: dict[tuple[str, str], Intervals]) -> str:
    """Return a table of the times between rounds in microseconds, with one line per measurement."""
    rows: list[tuple[object, ...]] = [
        ("generation", "load", "p50 in us", "p90", "p99", "max", "rounds", "launches")
    ]
    for (mode, load), intervals in found.items():
        figures = [f"{time:.0f}" for time in intervals.percentiles().values()]
        rows.append((mode, load, *figures, intervals.rounds, intervals.launches))
    return table(rows, left=2)


def make_results(found: dict[tuple[str, str], Intervals]) -> list[dict[str, object]]:
    """Return the content of the JSON file: percentiles, and counts of rounds and launches."""
    results = []
    for (mode, load), intervals in found.items():
        counts = {"rounds": intervals.rounds, "launches": intervals.launches}
        times = {f"{name}_us": us for name, us in intervals.percentiles().items()}
        results.append({"generation": mode, "load": load, **counts, **times})
    return results


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser("graft.tools.bench.generation", __doc__)
    add_counts(
        parser,
        ("tokens", 200, "tokens per output"),
        ("runs", 5, "runs of each engine per load"),
        ("batch", 1, "requests that run together"),
    )
    parser.add_argument(
        "--kind",
        choices=KINDS,
        default="free",
        help="requests without grammar, or with a grammar on the device (default %(default)s)",
    )
    parser.add_argument(
        "--device-core",
        type=int,
        metavar="N",
        help="core that only the threads of the soft device use",
    )
    parser.add_argument("--model", type=Path, help="target folder (default: the demo model)")
    parser.add_argument("--draft", type=Path, help="drafter folder")
    return parser.parse_args(arguments)


@program
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    options = parse_options(arguments)
    found = measure(options)
    finish(options, {"results": make_results(found)}, make_report(found))


if __name__ == "__main__":
    sys.exit(main())
