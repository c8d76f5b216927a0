"""Measure the latency of host work in a replayed graph, by transport.

    python -m graft.tools.labs.callback_latency [--samples 1000] [--callbacks 1 8 64]
        [--json build/callback_latency.json]

A host step is a graph node that runs host work. Its body is the native or Python function that does
the work, and its transport is the mechanism that calls the body, such as a host function node or a
mailbox worker. A callback is one call of a body. Two latencies are reported:

join
    Device time from the kernel before the host steps to the kernel after them, minus the median
    device time of the same graph with empty nodes in place of the host steps.
hop
    Host time of the call path: from the entry of the C function that the driver's thread calls to
    the first instruction of the body, plus the time from the body to the return of that function.
    The time to wake the thread is not included because it is the same for all transports. Only the
    soft device records hops.

All graphs are replayed in one process. The tool takes the graphs in random order and replays each
one a few times, so that changes of the machine's speed affect all graphs equally. The loop that
launches the graphs does not use the GIL.

Each graph is measured in two states of Python. In the state "idle", no other Python thread runs. In
the state "busy", another thread runs bytecode, and a replay is launched only while this thread
runs. The tool counts the callbacks that began while the busy thread held the GIL. A measurement in
the state "busy" is marked NOT BUSY if the busy thread held the GIL at the first callback in less
than 90 % of the replays.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from graft.cudagraph.device import Device, open_device
from graft.native import _native
from graft.tools.console import busy_python, program
from graft.tools.console import table as format_table
from graft.tools.labs.callback_latency.transports import (
    BASELINE,
    MAX_CALLBACKS,
    TRANSPORTS,
    Samples,
    TransportGraph,
    unavailable,
)

PYTHON_STATES = ("idle", "busy")
#: Number of consecutive replays of one graph.
BATCH = 10
#: Share of replays in which the busy Python thread should hold the GIL at the first callback. A
#: measurement with a smaller share is reported as ``NOT BUSY``.
MIN_BUSY_SHARE = 0.9
QUANTILES = {"p50": 0.5, "p99": 0.99, "max": 1.0}
#: Number of times that the wake-up of a sleeping thread is measured.
WAKE_UPS = 400
WARNING = "These are times of the soft device, a CPU. They do not apply to a GPU."


@dataclass
class Measurement:
    """Samples of one graph, measured while Python is idle or busy."""

    graph: TransportGraph  #: measured graph
    python: str  #: "idle" or "busy"
    #: Nanoseconds from the kernel before the host steps to the kernel after them, and nanoseconds
    #: of the path of each call, as in the module's docstring; one array per batch of replays.
    join: list[np.ndarray] = field(default_factory=list)
    hop: list[np.ndarray] = field(default_factory=list)
    #: Whether each callback began while the busy thread, which runs bytecode during the
    #: measurement, held the GIL; one bool array per batch of replays.
    gil_held: list[np.ndarray] = field(default_factory=list)

    def add(self, samples: Samples, gaps: Sequence[tuple[int, int]]) -> None:
        """Add the samples of a batch.

        `gaps` has start and end of each interval in which the busy thread did not run, from which
        `gil_was_held` computes the callbacks that began while this thread held the GIL.
        """
        self.join.append(samples.join)
        if samples.hop is not None:
            self.hop.append(samples.hop.sum(axis=-1).ravel())
        if self.python == "busy":
            self.gil_held.append(gil_was_held(samples.begun, gaps))
        else:
            self.gil_held.append(np.zeros(len(samples.begun), bool))


def gil_was_held(begun: np.ndarray, gaps: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return whether each callback began while the busy thread held the GIL (bool [n]).

    The busy thread held the GIL if it ran between the end of the previous callback and the start of
    this callback. Only callbacks request the GIL, so once the busy thread has run, it holds the GIL
    until the next callback, even if the operating system preempts it.

    `begun` has the start of each callback and the end of the previous one (int64 [n, 2]). `gaps`
    has start and end of each interval in which the busy thread did not run. All times are
    CLOCK_MONOTONIC values.
    """
    spans = np.array(gaps, np.uint64).astype(np.int64).reshape(-1, 2)
    within_gap = (begun[:, 1:] >= spans[:, 0]) & (begun[:, :1] <= spans[:, 1])
    return np.asarray(~within_gap.any(axis=1))


def measure(
    graphs: Sequence[TransportGraph],
    samples: int,
    python_states: Sequence[str],
    limit_s: float,
    seed: int = 0,
) -> list[Measurement]:
    """Measure all graphs in the given states of Python ("idle", "busy"), in random order.

    The first batch of replays of each graph is a warm-up and is discarded. `samples` is the number
    of replays per graph and state. When the time limit of a state is reached, the measurements
    have fewer samples, but at least one batch.
    """
    rng = random.Random(seed)
    done = []
    for state in python_states:
        measurements = [Measurement(graph, state) for graph in graphs]
        batches = range(1 + -(-samples // BATCH))
        with busy_python(_native.labs.tick) if state == "busy" else nullcontext():
            start = time.monotonic()
            for batch in tqdm(batches, desc=state, unit="batch", disable=None):
                for measurement in rng.sample(measurements, len(measurements)):
                    _native.labs.gaps()  # discard earlier gaps
                    found = measurement.graph.replay(BATCH, state == "busy")
                    if batch:
                        measurement.add(found, _native.labs.gaps())
                if batch and time.monotonic() - start > limit_s:
                    break
        done += measurements
    return done


# Report -------------------------------------------------------------------------------------------


def quantiles(nanoseconds: np.ndarray) -> dict[str, float]:
    """Return p50, p99 and the maximum in microseconds. Quantiles are not interpolated."""
    ordered = np.sort(nanoseconds) / 1000.0
    last = len(nanoseconds) - 1
    return {name: float(ordered[round(q * last)]) for name, q in QUANTILES.items()}


def summarize(measurement: Measurement, baseline_ns: float) -> dict[str, Any]:
    """Return the results of one measurement.

    The result ``join_us`` describes the device time that the callbacks add between the kernels
    before and after them. Each sample is the measured time (`Measurement.join`) minus
    `baseline_ns`, the median time between these kernels in a graph with empty nodes in place of the
    callbacks.
    """
    join = np.concatenate(measurement.join)
    gil_held = np.concatenate(measurement.gil_held).reshape(len(join), -1)
    return {
        "transport": measurement.graph.transport,
        "callbacks": measurement.graph.callbacks,
        "python": measurement.python,
        "samples": len(join),
        "join_us": quantiles(join - baseline_ns),
        "hop_us": quantiles(np.concatenate(measurement.hop)) if measurement.hop else None,
        "gil_held": float(gil_held.mean()),
        "was_busy": bool(gil_held[:, 0].mean() >= MIN_BUSY_SHARE),
    }


def make_report(device: Device, measurements: Sequence[Measurement]) -> dict[str, Any]:
    """Return the results of all measurements and a description of the machine."""
    baselines: dict[tuple[str, int], float] = {}
    for one in measurements:
        if one.graph.transport == BASELINE:
            median = float(np.median(np.concatenate(one.join)))
            baselines[one.python, one.graph.callbacks] = median
    results = []
    for one in measurements:
        baseline_ns = baselines[one.python, one.graph.callbacks]
        results.append(summarize(one, baseline_ns))
    reasons = {name: unavailable(name) for name in TRANSPORTS}
    return {
        "device": device.describe(),
        "kind": device.kind,
        "warning": WARNING if device.kind == "soft" else "",
        "wake_up_us": quantiles(np.array(_native.labs.wake_ups(WAKE_UPS))),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg(),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "unavailable": {name: reason for name, reason in reasons.items() if reason},
        "measurements": results,
    }


def processor() -> str:
    """Return the CPU model, or the architecture if the model is unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    for line in lines:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def table(report: dict[str, Any]) -> str:
    """Format the report as text."""
    columns = []
    for latency in ("hop", "join"):
        columns += [f"{latency} {quantile}" for quantile in QUANTILES]
    rows: list[list[object]] = [
        ["transport", "steps", "python", "samples", *columns, "GIL held", ""]
    ]
    for one in report["measurements"]:
        figures = []
        for values in (one["hop_us"], one["join_us"]):
            for quantile in QUANTILES:
                figures.append("-" if values is None else f"{values[quantile]:.2f}")
        is_busy = one["python"] == "busy"
        rows.append(
            [
                one["transport"],
                one["callbacks"],
                one["python"],
                one["samples"],
                *figures,
                f"{one['gil_held']:.0%}" if is_busy else "",
                "NOT BUSY" if is_busy and not one["was_busy"] else "",
            ]
        )
    wake_up = report["wake_up_us"]
    lines = [
        f"device: {report['device']}; {report['cores']} cores of {report['processor']}",
        f"waking a sleeping thread takes {wake_up['p50']:.0f} us on this machine (p99 "
        f"{wake_up['p99']:.0f} us); every join of a sleeping worker includes it",
        "microseconds; hop: to the body and back; join: minus the join of empty nodes",
        format_table(rows),
    ]
    lines += [f"not measured: {name}: {why}" for name, why in report["unavailable"].items()]
    if report["warning"]:
        lines.append(report["warning"])
    return "\n".join(lines)


# Program ------------------------------------------------------------------------------------------


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m graft.tools.labs.callback_latency",
        description="Measure the latency of host work in a replayed graph.",
    )
    parser.add_argument("--samples", type=int, default=1000, help="replays per configuration")
    parser.add_argument(
        "--callbacks",
        type=int,
        nargs="+",
        default=(1, 8, 64),
        metavar="N",
        help=f"host steps per graph, 1 to {MAX_CALLBACKS}",
    )
    parser.add_argument("--python", nargs="+", choices=PYTHON_STATES, default=PYTHON_STATES)
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=TRANSPORTS)
    parser.add_argument(
        "--limit-s",
        type=float,
        default=300.0,
        help="maximum seconds per state of Python; reduces the number of samples",
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(arguments)
    if options.samples < 1 or not all(1 <= n <= MAX_CALLBACKS for n in options.callbacks):
        parser.error(f"--samples must be at least 1, --callbacks 1 to {MAX_CALLBACKS}")
    return options


@program
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the measurement, print a table and write the JSON file."""
    options = parse_options(arguments)
    device = open_device()
    names = dict.fromkeys([BASELINE, *options.transports])
    available = [name for name in names if not unavailable(name)]
    with ExitStack() as stack:
        graphs = [
            stack.enter_context(closing(TransportGraph(device, name, callbacks)))
            for callbacks in options.callbacks
            for name in available
        ]
        measurements = measure(graphs, options.samples, options.python, options.limit_s)
        report = make_report(device, measurements)
    print(table(report))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
