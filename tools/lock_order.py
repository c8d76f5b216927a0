"""Lock-order detector: find possible deadlocks between the GIL and the CUDA driver.

The GIL and the driver's resources (its locks, and device work that must complete) are the nodes of
a graph. A program runs on the soft device, which records an edge whenever a thread that holds one
node requests another. There are two kinds of edges:

*GIL to driver*
    A thread that holds the GIL enters a driver call that may take a lock of the driver or wait for
    device work.
*Driver to GIL*
    A function that the driver calls, or a thread that the device waits for, requests the GIL. The
    soft device detects the request when the interpreter locks the mutex of the GIL. A function that
    is slow but does not use Python is therefore not recorded.

If edges of both kinds exist for one resource, they form a cycle: two threads can wait for each
other forever, even if that did not happen in the observed run. The environment variable
``SOFTCUDA_WATCH=FILE`` makes the soft device write the edges to a file. ``graft doctor --watch
PROGRAM`` sets the variable, runs the program and prints the result.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from graft.cudagraph.errors import OptionError
from graft.native.errors import short_repr
from graft.tools.soft import resolve_command, soft_environment

GIL = "GIL"
#: Exit status of a process that the watchdog of the soft device terminated.
WATCHDOG_STATUS = 86

#: Exit statuses of ``graft doctor --watch PROGRAM``. They describe the result of the analysis. The
#: exit status of PROGRAM itself is a line of the printed report.
FAILED = 1
UNSEEN = 2
POTENTIAL = 3
DEADLOCK = 4
VERDICTS = {
    "none": "no cycle",
    "potential": "POTENTIAL DEADLOCK",
    "deadlock": "DEADLOCK",
    "hang": "HANG without a cycle in the recorded edges",
    "unseen": "nothing was observed",
}


@dataclass
class Edge:
    """An edge of the lock-order graph: a thread requested some resources while it held others."""

    pid: int  #: process id
    number: int  #: index of the edge among the edges of its process
    #: Resources that the thread held and requested. A resource is ``"GIL"``, ``"driver lock"`` (any
    #: lock of the driver) or ``"device work"``. A thread holds device work if the device cannot
    #: complete the work before the thread continues. A thread requests device work by waiting for
    #: the work.
    holds: list[str]
    wants: list[str]
    #: Name of the driver function that the thread called, or of the function that the driver called
    #: on the thread.
    at: str
    #: What the driver call can wait for; empty for an edge from driver to GIL.
    why: str = ""
    thread: str = ""  #: name of the thread
    #: Python stack and native stack, innermost frame first. For an edge from driver to GIL (a
    #: thread that requests the GIL while the driver calls it), the Python stack contains only the
    #: first function that the thread entered after it had acquired the GIL. The Python stack is
    #: empty if the thread did not acquire the GIL.
    python: list[str] = field(default_factory=list)
    native: list[str] = field(default_factory=list)
    #: Number of times the edge occurred. If the process was killed, this is a lower bound.
    count: int = 1


@dataclass
class Report:
    """Result of the analysis of a program and its child processes."""

    processes: int  #: number of processes that opened the soft device
    edges: list[Edge]  #: edges of all processes
    #: Whether requests for the GIL could be observed in all processes that exited normally.
    sees_gil: bool
    #: Lines of the watchdog's report on a process that hung; empty if no process hung.
    hang: list[str]

    @property
    def cycle(self) -> list[str]:
        """List of the resources that form a cycle with the GIL.

        A resource forms a cycle if, in one process, a thread that held the GIL requested the
        resource, and a thread that held the resource requested the GIL.
        """
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
        """Verdict on the program, a key of `VERDICTS`."""
        if self.hang:
            return "deadlock" if self.cycle else "hang"
        if self.cycle:
            return "potential"
        return "none" if self.processes and self.sees_gil else "unseen"

    def to_json(self) -> dict[str, Any]:
        """Return the report as an object for ``json.dumps``."""
        return {**asdict(self), "cycle": self.cycle, "verdict": self.verdict}


def read_report(path: Path) -> Report:
    """Read a file of edges that the soft device wrote, with one JSON object per line.

    All processes of the program append to the same file.
    """
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
        elif "counts" in record:  # the last record of a process that exited
            for number, count in record["counts"].items():
                edges[pid, int(number)].count = count
            sees_gil = sees_gil and record["sees_gil"]
            hang += record["hang"]
    ordered = sorted(edges.values(), key=lambda edge: (edge.pid, edge.number))
    return Report(len(pids), ordered, sees_gil, hang)


def run_watched(
    program: list[str], limit_s: int, *, stdout: int | None = None
) -> tuple[Report, int]:
    """Run a program on the soft device; return the report and the exit status of the program.

    `program` is the program with its arguments, as for `soft.resolve_command`. `stdout` is a file
    descriptor for its output. A driver call or host function counts as hanging after `limit_s`
    seconds. The watchdog then terminates the process, and the report contains the stacks of the
    threads involved. Raise OptionError if the program does not exist, or the limit is less than 1.
    """
    if limit_s < 1:
        raise OptionError(f"the limit must be at least 1 second, got {short_repr(limit_s)}")
    command = resolve_command(program)
    environment = soft_environment()
    with tempfile.TemporaryDirectory(prefix="graft-watch-") as folder:
        path = Path(folder) / "edges.jsonl"
        variables = {"SOFTCUDA_WATCH": str(path), "SOFTCUDA_WATCHDOG": str(limit_s)}
        done = subprocess.run(command, env={**environment, **variables}, stdout=stdout, check=False)
        return read_report(path), done.returncode


def format_report(report: Report, status: int | None = None, max_frames: int = 12) -> str:
    """Return the report as text, with at most `max_frames` frames of each stack.

    The text has a line with the exit status of the program unless `status` is None.
    """
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
    """Return the lines that describe a stack; an empty list if the stack is empty."""
    if not frames:
        return []
    lines = [f"      {title}"]
    lines += [f"        {frame}" for frame in frames[:max_frames]]
    if len(frames) > max_frames:
        lines.append(f"        ... {len(frames) - max_frames} more")
    return lines
