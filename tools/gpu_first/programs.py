"""Sections that run other programs: compute-sanitizer, Nsight Compute and graft's tests."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from graft.tools.gpu_first.session import Case, Session

#: Time limit of a program in seconds.
LIMIT_S = 35.0
#: Arguments of ``graft generate`` for a short run with drafts and, if possible, a grammar.
GENERATE = ["-m", "graft.tools.cli", "generate", "--prompt", "name: Olga Novak; age: 42"]
#: Kernel launches that Nsight Compute skips and measures.
SKIPPED_LAUNCHES = 400
MEASURED_LAUNCHES = 60


def find_program(name: str) -> str | None:
    """Return the path of a CUDA tool from PATH, CUDA_HOME or the default folder, or None."""
    folders = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    path = os.pathsep.join(str(Path(folder, "bin")) for folder in folders if folder)
    return shutil.which(name) or shutil.which(name, path=path)


def run_program(bench: Session, name: str, command: Sequence[str]) -> str | None:
    """Run a program for at most `LIMIT_S`, and write its output to ``NAME.txt``.

    Returns
    -------
    str or None
        The output, or None if the program exceeded the time limit.
    """
    path = bench.folder / f"{name}.txt"
    with path.open("w") as file:
        try:
            subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            bench.add(name, None, "", note=f"timed out after {LIMIT_S:.0f} s")
            return None
    return path.read_text(errors="replace")


def generate_command() -> list[str]:
    """Return the command line of a short run of the demo model."""
    grammar = ["--regex", "[0-9]+"] if importlib.util.find_spec("llguidance") else []
    return [sys.executable, *GENERATE, *grammar, "--max-tokens", "6"]


def check_memory(bench: Session) -> Iterator[Case]:
    """Run a few rounds of the demo model under compute-sanitizer."""
    yield Case("memcheck", partial(_check_memory, bench))


def _check_memory(bench: Session) -> None:
    program = find_program("compute-sanitizer")
    if program is None:
        bench.add("memcheck", None, "", note="compute-sanitizer is not installed")
        return
    command = [program, "--tool", "memcheck", *generate_command()]
    output = run_program(bench, "memcheck", command)
    if output is None:
        return
    summary = re.search(r"ERROR SUMMARY: (\d+)", output)
    if summary is None:
        bench.fail("memcheck", output.strip()[-200:] or "compute-sanitizer printed no summary")
    else:
        bench.check("memcheck", int(summary[1]))


def profile(bench: Session) -> Iterator[Case]:
    """Measure kernels of the demo model's rounds with Nsight Compute."""
    yield Case("ncu", partial(_profile, bench))


def _profile(bench: Session) -> None:
    program = find_program("ncu")
    if program is None:
        bench.add("ncu", None, "", note="Nsight Compute (ncu) is not installed")
        return
    command = [program, "--set", "basic", "--csv", "--graph-profiling", "node"]
    command += ["--launch-skip", str(SKIPPED_LAUNCHES), "--launch-count", str(MEASURED_LAUNCHES)]
    output = run_program(bench, "ncu", [*command, *generate_command()])
    if output is not None:
        rows = sum(line.startswith('"') for line in output.splitlines())
        bench.add("rows of ncu.txt", rows, "rows")


def run_tests(bench: Session) -> Iterator[Case]:
    """Run graft's tests on this device. The result is the number of failures of each file."""
    if importlib.util.find_spec("pytest") is None:
        yield Case("suite", lambda: bench.add("suite", None, "", note="pytest is not installed"))
        return
    if not Path("tests/cudagraph").is_dir():
        why = "the working directory has no folder tests"
        yield Case("suite", lambda: bench.add("suite", None, "", note=why))
        return
    files: list[Path] = []
    for package in ("cudagraph", "sampling", "models", "grammar"):
        files += sorted(Path("tests", package).glob("test_*.py"))
    if bench.small:
        files = [Path("tests/cudagraph/test_lanes.py")]
    yield Case("suite", partial(_run_test_files, bench, files))


def _run_test_files(bench: Session, files: Sequence[Path]) -> None:
    with ThreadPoolExecutor(1 if bench.small else 6) as pool:
        list(pool.map(partial(_run_test_file, bench), files))


def _run_test_file(bench: Session, path: Path) -> None:
    command = [sys.executable, "-m", "pytest", str(path), "-q", "--tb=line"]
    command += ["-p", "no:cacheprovider", "-o", "faulthandler_timeout=90"]
    environment = {**os.environ, "GRAFT_DEVICE": bench.device.kind}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = done.stdout.strip().splitlines() or [""]
    failures = sum(int(count) for count in re.findall(r"(\d+) (?:failed|error)", lines[-1]))
    if not failures and done.returncode not in (0, 5):  # 5: no tests were collected
        failures = 1
    failed_tests = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    note = "; ".join([lines[-1], *failed_tests])
    bench.check(str(path), failures, note[:2000])
