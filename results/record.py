"""Run a benchmark and record its results in the folder of graft's version.

    python results/record.py acceptance|acceptance_smollm|memory|callbacks|grammar_overhead

Each file has the commit, the machine, the date and the command next to the results. A benchmark of
times runs only if the machine's load average is below 3. If other processes use more than a tenth
of the processors' time during the benchmark, no file is written.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from graft.tools.version import version

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "results" / version()
MAX_LOAD = 3.0
MAX_OTHER_SHARE = 0.1

#: Options of the benchmark, by the name of the recorded file.
COMMANDS = {
    "acceptance": "bench.speculation --tasks 40 --drafters eagle dflash ngram suffix forced"
    " --lengths 1 2 3 4 6 --trees --masking auto --batches 8 --max-tokens 128",
    "acceptance_smollm": "bench.speculation --llm --drafters models/smollm ngram --lengths 3"
    " --trees --masking auto --batches 10 --max-tokens 64",
    "memory": "bench.memory --requests 10000 --samples 40",
    "callbacks": "labs.callback_latency --samples 1000",
    "grammar_overhead": "bench.grammar_overhead --batches 1 4 8 64 --pairs 100",
}
#: Recorded files that contain times.
TIMED = ("callbacks", "grammar_overhead")
#: Results of a configuration of the speculation benchmark that do not depend on times.
COUNTS = (
    *("drafter", "masking", "length", "verify", "temperature", "batch", "tokens", "rounds"),
    *("outputs", "same_outputs", "acceptance_length", "tokens_per_round", "tested", "accepted"),
)


def keep_counts(results: dict[str, Any]) -> dict[str, Any]:
    """Return the results of the speculation benchmark without its times."""
    configurations = []
    for one in results["configurations"]:
        kinds = {}
        for kind, estimates in one["kinds"].items():
            kinds[kind] = estimates["acceptance_length"]["mean"]
        counts = {name: one[name] for name in COUNTS}
        configurations.append(counts | {"acceptance_length_by_kind": kinds})
    kept = {name: results[name] for name in ("device", "prompts", "max_tokens", "refused")}
    return kept | {"configurations": configurations}


FILTERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "acceptance": keep_counts,
    "acceptance_smollm": keep_counts,
}


def describe_machine() -> str:
    """Return the processor's name and the number of cores that this process may use."""
    names = []
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            names.append(line.partition(":")[2].strip())
    processor = names[0] if names else platform.machine()
    return f"{len(os.sched_getaffinity(0))} cores of {processor}, {platform.system()}"


def current_commit() -> str:
    """Return the commit of the working tree. It ends with "-dirty" if files were changed."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True)
    return done.stdout.strip()


def busy_seconds() -> float:
    """Return the time that all processes together have used the processors since the start."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()
    user, nice, system, _, _, irq, soft_irq, steal = map(int, fields[1:9])
    ticks = user + nice + system + irq + soft_irq + steal
    return ticks / os.sysconf("SC_CLK_TCK")


def run_benchmark(command: Sequence[str]) -> float:
    """Run a command. Return the share of the processors' time that other processes used."""
    before = time.monotonic(), busy_seconds(), os.times()
    subprocess.run(command, cwd=ROOT, check=True)
    wall = time.monotonic() - before[0]
    busy = busy_seconds() - before[1]
    times = os.times()
    own = times.children_user - before[2].children_user
    own += times.children_system - before[2].children_system
    return (busy - own) / (wall * (os.cpu_count() or 1))


def write(name: str, results: dict[str, Any], commit: str) -> Path:
    """Write the file of a recording and return its path."""
    record = {
        "commit": commit,
        "machine": describe_machine(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": f"python -m graft.tools.{COMMANDS[name]}",
        **FILTERS.get(name, lambda results: results)(results),
    }
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.json"
    path.write_text(format_json(record) + "\n", encoding="utf-8")
    return path


def format_json(value: Any, indent: str = "") -> str:
    """Format a value as JSON. Values that fit on a line of 100 characters take one line."""
    text = json.dumps(value, ensure_ascii=False)
    if len(indent + text) <= 100 or not isinstance(value, (dict, list)) or not value:
        return text
    inner = indent + " "
    if isinstance(value, dict):
        lines = [f"{json.dumps(key)}: {format_json(item, inner)}" for key, item in value.items()]
        return "{\n" + ",\n".join(inner + line for line in lines) + f"\n{indent}}}"
    lines = [format_json(item, inner) for item in value]
    return "[\n" + ",\n".join(inner + line for line in lines) + f"\n{indent}]"


def main() -> None:
    """Run a benchmark and write its file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("name", choices=COMMANDS)
    name = parser.parse_args().name
    load = os.getloadavg()[0]
    if name in TIMED and load >= MAX_LOAD:
        parser.error(f"{name} contains times, and the load average is {load:.1f}, not below 3")
    commit = current_commit()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "results.json"
        command = [sys.executable, "-m", *shlex.split(f"graft.tools.{COMMANDS[name]}")]
        other_share = run_benchmark([*command, "--json", str(output)])
        results = json.loads(output.read_text(encoding="utf-8"))
    if name in TIMED:
        if other_share > MAX_OTHER_SHARE:
            sys.exit(
                f"not recorded: other processes used {other_share:.0%} of the processors' time"
            )
        results = {"other_processes_cpu_share": round(other_share, 3)} | results
    print(f"wrote {write(name, results, commit)}")


if __name__ == "__main__":
    main()
