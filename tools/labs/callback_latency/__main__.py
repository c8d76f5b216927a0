"""The latency laboratory: what host work in a replayed graph costs, transport by transport.

Two figures. The *join*: from the kernel before the host steps to the kernel after them, by the
device's clock, less the median of the same graph with empty nodes. The *hop*: from the entry of the
C function that the driver's thread calls to the first instruction of the user's body, and back; it
leaves out how the thread was woken, which is the same for all. Only the soft device records hops.

All arms live in one process and take turns, some replays at a time, in random order, so that a
change of the machine's mood meets all of them. Replays are launched by a loop that never needs the
GIL. Python is "idle", or "busy": another thread runs bytecode, and a replay is launched only when
it does. How often callbacks really began while it had the GIL is counted; a cell in which the first
callbacks of the replays seldom did is no cell of a busy interpreter, and says so. Usage::

    python -m graft.tools.labs.callback_latency [--samples 1000] [--callbacks 1 8 64]
        [--json build/callback_latency.json]
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
from graft.tools.labs.callback_latency.arms import (
    ARMS,
    BASELINE,
    MOST,
    Arm,
    Samples,
    unavailable,
)
from graft.tools.report import busy_python, program
from graft.tools.report import table as columns

PYTHON = ("idle", "busy")
#: Replays of an arm in a turn.
BATCH = 10
#: Replays of a busy cell whose first callback must have met a held GIL.
BUSY_SHARE = 0.9
QUANTILES = {"p50": 0.5, "p99": 0.99, "max": 1.0}
WAKE_UPS = 400
WARNING = "times of the soft device, a CPU; a GPU's are not these"


@dataclass
class Cell:
    """The samples of one arm in one state of Python, in nanoseconds."""

    arm: Arm
    python: str
    join: list[np.ndarray] = field(default_factory=list)
    hops: list[np.ndarray] = field(default_factory=list)
    held: list[np.ndarray] = field(default_factory=list)

    def keep(self, taken: Samples, gaps: Sequence[tuple[int, int]]) -> None:
        """Keep a turn's samples, given when nobody was busy in it."""
        self.join.append(taken.join)
        if taken.hop is not None:
            self.hops.append(taken.hop.sum(axis=-1).ravel())
        self.held.append(
            held(taken.begun, gaps) if self.python == "busy" else np.zeros(len(taken.begun), bool)
        )


def held(begun: np.ndarray, gaps: Sequence[tuple[int, int]]) -> np.ndarray:
    """Which callbacks began while the busy thread had the GIL: it ticked since the one before.

    Nobody but callbacks asks it for the GIL, so from a tick it keeps it until one does, also while
    the processor is taken from it.
    """
    spans = np.array(gaps, np.uint64).astype(np.int64).reshape(-1, 2)
    silent = (begun[:, 1:] >= spans[:, 0]) & (begun[:, :1] <= spans[:, 1])
    return np.asarray(~silent.any(axis=1))


def measure(
    arms: Sequence[Arm], samples: int, python: Sequence[str], limit_s: float, seed: int = 0
) -> list[Cell]:
    """Take every arm's samples in every state of Python, in turns; the first turn is dropped.

    After ``limit_s`` seconds in a state the cells keep what they have, one turn at least.
    """
    rng = random.Random(seed)
    done = []
    for state in python:
        cells = [Cell(arm, state) for arm in arms]
        turns = range(1 + -(-samples // BATCH))
        with busy_python(_native.labs.tick) if state == "busy" else nullcontext():
            begun = time.monotonic()
            for turn in tqdm(turns, desc=state, unit="turn", disable=None):
                for cell in rng.sample(cells, len(cells)):
                    _native.labs.gaps()
                    taken = cell.arm.replay(BATCH, state == "busy")
                    if turn:
                        cell.keep(taken, _native.labs.gaps())
                if turn and time.monotonic() - begun > limit_s:
                    break
        done += cells
    return done


def quantiles(nanoseconds: np.ndarray) -> dict[str, float]:
    """Order statistics in microseconds; none is interpolated."""
    ordered = np.sort(nanoseconds) / 1000.0
    last = len(nanoseconds) - 1
    return {name: float(ordered[round(q * last)]) for name, q in QUANTILES.items()}


def report(device: Device, cells: Sequence[Cell]) -> dict[str, Any]:
    """The figures with what a reader needs to judge them."""
    floors = {
        (c.python, c.arm.callbacks): float(np.median(np.concatenate(c.join)))
        for c in cells
        if c.arm.name == BASELINE
    }
    rows = []
    for cell in cells:
        floor = floors[cell.python, cell.arm.callbacks]
        joins = np.concatenate(cell.join)
        met = np.concatenate(cell.held).reshape(len(joins), -1)
        rows.append(
            {
                "transport": cell.arm.name,
                "callbacks": cell.arm.callbacks,
                "python": cell.python,
                "samples": len(joins),
                "join_us": quantiles(joins - floor),
                "hop_us": quantiles(np.concatenate(cell.hops)) if cell.hops else None,
                "gil_held": float(met.mean()),
                "was_busy": bool(met[:, 0].mean() >= BUSY_SHARE),
            }
        )
    wake = np.array(_native.labs.wake_ups(WAKE_UPS))
    return {
        "device": device.describe(),
        "kind": device.kind,
        "warning": WARNING if device.kind == "soft" else "",
        "wake_up_us": quantiles(wake),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg(),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "unavailable": {name: why for name in ARMS if (why := unavailable(name))},
        "cells": rows,
    }


def processor() -> str:
    """The CPU's name, as the kernel tells it; else the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


def table(result: dict[str, Any]) -> str:
    """The figures as lines of text."""
    wake = result["wake_up_us"]
    rows: list[list[object]] = [
        [
            "transport",
            "steps",
            "python",
            "samples",
            *(f"{what} {q}" for what in ("hop", "join") for q in QUANTILES),
            "GIL held",
            "",
        ]
    ]
    for row in result["cells"]:
        figures = [
            "-" if row[what] is None else f"{row[what][q]:.2f}"
            for what in ("hop_us", "join_us")
            for q in QUANTILES
        ]
        is_busy = row["python"] == "busy"
        rows.append(
            [
                row["transport"],
                row["callbacks"],
                row["python"],
                row["samples"],
                *figures,
                f"{row['gil_held']:.0%}" if is_busy else "",
                "NOT BUSY" if is_busy and not row["was_busy"] else "",
            ]
        )
    lines = [
        f"device: {result['device']}; {result['cores']} cores of {result['processor']}",
        f"waking a sleeping thread takes {wake['p50']:.0f} us here ({wake['p99']:.0f} at 99 "
        "%): it is in every join of a worker that parks",
        "microseconds: the hop there and back, the join less that of empty nodes",
        columns(rows),
    ]
    lines += [f"not measured: {name}: {why}" for name, why in result["unavailable"].items()]
    return "\n".join([*lines, *filter(None, [result["warning"]])])


@program
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table and write JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m graft.tools.labs.callback_latency",
        description="Latency of host work in a replayed graph.",
    )
    parser.add_argument("--samples", type=int, default=1000, help="replays per cell")
    parser.add_argument(
        "--callbacks",
        type=int,
        nargs="+",
        default=(1, 8, 64),
        metavar="N",
        help=f"host steps in a graph, 1 to {MOST}",
    )
    parser.add_argument("--python", nargs="+", choices=PYTHON, default=PYTHON)
    parser.add_argument("--transports", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument(
        "--limit-s",
        type=float,
        default=300.0,
        help="seconds per state of Python; cells then have fewer samples",
    )
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args(arguments)
    if options.samples < 1 or not all(1 <= n <= MOST for n in options.callbacks):
        parser.error(f"--samples must be at least 1, --callbacks 1 to {MOST}")
    device = open_device()
    names = [n for n in dict.fromkeys([BASELINE, *options.transports]) if not unavailable(n)]
    with ExitStack() as stack:
        arms = [
            stack.enter_context(closing(Arm(device, name, n)))
            for n in options.callbacks
            for name in names
        ]
        result = report(device, measure(arms, options.samples, options.python, options.limit_s))
    print(table(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
