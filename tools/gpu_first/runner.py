"""Run a section in child processes: with time limits, and with a new process after a fault."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from graft.tools.gpu_first.session import append_line, failure

#: A process is restarted only if at least this many seconds of the section's time limit remain.
MIN_S = 5.0
#: Seconds between two checks whether the running case has exceeded its time limit.
POLL_S = 0.2
#: Maximum number of characters that are kept of a failed section's output.
MAX_OUTPUT = 2000

Command = Callable[[Sequence[str]], Sequence[str]]


def run_section(
    command: Command, figures_path: Path, limit_s: float, case_limit_s: float
) -> dict[str, Any]:
    """Run a section in a child process, and return its results.

    If the process crashes or a case takes too long, a new process runs the remaining cases.
    `command` returns program and arguments of a child process, given the names of the cases to
    skip. The child processes append lines of JSON to `figures_path`; see `Session`. Their output is
    appended to the file with the same name and the suffix ``.log``.

    Returns
    -------
    dict
        ``status`` is "ok", or why the last process failed. ``seconds`` is the duration,
        ``processes`` the number of child processes. ``figures`` has the measured values and the
        results of checks (`session.make_figure`). ``output`` is the end of the processes' output;
        it is empty if the status is "ok".
    """
    start = time.monotonic()
    log_path = figures_path.with_suffix(".log")
    figures_path.touch()
    status = ""
    processes = 0
    seen: list[str] = []
    while status != "ok":
        remaining_s = start + limit_s - time.monotonic()
        if processes and remaining_s < MIN_S:
            break
        status = _run_process(command(seen), figures_path, log_path, remaining_s, case_limit_s)
        processes += 1
        lines = read_lines(figures_path)
        case = _open_case(lines)
        if status != "ok" and case is not None:
            append_line(figures_path, failure(case["case"], status))
            append_line(figures_path, {"event": "end", "case": case["case"]})
        begun = [line["case"] for line in lines if line["event"] == "begin"]
        if len(begun) == len(seen):
            break  # the process failed before it started a case
        seen = begun
    figures = [line for line in read_lines(figures_path) if line["event"] == "figure"]
    output = log_path.read_text(errors="replace").strip()[-MAX_OUTPUT:]
    return {
        "status": status,
        "seconds": time.monotonic() - start,
        "processes": processes,
        "figures": figures,
        "output": "" if status == "ok" else output,
    }


def _run_process(
    command: Sequence[str], figures_path: Path, log_path: Path, limit_s: float, case_limit_s: float
) -> str:
    """Run a child process within the time limits, and return "ok" or why it failed.

    `limit_s` limits the process, and `case_limit_s` each of its cases.
    """
    end = time.monotonic() + limit_s
    with log_path.open("a") as log:
        child = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    code = child.wait(POLL_S)
                    return "ok" if code == 0 else f"exit status {code}"
                now = time.monotonic()
                if now > end:
                    return f"timed out after {limit_s:.0f} s"
                case = _open_case(read_lines(figures_path))
                if case is not None and now > case["time"] + case_limit_s:
                    return f"the case timed out after {case_limit_s:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # includes the child's own children
            child.wait()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a section's output file."""
    lines = path.read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines]


def _open_case(lines: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the line of the case that has begun but not ended, or None."""
    case = None
    for line in lines:
        if line["event"] == "begin":
            case = line
        elif line["event"] == "end":
            case = None
    return case
