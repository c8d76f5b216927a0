"""What the soft device does of the driver's interface: every function, called rightly and wrongly.

Each function is really called: with right arguments, with one wrong argument at a time, before
cuInit, without a context, inside a host function, while a stream captures and after a fault, each
state in a process of its own. What it must answer is written down in ``conformance_calls.py`` from
the driver's documentation. Usage::

    python -m graft.tools.conformance [--json FILE] [--markdown FILE]

The exit status is 0 when every answer is the expected one. What the functions do when they succeed
is the matter of the tests called test_softcuda_*.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from graft.native.softcuda.compile import compile_cpu
from graft.tools.conformance_calls import calls
from graft.tools.conformance_child import STATES, TEXT

__all__ = ["Answer", "collect", "exported", "main", "to_markdown"]

LIMIT_S = 300
TABLE = Path(__file__).resolve().parent.parent / "native" / "softcuda" / "src" / "api_table.cpp"


@dataclass(frozen=True)
class Answer:
    """One call and its answer; codes without their prefix."""

    function: str
    state: str
    behaviour: str
    expected: str
    got: str

    @property
    def right(self) -> bool:
        """Is it the expected answer?"""
        return self.expected == self.got


def exported() -> list[str]:
    """Return the names that the soft device's cuGetProcAddress knows, from its source.

    Raises
    ------
    FileNotFoundError
        The source is not there: graft was installed without it.
    """
    return sorted(set(re.findall(r'\{"(cu\w+)", \d+, ', TABLE.read_text())))


def collect(states: Iterable[str] = tuple(STATES)) -> list[Answer]:
    """Call everything in every state, each in a child process."""
    answers = []
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SOFTCUDA_")}
    with tempfile.TemporaryDirectory() as folder:
        image = Path(folder) / "image"
        image.write_bytes(compile_cpu(TEXT, "conformance.cu", cache_dir=Path(folder)))
        for state in tqdm(list(states), desc="states", disable=None):
            command = [sys.executable, "-m", "graft.tools.conformance_child", state, str(image)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S,
                                  env=environment | {"GRAFT_DEVICE": "soft"}, check=False)
            if done.returncode != 0:
                raise RuntimeError(f"state {state!r} ended with {done.returncode}\n{done.stderr}")
            answers += [Answer(name, state, *rest) for name, *rest in json.loads(done.stdout)]
    return answers


def by_function(answers: Sequence[Answer]) -> dict[str, list[Answer]]:
    """Answers of implemented functions, in the order of the table."""
    found: dict[str, list[Answer]] = {call.name: [] for call in calls()}
    for answer in answers:
        if answer.state != "absent":
            found[answer.function].append(answer)
    return found


def summary(answers: Sequence[Answer]) -> dict[str, int]:
    """Figures for the head of the table."""
    functions = by_function(answers)
    return {
        "functions": len({name.split("@")[0] for name in functions}),
        "forms": len(functions),
        "calls": sum(len(own) for own in functions.values()),
        "refused": sum(a.behaviour == "right arguments" and a.expected != "SUCCESS"
                       for a in answers),
        "absent": sum(a.state == "absent" for a in answers),
        "wrong": sum(not a.right for a in answers),
    }  # fmt: skip


def wrong_arguments(own: Sequence[Answer]) -> str:
    """What wrong arguments were answered with, by code."""
    codes: dict[str, list[str]] = defaultdict(list)
    for answer in own:
        if answer.state == "arguments" and answer.behaviour != "right arguments":
            codes[answer.got].append(answer.behaviour.replace("(argument ", "("))
    return "; ".join(f"{code}: {', '.join(what)}" for code, what in codes.items())


def states(own: Sequence[Answer]) -> str:
    """Codes of the other states."""
    return ", ".join(a.got for a in own if a.state != "arguments" and a.behaviour[:3] != "and")


def to_markdown(answers: Sequence[Answer]) -> str:
    """Return the table as a page."""
    s = summary(answers)
    lines = [
        "# Conformance of the soft device",
        "",
        "Made by `python -m graft.tools.conformance`: every line was called. "
        f"{s['functions']} functions in {s['forms']} forms, {s['calls']} calls, "
        f"{s['wrong']} answers other than documented; {s['refused']} functions exist and refuse; "
        f"{s['absent']} functions of the bindings are absent, which `cuGetProcAddress` says. "
        "`name@version` is an older form.",
        "",
        "| function | right arguments | wrong arguments (which) | other states |",
        "|---|---|---|---|",
    ]
    for name, own in by_function(answers).items():
        right = next(a.got for a in own if a.behaviour == "right arguments")
        lines.append(f"| {name} | {right} | {wrong_arguments(own)} | {states(own)} |")
    lines += [
        "",
        "Other states, in this order where they apply: before cuInit, no current context, in a "
        "host function, while a stream captures, after a fault.",
        "",
        "## Absent",
        "",
        ", ".join(a.function for a in answers if a.state == "absent"),
        "",
    ]
    return "\n".join(lines)


def print_table(answers: Sequence[Answer]) -> None:
    """Print a line per function, and what was answered wrongly."""
    print(f"{'function':40} {'right call':14} {'wrong arguments':>15} {'states':>7} {'wrong':>6}")
    for name, own in by_function(answers).items():
        right = next(a.got for a in own if a.behaviour == "right arguments")
        arguments = sum(a.state == "arguments" for a in own) - 1
        bad = sum(not a.right for a in own)
        print(f"{name:40} {right:14} {arguments:15} {len(own) - 1 - arguments:7} {bad:6}")
    for a in answers:
        if not a.right:
            print(f"{a.function}, {a.behaviour}: {a.got}, not {a.expected}")
    print(", ".join(f"{value} {key}" for key, value in summary(answers).items()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    shown = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="graft.tools.conformance", description=__doc__, formatter_class=shown
    )
    parser.add_argument("--json", type=Path, help="also write every call and answer here")
    parser.add_argument("--markdown", type=Path, help="also write the table here")
    options = parser.parse_args(arguments)
    answers = collect()
    print_table(answers)
    if options.json is not None:
        rows = [asdict(answer) for answer in answers]
        text = ",\n".join(json.dumps(row) for row in rows)
        head = json.dumps(summary(answers))
        options.json.write_text(f'{{"summary": {head},\n"calls": [\n{text}\n]}}\n')
    if options.markdown is not None:
        options.markdown.write_text(to_markdown(answers))
    return 0 if all(answer.right for answer in answers) else 1


if __name__ == "__main__":
    sys.exit(main())
