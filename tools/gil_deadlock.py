"""Reproduce the deadlock of a Python callback against a GIL-holding driver call, and its two cures.

A host function written in Python runs under a lock of the driver and waits for the GIL, while the
thread that holds the GIL is inside a driver call and waits for that lock. Nothing ends it. The cure
is to release the GIL around every driver call, or to run host work that needs no GIL.

Real drivers do not document their locks. The soft device can model what has been reported of them
(SOFTCUDA_LOCK_MODEL): 0 none, 1 a context lock is held while a host function runs, 2 enqueueing a
host function waits for the one in flight on the stream, 4 the first launch of a kernel synchronises
the context. Each case runs in a child process under a watchdog. Usage::

    python -m graft.tools.gil_deadlock [--json]

The exit status is 0 when every verdict is the expected one.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

KERNELS = Path(__file__).parent / "kernels" / "clock.cu"
# The gate: the device is busy for so long after the launch, so that the host function cannot slip
# through before the GIL is taken hostage.
GATE_S = 0.1
HOSTAGE_S = 0.4
# The soft device's watchdog ends a process that is stuck for so long, and says who waits for whom.
WATCHDOG_S = 3
WATCHDOG_STATUS = 86
CHILD_LIMIT_S = 120


@dataclass(frozen=True)
class Case:
    """One arrangement of the two sides, and what it must come to."""

    name: str
    transport: str
    holds_gil: bool
    lock_model: int
    expected: str
    shows: str


CASES = (
    Case("deadlock", "python", True, 1, "deadlock",
         "a Python callback against a driver call that holds the GIL"),
    Case("gil-released", "python", False, 1, "finished",
         "cure 1: the same driver call with the GIL released"),
    Case("native", "native", True, 1, "finished",
         "cure 2: native host work, which needs no GIL"),
    Case("no-lock", "python", True, 0, "finished",
         "control: the same as the deadlock, without a driver lock"),
)


@dataclass(frozen=True)
class Verdict:
    """What a case came to: "finished", "deadlock" or "failed", with the watchdog's words."""

    case: Case
    outcome: str
    seconds: float
    report: str

    @property
    def as_expected(self) -> bool:
        return self.outcome == self.case.expected


def run_child(case: Case) -> None:
    """Play one case in this process; returns when it finished and never when it deadlocked."""
    from graft.cudagraph.device import open_device
    from graft.cudagraph.graph import Graph
    from graft.tools.callback_latency import empty_work

    device = open_device("soft")
    stream = device.stream("deadlock")
    graph = Graph(device, "deadlock")
    lane = graph.lane("main")
    lane.kernel(device.load(KERNELS)["wait_ns"], 1, 1, (int(GATE_S * 1e9),), name="gate")
    lane.host(empty_work(case.transport), name=f"{case.transport} callback")
    run = graph.instantiate()
    run.upload(stream)

    # PyDLL calls without releasing the GIL, CDLL releases it: nothing else differs.
    library = ctypes.PyDLL if case.holds_gil else ctypes.CDLL
    driver = library("libcuda.so.1")
    address = ctypes.c_uint64()
    # Python's stacks, just before the soft device's watchdog tells the rest and ends the process.
    faulthandler.dump_traceback_later(WATCHDOG_S - 0.5, exit=False)
    run.launch(stream)
    # The GIL is held for longer than the gate: a Python callback starts meanwhile and waits for it.
    # Python may or may not hand it over between the two calls below; a switch interval beyond both
    # makes it not, so that one try is enough.
    sys.setswitchinterval(HOSTAGE_S + WATCHDOG_S)
    ctypes.PyDLL(None).usleep(int(HOSTAGE_S * 1e6))
    status = driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(4096))
    if status:
        raise SystemExit(f"cuMemAlloc answered {status}")
    faulthandler.cancel_dump_traceback_later()
    run.synchronize(timeout_s=30.0)
    driver.cuMemFree_v2(address)


def play(case: Case) -> Verdict:
    """Run one case in a child process and judge how it ended."""
    env = {**os.environ, "GRAFT_DEVICE": "soft", "SOFTCUDA_LOCK_MODEL": str(case.lock_model),
           "SOFTCUDA_WATCHDOG": str(WATCHDOG_S)}
    command = [sys.executable, "-m", "graft.tools.gil_deadlock", "--child", case.name]
    begun = time.monotonic()
    try:
        done = subprocess.run(command, env=env, text=True, capture_output=True,
                              timeout=CHILD_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        said = error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else ""
        report = f"no end within {CHILD_LIMIT_S} s, and the watchdog was silent\n{said}"
        return Verdict(case, "failed", time.monotonic() - begun, report)
    seconds = time.monotonic() - begun
    if done.returncode == 0:
        return Verdict(case, "finished", seconds, done.stderr)
    outcome = "deadlock" if done.returncode == WATCHDOG_STATUS else "failed"
    return Verdict(case, outcome, seconds, done.stderr)


def show(verdicts: Sequence[Verdict]) -> None:
    """Print every verdict, and the watchdog's report of what did not finish."""
    for verdict in verdicts:
        mark = "as expected" if verdict.as_expected else f"EXPECTED {verdict.case.expected}"
        print(f"{verdict.case.name:<13} {verdict.outcome:<9} {verdict.seconds:5.1f} s  {mark}: "
              f"{verdict.case.shows} (lock model {verdict.case.lock_model})")
        if verdict.outcome != "finished":
            print("".join(f"    {line}\n" for line in verdict.report.strip().splitlines()), end="")


def main(arguments: Sequence[str] | None = None) -> int:
    """Play all cases; returns 0 when every verdict is the expected one."""
    parser = argparse.ArgumentParser(description="Reproduce the GIL deadlock and its cures.")
    parser.add_argument("--json", action="store_true", help="print the verdicts as JSON")
    parser.add_argument("--child", choices=[case.name for case in CASES], help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        run_child(next(case for case in CASES if case.name == options.child))
        return 0
    verdicts = [play(case) for case in CASES]
    if options.json:
        print(json.dumps([asdict(v) | {"as_expected": v.as_expected} for v in verdicts], indent=1))
    else:
        show(verdicts)
    return 0 if all(verdict.as_expected for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
