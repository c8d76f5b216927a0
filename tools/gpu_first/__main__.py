"""Check and measure a GPU in at most 8.3 minutes; compare the measurements with predictions.

    python -m graft.tools.gpu_first [--out FOLDER] [--sections truth ceilings ...] [--small]
    python -m graft.tools.gpu_first --sections suite

The run consists of sections, such as memory bandwidth or attention. The first sections are checks:
they compare the results of the kernels with float64 references at the sizes of an 8B Llama. The
other sections are measurements. The section "suite" runs graft's tests. It takes up to ten minutes
and is not part of the default run.

A section consists of cases and runs in its own process. If a case crashes, hangs or makes the
device unusable, the case counts as failed, and a new process runs the remaining cases. Values that
have been measured are never lost: all files in the output folder are written during the run.

``doctor.txt``
    Report of ``graft doctor`` and ``nvidia-smi``, written before the device is opened.
``SECTION.jsonl``, ``SECTION.log``
    Values and output of a section. A value is written as soon as it is known.
``report.txt``, ``report.json``
    Tables and values of all completed sections.

The predictions follow from the machine code of the kernels and the data sheet of an H200. They were
made before any kernel ran on this GPU. The column "ratio" is the measured value divided by the
middle of the predicted range. ``--small`` selects sizes that the soft device can run. Values
measured with ``--small`` say nothing about a GPU. The exit status is 1 if a check or a section
failed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from graft.tools.console import program, table
from graft.tools.gpu_first.runner import MIN_S, run_section
from graft.tools.gpu_first.sections import SECTIONS
from graft.tools.gpu_first.session import Session

#: Sections that run by default.
DEFAULT_SECTIONS = [name for name in SECTIONS if name != "suite"]
#: Time limit in seconds of a section with ``--small``.
SMALL_LIMIT_S = 600.0
#: Time limit in seconds of ``graft doctor`` and ``nvidia-smi``.
DOCTOR_LIMIT_S = 30.0


def figure_rows(figures: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the table rows for `figures`: name, prediction, measured value, ratio and note."""
    rows: list[tuple[str, ...]] = []
    for figure in figures:
        measured = figure["measured"]
        predicted = figure["predicted"]
        is_check = figure["passed"] is not None
        middle = 0.0
        prediction = ""
        if predicted is not None and not is_check:
            low, high = predicted
            middle = (low + high) / 2
            prediction = f"{low:g} to {high:g}"
        value = ""
        ratio = ""
        if measured is not None:
            value = f"{measured:.4g} {figure['unit']}"
            if middle:
                ratio = f"{measured / middle:.2f}"
        if is_check:
            ratio = "ok" if figure["passed"] else "FAILED"
        rows.append((figure["name"], prediction, value, ratio, figure["note"][:60]))
    return rows


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
    parser.add_argument(
        "--minutes",
        type=float,
        default=8.3,
        help="time limit of all sections (default %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("build/gpu_first"),
        metavar="FOLDER",
        help="output folder (default %(default)s)",
    )
    parser.add_argument("--small", action="store_true", help="sizes for the soft device")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--skip", nargs="*", default=[], help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


class Report:
    """Prints the tables of a run and writes them to its output folder, with all results as JSON.

    The constructor creates the folder and removes the files of an earlier run from it.
    """

    def __init__(self, folder: Path, small: bool) -> None:
        self.folder = folder
        self.sections: dict[str, dict[str, Any]] = {}
        self._small = small
        folder.mkdir(parents=True, exist_ok=True)
        for pattern in ("*.jsonl", "*.log", "report.*", "doctor.txt"):
            for path in folder.glob(pattern):
                path.unlink()

    def print(self, text: str) -> None:
        """Print a text and append it to ``report.txt``."""
        print(text, flush=True)
        with (self.folder / "report.txt").open("a") as file:
            file.write(f"{text}\n")

    def add(self, name: str, result: dict[str, Any]) -> None:
        """Print the table of a section and write ``report.json``."""
        self.sections[name] = result
        report = {"small": self._small, "sections": self.sections}
        (self.folder / "report.json").write_text(json.dumps(report, indent=1))
        heading = (f"{name}: {result['status']}", "predicted", "measured", "ratio", "")
        self.print(f"\n{table([heading, *figure_rows(result['figures'])])}")
        if result["output"]:
            self.print(result["output"])

    def failures(self) -> list[str]:
        """Return the names of failed checks and cases, and of sections that ended early."""
        names = []
        for section, result in self.sections.items():
            for figure in result["figures"]:
                if figure["passed"] is False:
                    names.append(f"{section}: {figure['name']}")
            if result["status"] not in ("ok", "no time left"):
                names.append(f"{section}: {result['status']}")
        return names


def write_doctor_report(report: Report) -> None:
    """Write ``doctor.txt`` with child processes, so that this process does not open the device."""
    commands = [[sys.executable, "-m", "graft.tools.cli", "doctor"]]
    if shutil.which("nvidia-smi"):
        commands.append(["nvidia-smi", "-q"])
    with (report.folder / "doctor.txt").open("w") as file:
        for command in commands:
            try:
                subprocess.run(
                    command, stdout=file, stderr=subprocess.STDOUT, timeout=DOCTOR_LIMIT_S
                )
            except subprocess.TimeoutExpired:
                file.write(f"{' '.join(command)}: timed out after {DOCTOR_LIMIT_S:.0f} s\n")
            file.flush()
    report.print((report.folder / "doctor.txt").read_text(errors="replace")[:2000].strip())


def child_command(options: argparse.Namespace, section: str, skip: Sequence[str]) -> list[str]:
    """Return the command line of a child process that runs all cases of a section except `skip`."""
    command = [sys.executable, "-m", "graft.tools.gpu_first", "--child", "--sections", section]
    if options.small:
        command.append("--small")
    return [*command, "--out", str(options.out), "--skip", *skip]


def run_sections(options: argparse.Namespace) -> int:
    """Run all sections. Return 1 if a check or a section failed, else 0."""
    end = time.monotonic() + 60 * options.minutes
    report = Report(options.out, options.small)
    write_doctor_report(report)
    for name in options.sections:
        section = SECTIONS[name]
        limit_s = SMALL_LIMIT_S if options.small else section.limit_s
        limit_s = min(limit_s, end - time.monotonic())
        if limit_s < MIN_S:
            report.add(name, {"status": "no time left", "figures": [], "output": ""})
            continue
        result = run_section(
            partial(child_command, options, name),
            options.out / f"{name}.jsonl",
            limit_s,
            SMALL_LIMIT_S if options.small else section.case_limit_s,
        )
        report.add(name, result)
    failures = report.failures()
    checks = [
        figure["passed"]
        for result in report.sections.values()
        for figure in result["figures"]
        if figure["passed"] is not None
    ]
    report.print(f"\n{sum(checks)} of {len(checks)} checks passed; {len(failures)} failures")
    for failure in failures:
        report.print(f"  {failure}")
    return 1 if failures else 0


@program
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections in child processes. With ``--child``, run a section in this process."""
    options = parse_options(arguments)
    if not options.child:
        return run_sections(options)
    for name in options.sections:
        SECTIONS[name].run(Session(options.out / f"{name}.jsonl", options.small, options.skip))
    return 0


if __name__ == "__main__":
    sys.exit(main())
