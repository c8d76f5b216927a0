"""Lock-order detector: find possible deadlocks between the GIL and the CUDA driver.

A program runs on the soft device, which records two kinds of edges:

*GIL to driver*
    A thread that holds the GIL enters a driver call that may take a lock of the driver or wait for
    device work.
*Driver to GIL*
    A function that the driver calls, or a thread that the device waits for, requests the GIL. The
    request itself is observed (the interpreter's lock of the GIL's mutex), so slow code is not
    mistaken for one.

If edges of both kinds exist for one resource, two threads can wait for each other forever, whether
that happened in this run or not. ``SOFTCUDA_WATCH=FILE`` makes the soft device write the edges.
``graft doctor --watch PROGRAM`` sets it, runs the program and prints the result.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from graft.cudagraph.errors import OptionError
from graft.tools.soft import resolve_command, soft_environment

GIL = "GIL"
#: Exit status of a process that the watchdog of the soft device ended.
WATCHDOG_STATUS = 86
#: Exit statuses of ``graft doctor --watch``. The exit status of the program is printed instead.
FAILED = 1
UNSEEN = 2
POTENTIAL = 3
DEADLOCK = 4
VERDICTS = {
    "none": "no cycle",
    "potential": "POTENTIAL DEADLOCK",
    "deadlock": "DEADLOCK",
    "hang": "HANG that the edges do not explain",
    "unseen": "nothing was observed",
}


@dataclass
class Edge:
    """A combination of resources: a thread that held some requested others.

    Attributes
    ----------
    pid
        Process id.
    number
        Number of the edge in its process.
    holds, wants
        Lists of ``"GIL"``, ``"driver lock"`` (locks of the driver) and ``"device work"`` (work that
        the device cannot complete before the thread continues, or that the thread waits for).
    at
        Name of the driver function, or of the function that the driver called.
    why
        Reason why the call may wait; empty for driver to GIL.
    thread
        Name of the thread.
    python, native
        Stack, innermost frame first. Python's stack of a driver-to-GIL edge is the first function
        that was entered after the GIL was acquired; empty if it was not acquired.
    count
        Number of occurrences; a lower bound if the process was killed.
    """

    pid: int
    number: int
    holds: list[str]
    wants: list[str]
    at: str
    why: str = ""
    thread: str = ""
    python: list[str] = field(default_factory=list)
    native: list[str] = field(default_factory=list)
    count: int = 1


@dataclass
class Report:
    """Result for a program and its child processes.

    Attributes
    ----------
    processes
        Number of processes that opened the soft device.
    edges
        Edges of all processes.
    sees_gil
        False if a process ended normally and requests for the GIL could not be observed in it.
    hang
        The watchdog's report of a process that hung; empty if none did.
    """

    processes: int
    edges: list[Edge]
    sees_gil: bool
    hang: list[str]

    @property
    def cycle(self) -> list[str]:
        """Resources that a thread requested with the GIL and whose holder requested the GIL."""
        resources: set[str] = set()
        for pid in {edge.pid for edge in self.edges}:
            requested: set[str] = set()
            held: set[str] = set()
            for edge in self.edges:
                if edge.pid == pid and GIL in edge.holds:
                    requested.update(edge.wants)
                if edge.pid == pid and GIL in edge.wants:
                    held.update(edge.holds)
            resources |= requested & held
        return sorted(resources)

    @property
    def verdict(self) -> str:
        """A key of `VERDICTS`."""
        if self.hang:
            return "deadlock" if self.cycle else "hang"
        if self.cycle:
            return "potential"
        return "none" if self.processes and self.sees_gil else "unseen"

    def to_json(self) -> dict[str, Any]:
        """Return the report as an object for ``json.dumps``."""
        return {**asdict(self), "cycle": self.cycle, "verdict": self.verdict}


def read_report(path: Path) -> Report:
    """Read a file that ``SOFTCUDA_WATCH`` wrote: one JSON object per line, of all processes."""
    edges: dict[tuple[int, int], Edge] = {}
    pids: set[int] = set()
    sees_gil = True
    hang = []
    text = path.read_text(errors="replace") if path.exists() else ""
    for line in text.splitlines():
        record = json.loads(line)
        pid = record.pop("pid")
        pids.add(pid)
        if "edge" in record:
            number = record.pop("edge")
            edges[pid, number] = Edge(pid=pid, number=number, **record)
        elif "counts" in record:
            for number, count in record["counts"].items():
                edges[pid, int(number)].count = count
            sees_gil = sees_gil and record["sees_gil"]
            hang += record["hang"]
    ordered = sorted(edges.values(), key=lambda edge: (edge.pid, edge.number))
    return Report(len(pids), ordered, sees_gil, hang)


def run_watched(
    program: list[str], limit_s: int, *, stdout: int | None = None
) -> tuple[Report, int]:
    """Run a program on the soft device and record its edges.

    Parameters
    ----------
    program
        Program and arguments; see `graft.tools.soft.resolve_command`.
    limit_s
        Number of seconds after which a driver call or host function counts as hanging. The process
        is then ended, and the report has the stacks of both sides.
    stdout
        File descriptor for the output of the program.

    Returns
    -------
    (Report, int)
        The report and the exit status of the program.

    Raises
    ------
    OptionError
        If the program does not exist, or the limit is less than 1.
    DeviceError
        If the soft device is not built.
    """
    if limit_s < 1:
        raise OptionError(f"the limit must be at least 1 second, got {limit_s}")
    command = resolve_command(program)
    environment = soft_environment()
    with tempfile.TemporaryDirectory(prefix="graft-watch-") as folder:
        path = Path(folder) / "edges.jsonl"
        variables = {"SOFTCUDA_WATCH": str(path), "SOFTCUDA_WATCHDOG": str(limit_s)}
        done = subprocess.run(command, env={**environment, **variables}, stdout=stdout, check=False)
        return read_report(path), done.returncode


def format_report(report: Report, status: int | None = None, max_frames: int = 12) -> str:
    """Return the report as text: edges with stacks, the verdict, the program's exit status."""
    lines: list[str] = []
    for edge in report.edges:
        line = (
            f"{', '.join(edge.holds)} -> {', '.join(edge.wants)}: {edge.at}, "
            f"{edge.count} x, thread {edge.thread!r} of process {edge.pid}"
        )
        lines.append(f"{line} ({edge.why})" if edge.why else line)
        lines += _format_stack("Python", edge.python, max_frames)
        lines += _format_stack("native", edge.native, max_frames)
    if report.hang:
        lines.append("the watchdog ended a process that hung:")
        lines += [f"  {line}" for line in report.hang]
    counts = f"{len(report.edges)} kinds of edges in {report.processes} processes"
    lines.append(f"verdict: {VERDICTS[report.verdict]} ({counts})")
    if report.cycle:
        resources = " and ".join(report.cycle)
        lines.append(
            f"  a thread that holds the GIL waits for {resources}, whose holder requests the GIL: "
            "release the GIL around the driver call, or use host work that does not need it"
        )
    elif not report.processes:
        lines.append("  the program did not open the soft device")
    elif not report.sees_gil:
        lines.append(
            "  requests for the GIL cannot be observed in this interpreter (free-threaded build?)"
        )
    if status is not None:
        end = f"by signal {-status}" if status < 0 else f"with status {status}"
        lines.append(f"the program ended {end}")
    return "\n".join(lines)


def _format_stack(title: str, frames: list[str], max_frames: int) -> list[str]:
    """Return the lines of a stack."""
    if not frames:
        return []
    lines = [f"      {title}"]
    lines += [f"        {frame}" for frame in frames[:max_frames]]
    if len(frames) > max_frames:
        lines.append(f"        ... {len(frames) - max_frames} more")
    return lines
