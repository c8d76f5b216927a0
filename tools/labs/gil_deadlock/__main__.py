"""Test which driver calls deadlock with which callbacks if the caller holds the GIL.

    python -m graft.tools.labs.gil_deadlock [--short] [--case PATTERN:TRANSPORT:MODEL[:released]]

In each case, a thread makes a driver call while it holds the GIL. At the same time, a callback
needs the GIL. The callback is either a host function that the driver calls, or the body of a
mailbox worker, which is a host thread that the device waits for. Both sides deadlock if the driver
call waits for the callback, or for a lock that the driver holds while the callback runs. Drivers do
not document their locks, so the soft device models what has been reported about them.

--case runs one case. PATTERN is the driver call and TRANSPORT the mechanism that calls the
callback; case.py lists both. With the suffix "released", the thread releases the GIL before the
driver call. MODEL is one of these lock models (SOFTCUDA_LOCK_MODEL):

0   no locks
1   the driver holds a context lock while a host function runs
2   enqueueing a host function waits for the one that is running on the stream
4   the first launch of a kernel synchronizes the context

Each case runs in its own child process and has one of these outcomes:

completes   the case completed, and the lock-order detector of the soft device found no cycle
potential   the case completed, but the detector found a cycle: the GIL and the driver were
            requested in both orders, so that another order of events could deadlock
hangs       the case deadlocked; the watchdog terminated the child and reported both stacks
released    the case deadlocked until the mailbox's deadline passed; the device then continued and
            graft reported an error

On the soft device, the outcome of every case is compared with the expected outcome, which follows
from the lock model. The exit status is 0 if all outcomes are as expected, 130 after Ctrl-C, and 1
otherwise. CUDA hardware has neither lock models nor a detector, so no outcome is expected there.
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
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from graft.cudagraph.driver import chooser
from graft.tools import lock_order
from graft.tools.console import table as format_table
from graft.tools.labs.gil_deadlock.case import (
    GIL_TRANSPORTS,
    LOCK_MODELS,
    PATTERNS,
    RELEASED_STATUS,
    TRANSPORTS,
    Case,
    unavailable,
)

COMPLETES = "completes"
POTENTIAL = "potential"
HANGS = "hangs"
RELEASED = "released"
FAILED = "failed"
NOT_RUN = "-"
#: Seconds after which the soft device's watchdog terminates a process that is blocked in a driver
#: call or host function. The limit for cases with mailboxes exceeds the mailbox's deadline.
WATCHDOG_S = 2
MAILBOX_WATCHDOG_S = 60
#: Seconds after which a child on CUDA hardware is killed and counts as hanging.
CUDA_LIMIT_S = 30.0
#: Seconds after which a child on the soft device is killed.
CHILD_LIMIT_S = 200.0
#: Lock model of cases on CUDA hardware.
CUDA_MODEL = -1
#: Cases of ``--short``: a deadlock, two ways to avoid it, and the same calls without driver locks.
SHORT = (
    Case("alloc", "python", 1),
    Case("alloc", "python", 1, gil_held=False),
    Case("alloc", "native", 1),
    Case("alloc", "python", 0),
)


@dataclass(frozen=True)
class Result:
    """Result of a case."""

    case: Case  #: the case that was run
    #: Outcome as described in the module's docstring; "failed" if the child failed for another
    #: reason, or "-" if the case was not run.
    outcome: str
    #: Expected outcome; "" on CUDA hardware, and if a required package is missing.
    expected: str
    seconds: float  #: duration in seconds
    #: Error output of the child, the cycle that the lock-order detector found, or the reason why
    #: the case was not run.
    report: str

    @property
    def as_expected(self) -> bool:
        """Whether the outcome is the expected one, or no outcome is expected."""
        return self.expected in ("", self.outcome)


def expected_outcome(case: Case) -> str:
    """Return the outcome that follows from `case.model`, which selects the soft device's locks.

    A driver call of a thread that holds the GIL hangs in two cases: it waits for a callback that
    needs the GIL, or for a lock that the driver holds during this callback. A call that requests
    such a lock but gets it at once completes; the case is then a potential deadlock.

    A mailbox worker holds no driver lock. It delays only the device, so that a driver call hangs
    only if it waits for the device. The mailbox's deadline then ends the wait.
    """
    if unavailable(case.transport):
        return ""
    if not case.gil_held or case.transport not in GIL_TRANSPORTS:
        return COMPLETES
    is_mailbox = case.transport == "mailbox-python"
    is_first_launch = case.pattern == "first-launch"
    waits_for_device = case.pattern == "copy" or (is_first_launch and case.model & 4)
    waits_for_lock = case.model & 1 or (case.pattern == "hostfunc" and case.model & 2)
    if waits_for_device or (waits_for_lock and not is_mailbox):
        return RELEASED if is_mailbox else HANGS
    # A mailbox worker delays only the device. CUDA's documentation allows the first launch of a
    # kernel to wait for the device, so with a mailbox only "first-launch" can deadlock here.
    if is_mailbox and not is_first_launch:
        return COMPLETES
    return POTENTIAL


def all_cases(soft: bool) -> list[Case]:
    """Return the cases of all patterns and transports, and of the soft device's lock models.

    In each case, the thread that makes the driver call holds the GIL during the call. `soft` is
    False on CUDA hardware, which has no lock models.
    """
    models = LOCK_MODELS if soft else (CUDA_MODEL,)
    combinations = itertools.product(models, PATTERNS, TRANSPORTS)
    return [Case(pattern, transport, model) for model, pattern, transport in combinations]


# Run ----------------------------------------------------------------------------------------------


def run_case(case: Case, soft: bool = True) -> Result:
    """Run a case in a child process, on the soft device if `soft`, otherwise on CUDA hardware."""
    reason = unavailable(case.transport)
    if reason:
        return Result(case, NOT_RUN, "", 0.0, reason)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="graft-deadlock-") as folder:
        path = Path(folder) / "edges.jsonl"
        child = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.case", case.name],
            text=True,
            env=_child_environment(case, soft, path),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        timed_out = False
        try:
            _, errors = child.communicate(timeout=CHILD_LIMIT_S if soft else CUDA_LIMIT_S)
        except subprocess.TimeoutExpired:
            timed_out = True
            os.killpg(child.pid, signal.SIGKILL)
            _, errors = child.communicate()
        edges = lock_order.read_report(path)
    seconds = time.monotonic() - start
    report = errors.strip()
    outcome = FAILED
    if child.returncode == lock_order.WATCHDOG_STATUS or (timed_out and not soft):
        outcome = HANGS
    elif child.returncode == RELEASED_STATUS:
        outcome = RELEASED
    elif child.returncode == 0:
        outcome = POTENTIAL if edges.cycle else COMPLETES
    if outcome == POTENTIAL:
        report = lock_order.format_report(edges)
    elif timed_out:
        report = f"killed after {seconds:.0f} s\n{report}"
    return Result(case, outcome, expected_outcome(case) if soft else "", seconds, report)


def _child_environment(case: Case, soft: bool, edges: Path) -> dict[str, str]:
    """Return the environment of a child process that runs `case`.

    The lock-order detector in the child writes its report to the file `edges`.
    """
    environment = {
        **os.environ,
        "GRAFT_DEVICE": "soft" if soft else "cuda",
        "CUDA_MODULE_LOADING": "LAZY",
    }
    if soft:
        is_mailbox = case.transport.startswith("mailbox")
        environment |= {
            "SOFTCUDA_LOCK_MODEL": str(case.model),
            "SOFTCUDA_WATCH": str(edges),
            "SOFTCUDA_WATCHDOG": str(MAILBOX_WATCHDOG_S if is_mailbox else WATCHDOG_S),
        }
    return environment


def run_all(
    cases: Sequence[Case], soft: bool, jobs: int, run: Callable[[Case, bool], Result] = run_case
) -> list[Result]:
    """Run cases in child processes, at most `jobs` of them concurrently.

    A progress bar or, if the error output is not a terminal, a line per case shows the progress.
    After Ctrl-C, return the results of the cases that have completed.
    """
    results: list[Result] = []
    lines = not sys.stderr.isatty()
    with (
        ThreadPoolExecutor(jobs) as pool,
        tqdm(total=len(cases), unit="case", disable=lines) as progress,
    ):
        pending = [pool.submit(run, case, soft) for case in cases]
        try:
            for future in pending:
                result = future.result()
                results.append(result)
                progress.update()
                if lines:
                    count = f"{len(results)}/{len(cases)}"
                    print(f"{count} {result.case.name}: {result.outcome}", file=sys.stderr)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
    return results


# Report -------------------------------------------------------------------------------------------


def _format_outcome(result: Result | None) -> str:
    if result is None:
        return ""
    return result.outcome if result.as_expected else f"{result.outcome} !"


def table(results: Iterable[Result]) -> str:
    """Return a table with a row per pattern and transport and a column per lock model.

    The entries are outcomes. Unexpected outcomes are marked with "!".
    """
    found = {}
    for result in results:
        case = result.case
        if case.gil_held:
            found[case.pattern, case.transport, case.model] = result
    models = sorted({model for _, _, model in found})
    titles = ["as it is" if model == CUDA_MODEL else f"model {model}" for model in models]
    rows = [["driver call with the GIL", "callback by", *titles]]
    for pattern, transport in itertools.product(PATTERNS, TRANSPORTS):
        row = [found.get((pattern, transport, model)) for model in models]
        if any(row):
            rows.append([pattern, transport, *map(_format_outcome, row)])
    reasons = {f"-: {result.report}" for result in found.values() if result.outcome == NOT_RUN}
    return "\n".join([format_table(rows, left=len(rows[0])), *sorted(reasons)])


def details(results: Iterable[Result]) -> str:
    """Return one line per result, followed by the result's report unless the case completed."""
    lines: list[str] = []
    for result in results:
        case = result.case
        note = "" if result.as_expected else f", EXPECTED {result.expected}"
        gil = "held" if case.gil_held else "released"
        lines.append(
            f"{case.name:<32} {result.outcome}{note} ({result.seconds:.1f} s): "
            f"{PATTERNS[case.pattern]}, GIL {gil}"
        )
        if result.outcome != COMPLETES:
            lines += [f"    {line}" for line in result.report.splitlines()]
    return "\n".join(lines)


# Program ------------------------------------------------------------------------------------------


def parse_case(name: str) -> Case:
    """Parse an argument of ``--case``."""
    try:
        return Case.parse(name)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{name!r} is not PATTERN:TRANSPORT:MODEL[:released] with a known pattern and transport"
        ) from None


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m graft.tools.labs.gil_deadlock",
        description="Test which driver calls deadlock with which callbacks.",
    )
    parser.add_argument(
        "--case",
        type=parse_case,
        action="append",
        help="run only this case and print its report: "
        f"{{{','.join(PATTERNS)}}}:{{{','.join(TRANSPORTS)}}}:MODEL[:released]",
    )
    parser.add_argument(
        "--short",
        action="store_true",
        help="run only a deadlock, two ways to avoid it and a control case; print their reports",
    )
    parser.add_argument(
        "--jobs", type=int, default=2, help="concurrent cases (default %(default)s)"
    )
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1, not {options.jobs}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run cases and print the results; return 1 if an outcome is unexpected."""
    options = parse_options(arguments)
    soft = chooser.choose(os.environ.get("GRAFT_DEVICE", "auto"))[0] == "soft"
    cases = options.case or (SHORT if options.short else all_cases(soft))
    results = run_all(cases, soft, min(options.jobs, len(cases)))
    unexpected = [result for result in results if not result.as_expected]
    if options.case or options.short:
        print(details(results))
    else:
        print(table(results))
        if unexpected:
            print(f"\n{details(unexpected)}")
    print(f"{len(results)} cases, {len(unexpected)} unexpected")
    if len(results) < len(cases):
        print(f"interrupted: {len(cases) - len(results)} cases were not completed")
        return 130
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
