"""The latency laboratory: what host work in a replayed graph costs, transport by transport.

Two figures. The *join*: from the kernel before the host steps to the kernel after them, by the
device's clock, less the median of the same graph with empty nodes. The *hop*: from the entry of the
C function that the driver's thread calls to the first instruction of the user's body, and back; it
leaves out how the thread was woken, which is the same for all. Only the soft device records hops.

All arms live in one process and take turns in random order, so that a change of the machine's mood
meets all of them; the first 100 replays of each are dropped. Python is "idle", "busy" (another
thread runs bytecode) or "held" (another thread keeps the GIL through C calls of 2 ms). Replays
follow one another at once, and, with idle Python and the least number of steps, also after pauses.

graft's Python steps leave the driver's thread its Python thread state, and whoever calls Python on
that thread afterwards finds it: cuda.core too, which alone makes and drops one in every callback.
So before each replay the thread is brought into the state in which that arm is used when it is
alone in a process; "cuda.core kept" is cuda.core on a thread where graft's state was left.
Usage::

    python -m graft.tools.callback_latency [--samples 10000] [--callbacks 1 8 64]
        [--json build/callback_latency.json] [--svg build/callback_latency.svg]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from graft.cudagraph.device import Device, open_device
from graft.cudagraph.driver import call, cu
from graft.cudagraph.errors import GraftError
from graft.tools.latency_arms import BASELINE, Arm, Hops, empty_work
from graft.tools.latency_bars import bars, ratios
from graft.tools.latency_harm import clock_tick_ns, harm
from graft.tools.latency_peers import ARMS, make_arm, unavailable
from graft.tools.latency_plot import histograms

__all__ = ["empty_work", "main", "measure_all", "quantiles"]

CALLBACKS = (1, 8, 64)
PYTHON = ("idle", "busy", "held")
DROPPED = 100
#: Pauses before a replay, in microseconds: long ones let threads and cores fall asleep.
PAUSES_US = (0, 100, 5000)
HARM_REPEATS = 20
HELD_US = 2000
QUANTILES = {"min": 0.0, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
WARNING = "times of the soft device, a CPU; a GPU's are not these"


@dataclass
class Cell:
    """The samples of one arm in one state of Python, in nanoseconds."""

    arm: Arm
    python: str
    pause_us: int = 0
    join: list[int] = field(default_factory=list)
    cpu: list[int] = field(default_factory=list)
    hops: list[np.ndarray] = field(default_factory=list)

    def take(self) -> None:
        """Replay once, after the pause, and keep what it took."""
        self.arm.prepare()
        if self.pause_us:
            time.sleep(self.pause_us * 1e-6)
        join, cpu, hops = self.arm.replay()
        self.join.append(join)
        self.cpu.append(cpu)
        if hops is not None:
            self.hops.append(hops)

    @property
    def hop(self) -> np.ndarray | None:
        """Every host step's way there and back, or None where nobody recorded it."""
        return np.concatenate(self.hops).sum(axis=1) if self.hops else None


@contextmanager
def python_is(state: str) -> Iterator[None]:
    """While open, another thread uses the GIL as the state says."""
    stop = threading.Event()
    usleep = ctypes.PyDLL(None).usleep  # PyDLL keeps the GIL during the call

    def hog() -> None:
        while not stop.is_set():
            if state == "held":
                usleep(HELD_US)
            else:
                sum(range(200))

    thread = threading.Thread(target=hog, name=f"{state} Python")
    if state != "idle":
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if state != "idle":
            thread.join()


def quantiles(nanoseconds: np.ndarray) -> dict[str, float]:
    """Order statistics in microseconds; none is interpolated."""
    ordered = np.sort(nanoseconds) / 1000.0
    last = len(ordered) - 1
    return {name: float(ordered[round(q * last)]) for name, q in QUANTILES.items()}


def measure(cells: Sequence[Cell], samples: int, dropped: int, limit_s: float,
            rng: random.Random) -> None:
    """Take every cell's samples, all cells once per turn, in a new random order each turn.

    After ``limit_s`` seconds of turns that count, the cells keep the samples they have.
    """
    order, begun = list(cells), time.monotonic()
    for turn in range(dropped + samples):
        rng.shuffle(order)
        for cell in order:
            cell.take()
        if turn < dropped:
            begun = time.monotonic()
            for cell in cells:
                cell.join.clear()
                cell.cpu.clear()
                cell.hops.clear()
        elif time.monotonic() - begun > limit_s:
            break


def measure_all(device: Device, samples: int, *, callbacks: Sequence[int] = CALLBACKS,
                python: Sequence[str] = PYTHON, arms: Sequence[str] = ARMS,
                pauses_us: Sequence[int] = PAUSES_US, dropped: int = DROPPED,
                harm_repeats: int = HARM_REPEATS, limit_s: float = 600.0, seed: int = 0
                ) -> tuple[list[Cell], list[dict[str, Any]]]:
    """Measure every arm in every state; the baseline is always among the arms.

    Returns
    -------
    cells : list of Cell
        Arms x callbacks x states of Python without pauses, and arms x pauses with the least number
        of callbacks and idle Python.
    harmed : list of dict
        What each arm costs a neighbour; see :func:`graft.tools.latency_harm.harm`.
    """
    rng, hops, least = random.Random(seed), Hops(device), min(callbacks)
    names = [n for n in dict.fromkeys([BASELINE, *arms]) if not unavailable(n, device)]
    groups = [(state, 0) for state in python]
    groups += [("idle", pause) for pause in pauses_us if pause and "idle" in python]
    built: list[Arm] = []
    done: list[Cell] = []
    try:
        for n in callbacks:
            built.extend(make_arm(device, name, n, hops) for name in names)
        few = [arm for arm in built if arm.callbacks == least]
        for state, pause in tqdm(groups, desc="states", unit="state", disable=None):
            cells = [Cell(arm, state, pause) for arm in (few if pause else built)]
            with python_is(state):
                measure(cells, samples, dropped, limit_s, rng)
            done.extend(cells)
        harmed = harm(device, few, harm_repeats, rng) if harm_repeats else []
    finally:
        for arm in built:
            arm.close()
    return done, harmed


def report(device: Device, cells: Sequence[Cell], harmed: Sequence[dict[str, Any]]
           ) -> dict[str, Any]:
    """The figures with what a reader needs to judge them."""
    floors = {(c.pause_us, c.python, c.arm.callbacks): float(np.median(c.join))
              for c in cells if c.arm.name == BASELINE}
    rows = []
    for cell in cells:
        floor = floors[cell.pause_us, cell.python, cell.arm.callbacks]
        joins = np.array(cell.join, np.float64)
        rows.append({
            "transport": cell.arm.name, "callbacks": cell.arm.callbacks, "python": cell.python,
            "pause_us": cell.pause_us, "samples": len(joins), "join_us": quantiles(joins - floor),
            "baseline_p50_us": floor / 1000.0,
            "hop_us": None if cell.hop is None else quantiles(cell.hop),
            "cpu_us_per_replay": float(np.mean(cell.cpu)) / 1000.0,
        })
    return {"device": device.describe(), "kind": device.kind,
            "warning": WARNING if device.kind == "soft" else "",
            "driver": int(call(cu.cuDriverGetVersion)), "clock_tick_ns": clock_tick_ns(device),
            "machine": platform.machine(), "processor": processor(),
            "system": platform.platform(), "cores": os.cpu_count(),
            "usable_cores": len(os.sched_getaffinity(0)), "load": os.getloadavg(),
            "governor": first_line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
            "environment": {k: v for k, v in os.environ.items() if k.startswith("CUDA_")},
            "date": time.strftime("%Y-%m-%d"), "python": platform.python_version(),
            "switch_interval_us": sys.getswitchinterval() * 1e6, "held_us": HELD_US,
            "unavailable": {name: why for name in ARMS if (why := unavailable(name, device))},
            "ratios": ratios(rows), "bars": bars(rows, device.kind), "harm": list(harmed),
            "cells": rows}


def first_line(path: str) -> str:
    """A small file's first line, or "" where there is none."""
    try:
        return Path(path).read_text().split("\n", 1)[0]
    except OSError:
        return ""


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
    heads = "".join(f"{q:>10}" for q in QUANTILES)
    lines = [f"device: {result['device']}",
             f"{'':<44}{'hop there and back, us':^50} {'join less empty nodes, us':^50}",
             f"{'transport':<18}{'steps':>5} {'python':<6}{'pause':>6}"
             f"{'samples':>8} {heads} {heads}   cpu us"]
    for row in result["cells"]:
        figures = [" " * 9 + "-" if row[what] is None else f"{row[what][q]:>10.2f}"
                   for what in ("hop_us", "join_us") for q in QUANTILES]
        lines.append(f"{row['transport']:<18}{row['callbacks']:>5} {row['python']:<6}"
                     f"{row['pause_us']:>6}{row['samples']:>8} "
                     f"{''.join(figures[:5])} {''.join(figures[5:])}"
                     f"{row['cpu_us_per_replay']:>9.1f}")
    for row in result["harm"]:
        lines.append(f"a neighbour's kernels beside {row['transport']}: "
                     f"{row['neighbour_us']:.0f} us, {row['of_alone']:.2f} of alone")
    for bar in result["bars"]:
        lines.append(f"{bar['what']}: {bar['value']:.4f}, at most {bar['limit']:.2f}: "
                     f"{'holds' if bar['holds'] else 'MISSED'}")
    for name, why in result["unavailable"].items():
        lines.append(f"not measured: {name}: {why}")
    if result["warning"]:
        lines.append(result["warning"])
    return "\n".join(lines)


def draw(result: dict[str, Any], cells: Sequence[Cell]) -> str:
    """Histograms of the joins, nothing subtracted."""
    title = f"Join, nothing subtracted. {result['device']}"
    return histograms(title, {f"{c.arm.name}, {c.arm.callbacks} steps, {c.python}, {c.pause_us} us":
                              np.array(c.join, np.float64) for c in cells})


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table and write JSON and SVG."""
    parser = argparse.ArgumentParser(description="Latency of host work in a replayed graph.")
    parser.add_argument("--samples", type=int, default=10_000, help="replays per cell")
    parser.add_argument("--callbacks", type=int, nargs="+", default=CALLBACKS, metavar="N",
                        help="host steps in a graph, 1 to 64")
    parser.add_argument("--python", nargs="+", choices=PYTHON, default=PYTHON)
    parser.add_argument("--transports", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--pauses-us", type=int, nargs="*", default=PAUSES_US, metavar="US",
                        help="pauses before replays, with idle Python and the fewest steps")
    parser.add_argument("--harm-repeats", type=int, default=HARM_REPEATS,
                        help="times a neighbour's kernels run beside each arm; 0: not at all")
    parser.add_argument("--dropped", type=int, default=DROPPED, help="first replays left out")
    parser.add_argument("--limit-s", type=float, default=600.0,
                        help="seconds per state of Python; cells then have fewer samples")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--svg", type=Path, help="also draw histograms of the joins here")
    options = parser.parse_args(arguments)
    if options.samples < 1 or min(options.dropped, options.harm_repeats) < 0:
        parser.error("--samples must be at least 1, --dropped and --harm-repeats at least 0")
    if not all(1 <= n <= Hops.MOST for n in options.callbacks):
        parser.error(f"--callbacks must be 1 to {Hops.MOST}")
    try:
        device = open_device()
        cells, harmed = measure_all(
            device, options.samples, callbacks=options.callbacks, python=options.python,
            arms=options.transports, pauses_us=options.pauses_us, dropped=options.dropped,
            harm_repeats=options.harm_repeats, limit_s=options.limit_s)
    except GraftError as error:
        print(f"graft: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    result = report(device, cells, harmed)
    print(table(result))
    for path, text in ((options.json, lambda: json.dumps(result, indent=1) + "\n"),
                       (options.svg, lambda: draw(result, cells))):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
