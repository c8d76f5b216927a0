"""Measure a GPU for ten minutes and compare the measurements with predictions.

    python -m graft.tools.gpu_first [--sections ceilings gaps ...] [--minutes 9.5] [--small]

The measurement consists of sections, such as memory bandwidth or attention. Each section runs in
its own process with a time limit. If the process crashes, hangs or fails, the values that it has
measured so far are kept, and the next section starts. After each section, its table is printed and
the JSON file is rewritten.

The predictions follow from the machine code of the kernels and the data sheet of an H200. They were
made before any kernel ran on this GPU. The column "ratio" is the measured value divided by the
middle of the predicted range. ``--small`` selects sizes that the soft device (graft's CPU
implementation of the CUDA driver) can run. Values measured with ``--small`` say nothing about a
GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from graft.cudagraph.device import open_device
from graft.tools.gpu_first.bench import Bench
from graft.tools.gpu_first.sections import SECTIONS
from graft.tools.report import program, table

#: Minimum remaining time in seconds with which another section is started.
MIN_SECTION_S = 5.0
#: Time limit in seconds of a section with small sizes.
SMALL_LIMIT_S = 600.0
#: Maximum number of characters that are kept of a failed section's output.
MAX_OUTPUT = 2000


def run_section(command: Sequence[str], figures_path: Path, limit_s: float) -> dict[str, Any]:
    """Run a section in a child process.

    Parameters
    ----------
    command
        Program and arguments of the child process.
    figures_path
        File to which the child process writes one measured value per line.
    limit_s
        Time limit in seconds.

    Returns
    -------
    dict
        ``status``
            "ok", or a description of the failure.
        ``seconds``
            Duration.
        ``figures``
            Measured values; see `Bench.add`.
        ``output``
            End of the process's output; empty if the status is "ok".
    """
    start = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        child = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = child.wait(limit_s)
            status = "ok" if code == 0 else f"exit status {code}"
        except subprocess.TimeoutExpired:
            status = f"timed out after {limit_s:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # includes the child's own children
            child.wait()
        file.seek(0)
        output = file.read().strip()[-MAX_OUTPUT:]
    lines = figures_path.read_text().splitlines() if figures_path.exists() else []
    return {
        "status": status,
        "seconds": time.monotonic() - start,
        "figures": [json.loads(line) for line in lines],
        "output": "" if status == "ok" else output,
    }


def figure_rows(figures: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the table rows of a section: name, prediction, measured value, ratio and note."""
    rows: list[tuple[str, ...]] = []
    for figure in figures:
        measured = figure["measured"]
        predicted = figure["predicted"]
        middle = 0.0
        prediction = ""
        if predicted is not None:
            low, high = predicted
            middle = (low + high) / 2
            prediction = f"{low:g} to {high:g}"
        value = ""
        ratio = ""
        if measured is not None:
            value = f"{measured:.4g} {figure['unit']}"
            if middle:
                ratio = f"{measured / middle:.2f}"
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
        default=list(SECTIONS),
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=9.5,
        help="time limit of all sections (default 9.5)",
    )
    parser.add_argument(
        "--json",
        type=Path,
        default=Path("build/gpu_first.json"),
        metavar="FILE",
        help="(default %(default)s)",
    )
    parser.add_argument("--small", action="store_true", help="sizes for the soft device")
    parser.add_argument(
        "--child",
        type=Path,
        metavar="FILE",
        help=argparse.SUPPRESS,
    )
    return parser.parse_args(arguments)


def run_sections(options: argparse.Namespace) -> None:
    """Run all sections. After each section, print its table and write the JSON file."""
    end = time.monotonic() + 60 * options.minutes
    results: dict[str, dict[str, Any]] = {}
    report = {
        "device": open_device().describe(),
        "small": options.small,
        "sections": results,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    print(report["device"], flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in options.sections:
            section_limit_s = SMALL_LIMIT_S if options.small else SECTIONS[name].limit_s
            limit_s = min(section_limit_s, end - time.monotonic())
            result: dict[str, Any]
            if limit_s < MIN_SECTION_S:
                result = {"status": "no time left", "figures": [], "output": ""}
            else:
                path = Path(folder, name)
                command = [
                    sys.executable,
                    "-m",
                    "graft.tools.gpu_first",
                    "--sections",
                    name,
                ]
                command += ["--child", str(path)]
                if options.small:
                    command.append("--small")
                result = run_section(command, path, limit_s)
            results[name] = result
            options.json.write_text(json.dumps(report, indent=1))
            heading = (
                f"{name}: {result['status']}",
                "predicted",
                "measured",
                "ratio",
                "",
            )
            print(f"\n{table([heading, *figure_rows(result['figures'])])}", flush=True)
            if result["output"]:
                print(result["output"], flush=True)


@program
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the sections in child processes. With ``--child``, run a section in this process."""
    options = parse_options(arguments)
    if options.child:
        for name in options.sections:
            SECTIONS[name].measure(Bench(options.child, options.small))
    else:
        run_sections(options)


if __name__ == "__main__":
    sys.exit(main())
