"""The deadlock laboratory: which driver calls that keep the GIL hang against which callbacks.

A thread holds the GIL and is inside a driver call; a host function that the driver calls, or a
worker that the device waits for, wants the GIL. Whether nothing ends that depends on what the
driver call waits for. Real drivers do not document their locks; the soft device can model what was
reported of them (SOFTCUDA_LOCK_MODEL): 0 none, 1 a context lock is held while a host function runs,
2 enqueueing a host function waits for the one in flight on the stream, 4 the first launch of a
kernel synchronises the context. Every cell runs in a child process of its own. Its verdict:

completes   and no order of events could have made it hang
potential   it completed, but the GIL and the driver were asked for in both orders: the soft
            device's lock-order watch saw a cycle
hangs       the child was ended by the watchdog, which reports both sides' stacks
released    it hung until the mailbox's own deadline let the device go on, with a typed error

On CUDA hardware there is no axis of lock models and no watch: what happens is what is told.
Usage::

    python -m graft.tools.labs.gil_deadlock [--short] [--cell PATTERN:TRANSPORT:MODEL[:released]]

The exit status is 0 when every verdict on the soft device is the one that follows from the models.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from graft.cudagraph import chooser
from graft.tools import watch
from graft.tools.labs.gil_deadlock.cell import (
    ASKING,
    MODELS,
    PATTERNS,
    RELEASED,
    TRANSPORTS,
    Cell,
    unavailable,
)
from graft.tools.report import table as columns

COMPLETES = "completes"
POTENTIAL = "potential"
HANGS = "hangs"
FREED = "released"
FAILED = "failed"
#: A driver call or host function that lasts so long is stuck. A mailbox's own deadline comes first.
WATCHDOG_S = 2
MAILBOX_WATCHDOG_S = 60
#: On CUDA hardware a child that lasts so long hangs.
CUDA_LIMIT_S = 30.0
CHILD_LIMIT_S = 200.0
CUDA_MODEL = -1
#: The deadlock, its two cures, and the same without a driver lock.
SHORT = (
    Cell("alloc", "python", 1),
    Cell("alloc", "python", 1, held=False),
    Cell("alloc", "native", 1),
    Cell("alloc", "python", 0),
)


@dataclass(frozen=True)
class Verdict:
    """What a cell came to, and why."""

    cell: Cell
    outcome: str
    expected: str
    seconds: float
    report: str

    @property
    def as_expected(self) -> bool:
        """True also where nothing is expected: on CUDA hardware, or without a package."""
        return self.expected in ("", self.outcome)


def expected(cell: Cell) -> str:
    """What a cell must come to on the soft device, by the models alone.

    A call made with the GIL hangs if it waits for what cannot go on without the GIL; otherwise it
    completes, and is a potential deadlock where it asked for a lock or for device work that
    somebody who asks for the GIL holds. A mailbox's worker holds no lock of the driver, only the
    device's progress, and its deadline ends every wait.
    """
    if unavailable(cell.transport):
        return ""
    if not cell.held or cell.transport not in ASKING:
        return COMPLETES
    mailbox = cell.transport == "mailbox-python"
    waits_for_device = cell.pattern == "copy" or (cell.pattern == "first-launch" and cell.model & 4)
    waits_for_lock = not mailbox and (
        cell.model & 1 or (cell.pattern == "hostfunc" and cell.model & 2)
    )
    if waits_for_device or waits_for_lock:
        return FREED if mailbox else HANGS
    # The first launch of a kernel may wait for the device, says the documentation.
    return COMPLETES if mailbox and cell.pattern != "first-launch" else POTENTIAL


def matrix(soft: bool) -> list[Cell]:
    """Every cell."""
    models = MODELS if soft else (CUDA_MODEL,)
    return [
        Cell(pattern, transport, model)
        for model in models
        for pattern in PATTERNS
        for transport in TRANSPORTS
    ]


def play(cell: Cell, soft: bool = True) -> Verdict:
    """Run one cell in a child process and judge how it ended."""
    lacking = unavailable(cell.transport)
    if lacking:
        return Verdict(cell, "-", "", 0.0, lacking)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="graft-deadlock-") as folder:
        path = Path(folder) / "edges.jsonl"
        env = {
            **os.environ,
            "GRAFT_DEVICE": "soft" if soft else "cuda",
            "CUDA_MODULE_LOADING": "LAZY",
        }
        if soft:
            mailbox = cell.transport.startswith("mailbox")
            env |= {
                "SOFTCUDA_LOCK_MODEL": str(cell.model),
                "SOFTCUDA_WATCH": str(path),
                "SOFTCUDA_WATCHDOG": str(MAILBOX_WATCHDOG_S if mailbox else WATCHDOG_S),
            }
        command = [sys.executable, "-m", f"{__package__}.cell", cell.name]
        child = subprocess.Popen(
            command,
            text=True,
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        overdue = False
        try:
            _, errors = child.communicate(timeout=CHILD_LIMIT_S if soft else CUDA_LIMIT_S)
        except subprocess.TimeoutExpired:
            overdue = True
            os.killpg(child.pid, signal.SIGKILL)
            _, errors = child.communicate()
        seen = watch.read(path)
    seconds = time.monotonic() - begun
    outcome = FAILED
    report = errors.strip()
    if child.returncode == watch.WATCHDOG_STATUS or (overdue and not soft):
        outcome = HANGS
    elif child.returncode == RELEASED:
        outcome = FREED
    elif child.returncode == 0:
        outcome = POTENTIAL if seen.cycle else COMPLETES
    if outcome == POTENTIAL:
        report = watch.show(seen)
    elif overdue:
        report = f"ended after {seconds:.0f} s\n{report}"
    return Verdict(cell, outcome, expected(cell) if soft else "", seconds, report)


def play_all(cells: Sequence[Cell], soft: bool, jobs: int) -> list[Verdict]:
    """Play cells, ``jobs`` at a time; the longest first would gain little and read badly."""
    with ThreadPoolExecutor(jobs) as pool:
        found = pool.map(lambda cell: play(cell, soft), cells)
        return list(tqdm(found, total=len(cells), unit="cell", disable=None))


def mark(verdict: Verdict | None) -> str:
    """A verdict as an entry of the table; "!" where it is not the expected one."""
    if verdict is None:
        return ""
    return verdict.outcome if verdict.as_expected else f"{verdict.outcome} !"


def table(verdicts: Iterable[Verdict]) -> str:
    """The verdicts, a row per pattern and transport, a column per lock model."""
    found = {(v.cell.pattern, v.cell.transport, v.cell.model): v for v in verdicts if v.cell.held}
    models = sorted({model for _, _, model in found})
    rows = [
        [
            "driver call with the GIL",
            "callback by",
            *("as it is" if model == CUDA_MODEL else f"model {model}" for model in models),
        ]
    ]
    for pattern, transport in itertools.product(PATTERNS, TRANSPORTS):
        row = [found.get((pattern, transport, model)) for model in models]
        if any(row):
            rows.append([pattern, transport, *map(mark, row)])
    lacking = sorted({f"-: {v.report}" for v in found.values() if v.outcome == "-"})
    return "\n".join([columns(rows, left=len(rows[0])), *lacking])


def details(verdicts: Iterable[Verdict]) -> str:
    """Every verdict with its report."""
    lines: list[str] = []
    for v in verdicts:
        mark = "" if v.as_expected else f", EXPECTED {v.expected}"
        lines.append(
            f"{v.cell.name:<32} {v.outcome}{mark} ({v.seconds:.1f} s): "
            f"{PATTERNS[v.cell.pattern]}, GIL {'held' if v.cell.held else 'released'}"
        )
        if v.outcome != COMPLETES:
            lines += [f"    {line}" for line in v.report.splitlines()]
    return "\n".join(lines)


def parse_cell(text: str) -> Cell:
    """A cell by its name, for argparse."""
    parts = text.split(":")
    held = parts[-1] != "released"
    pattern, transport, model = parts if held else parts[:-1]
    if pattern not in PATTERNS or transport not in TRANSPORTS:
        raise ValueError(text)
    return Cell(pattern, transport, int(model), held)


def main(arguments: Sequence[str] | None = None) -> int:
    """Play cells; returns 0 when every verdict is the expected one."""
    parser = argparse.ArgumentParser(description="The matrix of GIL deadlocks.")
    parser.add_argument(
        "--cell",
        type=parse_cell,
        action="append",
        help="only this, with its report: "
        f"{{{','.join(PATTERNS)}}}:{{{','.join(TRANSPORTS)}}}:MODEL[:released]",
    )
    parser.add_argument(
        "--short",
        action="store_true",
        help="only the deadlock, its two cures and the control, with reports",
    )
    parser.add_argument("--jobs", type=int, default=2, help="cells at a time (default %(default)s)")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1, not {options.jobs}")
    soft = chooser.choose(os.environ.get("GRAFT_DEVICE", "auto"))[0] == "soft"
    cells = options.cell or (SHORT if options.short else matrix(soft))
    verdicts = play_all(cells, soft, min(options.jobs, len(cells)))
    print(details(verdicts) if options.cell or options.short else table(verdicts))
    wrong = [v for v in verdicts if not v.as_expected]
    print(
        "\n" + details(wrong)
        if wrong and not (options.cell or options.short)
        else f"{len(verdicts)} cells, {len(wrong)} unexpected"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
