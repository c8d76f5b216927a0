"""Check and measure a GPU in at most nine minutes, from the root of a clone.

    python -m graft.tools.gpu_first [--out FOLDER] [--sections features compile ...] [--small]

The run consists of sections (see `SECTIONS`). Every program and every test file runs in a child
process with a time limit. A section that fails does not stop the sections after it. After a test
that crashes, hangs or makes the device unusable, a new process runs the remaining tests of the
file. The run itself needs neither graft's native module nor CuPy.

Results are printed and written to the output folder as they come: ``report.txt`` has a line per
result, ``results.jsonl`` the same results as JSON, and ``files.tar.gz`` the logs of all child
processes. The archive is written after each section and on SIGTERM. ``--small`` selects sizes that
the soft device can run; their timings say nothing about a GPU. The exit status is 1 if anything
failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from graft.tools.gpu_first import stage0
from graft.tools.gpu_first.runner import (
    MIN_S,
    append_line,
    find_test_files,
    run_command,
    run_test_file,
    stop_all,
)

ROOT = stage0.ROOT
#: Number of test files that run at the same time, except measurements.
WORKERS = 6
#: Time limit of a test of a feature in seconds. Each takes less than a second.
TEST_LIMIT_S = 20.0
#: Program that generates tokens without a grammar. Its host steps are host nodes, because mailboxes
#: wait forever in tools that run each kernel twice.
SHORT_RUN = """
from graft.models.engine.engine import Engine
from graft.models.request import Request
from graft.tools.demo_model import demo_model
with Engine(*demo_model(), max_batch_size=2, max_length=64, grammar_transport="native") as engine:
    outputs = engine.generate([Request(tokens=[300 + i] * 8, max_tokens=6) for i in range(2)])
print("generated", [output.tokens for output in outputs])
"""
#: Pattern of the output of `SHORT_RUN`.
GENERATED = r"generated \[\[\d[\d, ]*\], \[\d[\d, ]*\]\]"
#: Tests that run under memcheck, by the kind of graph node.
SANITIZED_TESTS = {
    "conditional nodes": "test_while_runs_its_body",
    "memory operations": "test_host_steps_run_between_kernels[mailbox]",
}


class Run:
    """A run: its options, its failures, and the folders to which it writes.

    `out` is the output folder. `files` is a temporary folder with the logs of child processes.
    `deadline` is the time of the monotonic clock at which the current section must end.
    """

    def __init__(self, out: Path, small: bool) -> None:
        self.out = out
        self.small = small
        self.files = Path(tempfile.mkdtemp(prefix="gpu_first_"))
        self.failures: list[str] = []
        self.section = ""
        self.deadline = 0.0
        out.mkdir(parents=True, exist_ok=True)
        for name in ("report.txt", "results.jsonl", "files.tar.gz"):
            (out / name).unlink(missing_ok=True)

    def add(
        self,
        name: str,
        outcome: str,
        note: str = "",
        value: float | None = None,
        unit: str = "",
        predicted: tuple[float, float] | None = None,
    ) -> None:
        """Print and write a result. `outcome` is "passed", "failed", "skipped" or "measured"."""
        if outcome == "failed":
            self.failures.append(f"{self.section}: {name}")
        text = f"{self.section:<12} {outcome:<8} {name}"
        if value is not None:
            text += f": {value:.4g} {unit}"
        if predicted is not None and not self.small:
            text += f" (predicted {predicted[0]:g} to {predicted[1]:g})"
        lines = note.strip().splitlines()
        if lines:
            text += f"  # {lines[0] if outcome != 'failed' else lines[-1]}"
        self.print(text[:400])
        line = {"section": self.section, "name": name, "outcome": outcome, "note": note}
        measured = {"value": value, "unit": unit, "predicted": predicted}
        append_line(self.out / "results.jsonl", {**line, **measured})

    def print(self, text: str) -> None:
        """Print a text and append it to the report."""
        print(text, flush=True)
        with (self.out / "report.txt").open("a") as file:
            file.write(f"{text}\n")

    def remaining_s(self, limit_s: float) -> float:
        """Return the time limit of a child process: `limit_s`, or less at the section's end."""
        return min(limit_s, self.deadline - time.monotonic())

    def command(
        self, name: str, command: Sequence[str], limit_s: float, expected: str = ""
    ) -> tuple[bool, str]:
        """Run a command and add its result. Return whether it passed, and its output.

        The command passes if its exit status is 0 and the pattern `expected` occurs in its output.
        """
        limit_s = self.remaining_s(limit_s)
        if limit_s < MIN_S:
            self.add(name, "skipped", "no time left")
            return False, ""
        log = self.files / f"{name.replace(' ', '_')}.log"
        reason = run_command(command, log, limit_s)
        output = log.read_text(errors="replace")
        if not reason and not re.search(expected, output):
            reason = f"the output does not contain {expected!r}"
        self.add(name, "failed" if reason else "passed", f"{output[-1500:]}\n{reason}".strip())
        return not reason, output

    def tests(
        self, *paths: str, workers: int = WORKERS, limit_s: float = 300, test_limit_s: float = 60
    ) -> None:
        """Run test files, and add the result of each test and each measured value.

        All tests of tests/gpu run, except with small sizes.
        """
        files = find_test_files(paths)

        def run(path: str) -> None:
            limits = {"limit_s": self.remaining_s(limit_s), "test_limit_s": test_limit_s}
            if limits["limit_s"] < MIN_S:
                self.add(path, "skipped", "no time left")
                return
            options = ["--full"] if "tests/gpu/" in path and not self.small else []
            problem = run_test_file(path, self.files, self._add_line, options=options, **limits)
            if problem:
                self.add(path, "failed", problem)

        with ThreadPoolExecutor(1 if self.small else workers) as pool:
            list(pool.map(run, files))

    def _add_line(self, line: dict[str, Any]) -> None:
        """Add a line of a test file's results."""
        path, _, name = line["test"].partition("::")
        if line["event"] == "figure":
            value, note = line["value"], line["note"]
            self.add(line["name"], "measured", note, value, line["unit"], line["predicted"])
        elif line["event"] == "end":
            self.add(f"{Path(path).name}::{name}", line["outcome"], line["message"])

    def pack(self) -> None:
        """Write the logs of all child processes to the archive."""
        unfinished = self.out / "files.tar.gz.new"
        with tarfile.open(unfinished, "w:gz") as archive:
            archive.add(self.files, "files")
        unfinished.replace(self.out / "files.tar.gz")


# Sections -----------------------------------------------------------------------------------------


def first_look(run: Run) -> None:
    """Run the checks of `stage0`."""
    program = str(Path(stage0.__file__))
    for name in stage0.CHECKS:
        small = ["cudagraph"] if run.small and name == "kernels" else []
        run.command(name, [sys.executable, program, name, *small], stage0.LIMIT_S)


def build(run: Run) -> None:
    """Build the native module in the clone, unless graft is installed."""
    program = "from graft.native import _native; print(_native.__file__)"
    log = run.files / "import.log"
    reason = run_command([sys.executable, "-c", program], log, run.remaining_s(30))
    if not reason and str(ROOT / "build" / "tree") not in log.read_text():
        run.add("native module", "skipped", f"installed: {log.read_text()}")
        return
    make = ["make", "--no-print-directory", "native", "VENV=none", f"PYTHON={sys.executable}"]
    run.command("native module", make, 240)


def doctor(run: Run) -> None:
    """Run ``graft doctor``, which also compiles a kernel and tests the transports."""
    command = [sys.executable, "-m", "graft.tools.cli", "doctor"]
    log = run.files / "doctor.log"
    reason = run_command(command, log, run.remaining_s(100))
    run.add("doctor", "failed" if "timed out" in reason else "measured", reason)
    run.print(log.read_text(errors="replace").strip())


def features(run: Run) -> None:
    """Run a test per feature of the driver."""
    run.tests("tests/gpu/test_features.py", workers=1, test_limit_s=TEST_LIMIT_S)


def compile_kernels(run: Run) -> None:
    """Compile and load each kernel."""
    run.tests("tests/gpu/test_compile.py", workers=1)


def toolkit(run: Run) -> None:
    """Run the tests of graft.cudagraph."""
    run.tests("tests/cudagraph/test_lanes.py" if run.small else "tests/cudagraph")


def truth(run: Run) -> None:
    """Compare the kernels with references, at the sizes of an 8B model and at other sizes."""
    run.tests("tests/gpu/test_truth.py")
    if not run.small:
        models = ("tests/models/test_kernel_library.py", "tests/models/test_attention.py")
        run.tests(*models, "tests/sampling/test_target.py", "tests/sampling/test_exact_laws.py")


def modes(run: Run) -> None:
    """Compare the tokens of rounds, loops and automata."""
    run.tests("tests/gpu/test_modes.py")


def suite(run: Run) -> None:
    """Run the tests of the other packages."""
    run.tests("tests/sampling", "tests/models", "tests/grammar")


def sanitize(run: Run) -> None:
    """Generate tokens under compute-sanitizer. They must be those of a run without it.

    Tests of nodes that the engine does not use in that run show whether memcheck supports them.
    """
    program = [sys.executable, "-c", SHORT_RUN]
    passed, output = run.command("without tool", program, 60, GENERATED)
    if shutil.which("compute-sanitizer") is None:
        run.add("compute-sanitizer", "skipped", "it is not installed")
        return
    expected = re.escape(output.strip().splitlines()[-1]) if passed else GENERATED
    summary = r"(ERROR|RACECHECK) SUMMARY: 0 (errors|hazards)"
    for tool in ("memcheck", "racecheck"):
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *program]
        run.command(tool, command, 60, f"(?s){expected}.*{summary}")
    for name, test in SANITIZED_TESTS.items():
        command = ["compute-sanitizer", "--error-exitcode", "9", sys.executable, "-m", "pytest"]
        command += ["--full", "-q", f"tests/gpu/test_features.py::{test}"]
        run.command(f"memcheck of {name}", command, 30, f"(?s)1 passed.*{summary}")


def measure(run: Run) -> None:
    """Run the measurements, and profile a few kernels with Nsight Compute."""
    run.tests("tests/gpu/test_measurements.py", workers=1)
    if shutil.which("ncu") is None:
        run.add("ncu", "skipped", "ncu is not installed")
        return
    command = ["ncu", "--set", "basic", "--csv", "--graph-profiling", "node"]
    command += ["--clock-control", "none", "--launch-skip", "50", "--launch-count", "60"]
    command += [sys.executable, "-c", SHORT_RUN]
    passed, output = run.command("ncu", command, 60, r'(?m)^"\d')
    if passed:
        rows = len(re.findall(r'(?m)^"\d', output))
        run.add("kernels profiled by ncu", "measured", value=rows, unit="rows")


class Section(NamedTuple):
    """A section of the run and its time limit."""

    run: Callable[[Run], None]
    limit_s: float


#: Sections in the order in which they run.
SECTIONS = {
    "stage0": Section(first_look, 60),
    "build": Section(build, 240),
    "doctor": Section(doctor, 100),
    "features": Section(features, 60),
    "compile": Section(compile_kernels, 90),
    "tests": Section(toolkit, 120),
    "truth": Section(truth, 90),
    "sanitizer": Section(sanitize, 120),
    "modes": Section(modes, 60),
    "measure": Section(measure, 150),
    "suite": Section(suite, 590),
}
DEFAULT_SECTIONS = [name for name in SECTIONS if name != "suite"]


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m graft.tools.gpu_first", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--sections",
        nargs="+",
        choices=SECTIONS,
        default=DEFAULT_SECTIONS,
        help="sections to run (default: all but suite)",
    )
    parser.add_argument("--minutes", type=float, default=9, help="time limit (default 9)")
    parser.add_argument("--out", type=Path, default=Path("build/gpu_first"), metavar="FOLDER")
    parser.add_argument("--small", action="store_true", help="sizes for the soft device")
    options = parser.parse_args(arguments)
    if not options.minutes > 0:
        parser.error(f"--minutes must be above 0, not {options.minutes:g}")
    return options


def stop(signum: int, frame: Any) -> None:
    """Signal handler that ends the run, so that the archive is written."""
    stop_all()  # otherwise the threads that wait for child processes would not end
    raise SystemExit(128 + signum)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections. Return 1 if anything failed, else 0."""
    options = parse_options(arguments)
    if not (ROOT / "tests" / "gpu").is_dir():
        sys.exit(f"gpu_first needs a clone of the repository; {ROOT} has no folder tests/gpu")
    run = Run(options.out.resolve(), options.small)
    os.chdir(ROOT)
    os.environ.setdefault("GRAFT_DEVICE", "soft" if options.small else "cuda")
    os.environ["GPU_FIRST_SMALL"] = "1" if options.small else ""
    end = time.monotonic() + 60 * options.minutes
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    try:
        for name in options.sections:
            run.section = name
            run.deadline = min(end, time.monotonic() + SECTIONS[name].limit_s)
            start = time.monotonic()
            if run.deadline - start < MIN_S:
                run.add("section", "skipped", "no time left")
                continue
            try:
                SECTIONS[name].run(run)
            except Exception as error:
                run.add("section", "failed", f"{type(error).__name__}: {error}")
            run.add("section", "measured", value=time.monotonic() - start, unit="s")
            run.pack()
    finally:
        stop_all()
        run.pack()
        shutil.rmtree(run.files, ignore_errors=True)
    run.print(f"{len(run.failures)} failures")
    for failure in run.failures:
        run.print(f"  {failure}")
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
