"""The lock-order detector: runs a program on the soft device and sees whether locks have an order.

The soft device writes down two kinds of edges. *GIL to driver*: a thread enters a driver call that
may take a lock of the driver, or that waits for device work, while it holds the GIL. *Driver to
GIL*: a function that the driver calls, or a worker that owes the device an answer, really asks for
the GIL (the interpreter's own lock of the GIL's mutex is seen; being slow is no sign of it). Where
both kinds meet at one resource there is an order in which two threads wait for each other for ever,
whether it came to that this time or not. The switch is ``SOFTCUDA_WATCH=FILE``; ``graft doctor
--watch PROGRAM`` sets it, runs the program and tells what was found.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from graft.cudagraph.errors import OptionError
from graft.tools.soft import command_of, environment

GIL = "GIL"
#: The soft device's watchdog ends a process that hangs with this status.
WATCHDOG_STATUS = 86
#: Exit statuses of ``graft doctor --watch``; the program's own is told, never taken over.
FAILED = 1
UNSEEN = 2
POTENTIAL = 3
DEADLOCK = 4
VERDICTS = {
    "none": "no cycle",
    "potential": "POTENTIAL DEADLOCK",
    "deadlock": "DEADLOCK",
    "hang": "HANG, of which the edges are no explanation",
    "unseen": "nothing was seen",
}


@dataclass
class Edge:
    """One way in which a thread that held something asked for something else.

    Attributes
    ----------
    holds, wants : lists of "GIL", "driver lock" (locks of the driver) and "device work" (what the
        device cannot finish before the thread goes on, or what the thread waits for).
    at : the driver function, or the function that the driver called.
    why : why the call may wait; "" for driver to GIL.
    thread : name of the thread.
    python, native : stack, innermost first; Python's of a driver-to-GIL edge is the first function
        that was entered with the GIL, and empty if that never came.
    count : how often; at least so often where the process was killed.
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
    """What the watch of a program and its children found.

    Attributes
    ----------
    processes : how many opened the soft device.
    sees_gil : False when a process ended in order and requests for the GIL had not been seen.
    hang : the watchdog's report of a process that hung; empty when none did.
    """

    processes: int
    edges: list[Edge]
    sees_gil: bool
    hang: list[str]

    @property
    def cycle(self) -> list[str]:
        """Resources that are asked for with the GIL, and whose holder asks for the GIL."""
        found: set[str] = set()
        for pid in {edge.pid for edge in self.edges}:
            mine = [edge for edge in self.edges if edge.pid == pid]
            wanted = {r for edge in mine if GIL in edge.holds for r in edge.wants}
            held = {r for edge in mine if GIL in edge.wants for r in edge.holds}
            found |= wanted & held
        return sorted(found)

    @property
    def verdict(self) -> str:
        """A key of ``VERDICTS``."""
        if self.hang:
            return "deadlock" if self.cycle else "hang"
        if self.cycle:
            return "potential"
        return "none" if self.processes and self.sees_gil else "unseen"

    def to_json(self) -> dict[str, Any]:
        """Everything, for ``json.dumps``."""
        return {**asdict(self), "cycle": self.cycle, "verdict": self.verdict}


def read(path: Path) -> Report:
    """Read what ``SOFTCUDA_WATCH`` wrote: JSON, one object a line, of any number of processes."""
    edges: dict[tuple[int, int], Edge] = {}
    pids: set[int] = set()
    sees_gil = True
    hang = []
    text = path.read_text(errors="replace") if path.exists() else ""
    for line in text.splitlines():
        said = json.loads(line)
        pid = said.pop("pid")
        pids.add(pid)
        if "edge" in said:
            number = said.pop("edge")
            edges[pid, number] = Edge(pid=pid, number=number, **said)
        elif "counts" in said:
            for number, count in said["counts"].items():
                edges[pid, int(number)].count = count
            sees_gil = sees_gil and said["sees_gil"]
            hang += said["hang"]
    ordered = sorted(edges.values(), key=lambda edge: (edge.pid, edge.number))
    return Report(len(pids), ordered, sees_gil, hang)


def watch(program: list[str], limit_s: int, *, stdout: int | None = None) -> tuple[Report, int]:
    """Run a program on the soft device and watch it.

    Parameters
    ----------
    program : list of str
        See :func:`graft.tools.soft.command_of`.
    limit_s : int
        A driver call or host function that lasts longer counts as hanging: the process is ended,
        and both sides' stacks are in the report.
    stdout : int, optional
        File descriptor for the program's output.

    Returns
    -------
    (Report, int)
        What was found and the program's exit status.

    Raises
    ------
    OptionError
        There is no such program, or the limit is below 1.
    DeviceError
        The soft device is not built.
    """
    if limit_s < 1:
        raise OptionError(f"the limit must be at least 1 second, not {limit_s}")
    command = command_of(program)
    around = environment()
    with tempfile.TemporaryDirectory(prefix="graft-watch-") as folder:
        path = Path(folder) / "edges.jsonl"
        env = {**around, "SOFTCUDA_WATCH": str(path), "SOFTCUDA_WATCHDOG": str(limit_s)}
        done = subprocess.run(command, env=env, stdout=stdout, check=False)
        return read(path), done.returncode


def _stack(title: str, frames: list[str], most: int) -> list[str]:
    shown = [f"        {frame}" for frame in frames[:most]]
    rest = [f"        ... {len(frames) - most} more"] if len(frames) > most else []
    return [f"      {title}", *shown, *rest] if frames else []


def show(report: Report, status: int | None = None, most: int = 12) -> str:
    """The report as text: the edges with their stacks, the verdict, the program's exit status."""
    lines: list[str] = []
    for edge in report.edges:
        lines.append(
            f"{', '.join(edge.holds)} -> {', '.join(edge.wants)}: {edge.at}, "
            f"{edge.count} x, thread {edge.thread!r} of process {edge.pid}"
            + (f" ({edge.why})" if edge.why else "")
        )
        lines += _stack("Python", edge.python, most) + _stack("native", edge.native, most)
    if report.hang:
        lines += ["the watchdog ended a process that hung:", *(f"  {s}" for s in report.hang)]
    edges = f"{len(report.edges)} kinds of edges in {report.processes} processes"
    lines.append(f"verdict: {VERDICTS[report.verdict]} ({edges})")
    if report.cycle:
        what = " and ".join(report.cycle)
        lines.append(
            f"  a thread that holds the GIL waits for {what}, and whoever holds that asks "
            "for the GIL: release the GIL around the driver call, or use host work that "
            "needs no GIL"
        )
    elif not report.processes:
        lines.append("  the program did not open the soft device")
    elif not report.sees_gil:
        lines.append("  requests for the GIL are not seen in this interpreter (one without a GIL?)")
    if status is not None:
        ended = f"by signal {-status}" if status < 0 else f"with status {status}"
        lines.append(f"the program ended {ended}")
    return "\n".join(lines)
