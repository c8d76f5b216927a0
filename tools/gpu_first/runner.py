"""Run test files on a GPU: one process per file, with time limits and restarts after faults.

    python -m graft.tools.gpu_first.runner [--out FOLDER] PATH... [-- PYTEST OPTIONS...]

A test that crashes, hangs or makes the device unusable fails, and a new process runs the remaining
tests of its file. Results are printed as they come. The output folder contains a log and a results
file (lines of JSON, see `plugin`) for each test file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

#: Environment variable with the path of the results file of a test process.
RESULTS_VARIABLE = "GPU_FIRST_RESULTS"
#: Exit status of a test process after a failed test that has made the device unusable.
DEVICE_LOST_STATUS = 75
#: A process is started only if at least this many seconds of a time limit remain.
MIN_S = 3.0
#: Seconds between two looks at a child process and its results.
POLL_S = 0.1
#: Time in which a process that exceeds its limit prints the stacks of its threads.
STACKS_S = 2.0
#: Time in which a killed process ends, unless it hangs in the kernel.
KILL_S = 10.0
#: Maximum number of characters of a message.
MAX_MESSAGE = 2000

#: Reasons of `run_command`: tests have failed, there are no tests left, or the device is lost.
TESTS_FAILED = "exit status 1"
NO_TESTS = "exit status 5"
DEVICE_LOST = f"exit status {DEVICE_LOST_STATUS}"

Report = Callable[[dict[str, Any]], None]

_children: set[subprocess.Popen[bytes]] = set()
_stopped = False


def append_line(path: Path, line: dict[str, Any]) -> None:
    """Append a line of JSON to a file."""
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a results file."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def run_command(
    command: Sequence[str],
    log: Path,
    limit_s: float,
    environment: Mapping[str, str] | None = None,
    watch: Callable[[], str] = lambda: "",
) -> str:
    """Run a command in its own process group, and append its output to `log`.

    Return "" if the exit status is 0, otherwise why the command failed. `watch` is called
    repeatedly; if it returns a reason, the command is stopped. To stop a command, the function
    first sends SIGABRT, on which Python prints the stacks of its threads. The messages of the
    driver (CUDA 12.9 or later) are written to a file next to the log.
    """
    driver_log = log.with_suffix(".cuda")
    variables = {**os.environ, "CUDA_LOG_FILE": str(driver_log), **(environment or {})}
    end = time.monotonic() + limit_s
    if _stopped:
        return "the run was stopped"
    with log.open("ab") as file:
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=variables,
                start_new_session=True,
            )
        except OSError as error:
            return str(error)
        _children.add(child)
        reason = ""
        try:
            if _stopped:  # since the child was started
                reason = "the run was stopped"
            while child.poll() is None and not reason:
                time.sleep(POLL_S)
                reason = watch()
                if not reason and time.monotonic() > end:
                    reason = f"timed out after {limit_s:.0f} s"
            if reason and child.poll() is None:
                child.send_signal(signal.SIGABRT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(STACKS_S)
        finally:
            _kill_group(child)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(KILL_S)  # a process that hangs in the driver cannot be killed
            _children.discard(child)
        watch()
    if not reason and child.returncode:
        reason = f"exit status {child.returncode}"
    if reason and driver_log.exists():
        reason += f"; driver: {driver_log.read_text(errors='replace').strip()[-500:]}"
    return reason


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    """Kill a child process and its own children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def stop_all() -> None:
    """Kill all child processes, and start no further ones. A signal handler may call this."""
    global _stopped
    _stopped = True
    for child in list(_children):
        _kill_group(child)


def run_test_file(
    path: str,
    folder: Path,
    report: Report,
    *,
    limit_s: float,
    test_limit_s: float,
    options: Sequence[str] = (),
) -> str:
    """Run a test file, and call `report` with each new line of its results.

    `path` may contain a test id after ``::``. A new process runs the remaining tests if a process
    fails outside a test: between two tests, or after the last one. Return the reason of the first
    failure of this kind, or that the time limit was exceeded; "" if neither happened.
    """
    name = path.replace("/", ".").replace("::", ".")
    results = folder / f"{name}.jsonl"
    results.touch()
    log = folder / f"{name}.log"
    end = time.monotonic() + limit_s
    reported = 0

    def watch() -> str:
        """Report new results, and return why the running test must be stopped."""
        nonlocal reported
        lines = read_lines(results)
        for line in lines[reported:]:
            report(line)
        reported = len(lines)
        test = _running_test(lines)
        if test is not None and time.monotonic() > test["time"] + test_limit_s:
            return f"timed out after {test_limit_s:.0f} s"
        return ""

    command = [sys.executable, "-m", "pytest", path, "-q", "--tb=short", *options]
    command += ["-p", "no:cacheprovider", "-p", "graft.tools.gpu_first.plugin"]
    command += ["-o", "faulthandler_timeout=0"]
    environment = {RESULTS_VARIABLE: str(results)}
    problem = ""
    while True:
        begun = len(read_lines(results))
        reason = run_command(command, log, end - time.monotonic(), environment, watch)
        status = reason.partition(";")[0]
        lines = read_lines(results)
        test = _running_test(lines)
        failed = any(line.get("outcome") == "failed" for line in lines[begun:])
        if test is not None:
            message = reason or "the process ended during the test"
            line = {"event": "end", "test": test["test"], "outcome": "failed", "message": message}
            append_line(results, {**line, "seconds": time.monotonic() - test["time"]})
            watch()
        elif status in ("", NO_TESTS) or (status == TESTS_FAILED and failed):
            return problem
        elif status != DEVICE_LOST or not failed:
            problem = problem or f"{reason} outside a test: {_tail(log)}"
            if not lines[begun:]:  # a further process would fail as well
                return problem
        if end - time.monotonic() < MIN_S:
            return problem or reason


def _running_test(lines: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the line of the test that has begun but not ended, or None."""
    running = None
    for line in lines:
        if line["event"] == "begin":
            running = line
        elif line["event"] == "end":
            running = None
    return running


def _tail(log: Path) -> str:
    return log.read_text(errors="replace").strip()[-MAX_MESSAGE:]


def find_test_files(paths: Sequence[str]) -> list[str]:
    """Return the test files of folders; files and test ids are returned as they are."""
    found: list[str] = []
    for path in paths:
        if Path(path).is_dir():
            found += map(str, sorted(Path(path).rglob("test_*.py")))
        else:
            found.append(path)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run test files, print their failures and a summary of each file; return 1 after a failure."""
    parser = argparse.ArgumentParser(
        prog="python -m graft.tools.gpu_first.runner", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="test file or folder")
    parser.add_argument("--out", type=Path, default=Path("build/test_files"), metavar="FOLDER")
    parser.add_argument("--workers", type=int, default=6, help="files that run at the same time")
    parser.add_argument("--limit", type=float, default=600, help="seconds per file")
    parser.add_argument("--test-limit", type=float, default=120, help="seconds per test")
    given = list(sys.argv[1:] if arguments is None else arguments)
    end = given.index("--") if "--" in given else len(given)
    options = parser.parse_args(given[:end])
    options.out.mkdir(parents=True, exist_ok=True)
    for pattern in ("*.jsonl", "*.log", "*.cuda"):
        for old in options.out.glob(pattern):
            old.unlink()
    failures: list[str] = []

    def run(path: str) -> None:
        outcomes: list[str] = []

        def report(line: dict[str, Any]) -> None:
            if line["event"] != "end":
                return
            outcomes.append(line["outcome"])
            if line["outcome"] == "failed":
                failures.append(line["test"])
                print(f"FAILED {line['test']}\n{line['message'][-MAX_MESSAGE:]}", flush=True)

        problem = run_test_file(
            path,
            options.out,
            report,
            limit_s=options.limit,
            test_limit_s=options.test_limit,
            options=given[end + 1 :],
        )
        if problem:
            failures.append(path)
        counts = [f"{outcomes.count(name)} {name}" for name in sorted(set(outcomes))]
        print(f"{path}: {', '.join(counts) or 'no tests'} {problem}".rstrip(), flush=True)

    try:
        with ThreadPoolExecutor(options.workers) as pool:
            list(pool.map(run, find_test_files(options.paths)))
    finally:
        stop_all()
    print(f"{len(failures)} failures", *failures, sep="\n  ")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
