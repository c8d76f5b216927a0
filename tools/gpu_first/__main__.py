"""The first ten minutes on a GPU: what it does, beside what was predicted of it.

    python -m graft.tools.gpu_first [--sections ceilings gaps ...] [--minutes 9.5] [--small]

Every section runs in a process of its own within a limit of its own; one that crashes, hangs or is
refused costs no more than what it had not measured yet. After each the table is printed and the
JSON file written anew. Predictions were made from the kernels' machine code and the data sheet of
an H200 before any ran on one; the ratio is to the middle of what was predicted. `--small` takes
sizes that the soft device can run, whose figures say nothing.
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

LEAST_S = 5.0


def play(command: Sequence[str], lines: Path, limit_s: float) -> dict[str, Any]:
    """Run a section's process; its figures, and how it ended."""
    begun = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        child = subprocess.Popen(
            command, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = child.wait(limit_s)
            ended = "ok" if status == 0 else f"exit status {status}"
        except subprocess.TimeoutExpired:
            ended = f"not over in {limit_s:.0f} s"
        finally:
            with suppress(ProcessLookupError):  # what it started too
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        said.seek(0)
        told = said.read().strip()[-2000:]
    found = lines.read_text().splitlines() if lines.exists() else []
    return {
        "ended": ended,
        "seconds": time.monotonic() - begun,
        "figures": [json.loads(line) for line in found],
        "said": "" if ended == "ok" else told,
    }


def figure_rows(figures: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """What, predicted, measured, ratio, note."""
    rows = list[tuple[str, ...]]()
    for figure in figures:
        measured = figure["measured"]
        predicted = figure["predicted"]
        middle = sum(predicted) / 2 if predicted else 0.0
        rows.append(
            (
                figure["what"],
                "" if predicted is None else "{:g} to {:g}".format(*predicted),
                "" if measured is None else f"{measured:.4g} {figure['unit']}",
                f"{measured / middle:.2f}" if measured is not None and middle else "",
                figure["note"][:60],
            )
        )
    return rows


@program
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the sections; print their tables and write JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m graft.tools.gpu_first", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--minutes", type=float, default=9.5, help="for all (default 9.5)")
    parser.add_argument(
        "--json",
        type=Path,
        default=Path("build/gpu_first.json"),
        metavar="FILE",
        help="(default %(default)s)",
    )
    parser.add_argument("--small", action="store_true", help="sizes for the soft device")
    parser.add_argument("--child", type=Path, metavar="LINES", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        for name in options.sections:
            SECTIONS[name][0](Bench(options.child, options.small))
        return
    end = time.monotonic() + 60 * options.minutes
    done = dict[str, Any]()
    options.json.parent.mkdir(parents=True, exist_ok=True)
    results = {"device": open_device().describe(), "small": options.small, "sections": done}
    print(results["device"], flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in options.sections:
            limit = min(600 if options.small else SECTIONS[name][1], end - time.monotonic())
            lines = Path(folder, name)
            if limit < LEAST_S:
                done[name] = {"ended": "no time was left", "figures": [], "said": ""}
            else:
                done[name] = play(
                    [
                        sys.executable,
                        "-m",
                        "graft.tools.gpu_first",
                        "--sections",
                        name,
                        "--child",
                        str(lines),
                        *["--small"] * options.small,
                    ],
                    lines,
                    limit,
                )
            options.json.write_text(json.dumps(results, indent=1))
            heading = (f"{name}: {done[name]['ended']}", "predicted", "measured", "ratio", "")
            print(f"\n{table([heading, *figure_rows(done[name]['figures'])])}", flush=True)
            if done[name]["said"]:
                print(done[name]["said"], flush=True)


if __name__ == "__main__":
    sys.exit(main())
