"""Sections that run other programs: compute-sanitizer, Nsight Compute and graft's tests."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from graft.tools.gpu_first.session import Session

#: Time limit of a program in seconds.
LIMIT_S = 35.0
#: Arguments of ``graft generate`` for a short run with drafts and, if possible, a grammar.
GENERATE = ["-m", "graft.tools.cli", "generate", "--prompt", "name: Olga Novak; age: 42"]
#: Number of kernel launches that Nsight Compute skips, and number of those that it then measures.
SKIPPED_LAUNCHES = 400
MEASURED_LAUNCHES = 60


def find_program(name: str) -> str | None:
    """Return the path of a CUDA tool from PATH, CUDA_HOME or the default folder, or None."""
    folders = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    path = os.pathsep.join(str(Path(folder, "bin")) for folder in folders if folder)
    return shutil.which(name) or shutil.which(name, path=path)


def run_tool(session: Session, name: str, tool: str, arguments: Sequence[str]) -> str | None:
    """Run a short generation under a CUDA tool, and write the output to ``NAME.txt``.

    Return the output, or None if the tool is not installed or exceeds the time limit.
    """
    program = find_program(tool)
    if program is None:
        session.add(name, None, "", note=f"{tool} is not installed")
        return None
    path = session.folder / f"{name}.txt"
    command = [program, *arguments, *generate_command()]
    with path.open("w") as file:
        try:
            subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            session.add(name, None, "", note=f"timed out after {LIMIT_S:.0f} s")
            return None
    return path.read_text(errors="replace")


def generate_command() -> list[str]:
    """Return the command line of a short run of the demo model."""
    grammar = ["--regex", "[0-9]+"] if importlib.util.find_spec("llguidance") else []
    return [sys.executable, *GENERATE, *grammar, "--max-tokens", "6"]


def check_memory(session: Session) -> None:
    """Run a few rounds of the demo model under compute-sanitizer."""
    session.case("memcheck", _check_memory, session)


def _check_memory(session: Session) -> None:
    output = run_tool(session, "memcheck", "compute-sanitizer", ["--tool", "memcheck"])
    if output is None:
        return
    summary = re.search(r"ERROR SUMMARY: (\d+)", output)
    if summary is None:
        session.fail("memcheck", output.strip()[-200:] or "compute-sanitizer printed no summary")
    else:
        session.check("memcheck", int(summary[1]))


def profile(session: Session) -> None:
    """Measure kernels of the demo model's rounds with Nsight Compute."""
    session.case("ncu", _profile, session)


def _profile(session: Session) -> None:
    arguments = ["--set", "basic", "--csv", "--graph-profiling", "node"]
    arguments += ["--launch-skip", str(SKIPPED_LAUNCHES), "--launch-count", str(MEASURED_LAUNCHES)]
    output = run_tool(session, "ncu", "ncu", arguments)
    if output is not None:
        rows = sum(line.startswith('"') for line in output.splitlines())
        session.add("rows of ncu.txt", rows, "rows")


def run_tests(session: Session) -> None:
    """Run graft's tests on this device, and report the number of failures of each test file."""
    session.case("suite", _run_suite, session)


def _run_suite(session: Session) -> None:
    missing = ""
    if importlib.util.find_spec("pytest") is None:
        missing = "pytest is not installed"
    elif not Path("tests/cudagraph").is_dir():
        missing = "the working directory has no folder tests"
    if missing:
        session.add("suite", None, "", note=missing)
        return
    files: list[Path] = []
    for package in ("cudagraph", "sampling", "models", "grammar"):
        files += sorted(Path("tests", package).glob("test_*.py"))
    if session.small:
        files = [Path("tests/cudagraph/test_lanes.py")]
    with ThreadPoolExecutor(1 if session.small else 6) as pool:
        list(pool.map(partial(_run_test_file, session), files))


def _run_test_file(session: Session, path: Path) -> None:
    command = [sys.executable, "-m", "pytest", str(path), "-q", "--tb=line"]
    command += ["-p", "no:cacheprovider", "-o", "faulthandler_timeout=90"]
    environment = {**os.environ, "GRAFT_DEVICE": session.device.kind}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = done.stdout.strip().splitlines() or [""]
    failures = sum(int(count) for count in re.findall(r"(\d+) (?:failed|error)", lines[-1]))
    if not failures and done.returncode not in (0, 5):  # 5: no tests were collected
        failures = 1
    failed_tests = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    note = "; ".join([lines[-1], *failed_tests])
    session.check(str(path), failures, note[:2000])
