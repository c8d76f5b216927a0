"""Benchmark of grammar backends on JSON schemas: status of each schema, compile and mask times.

    python -m graft.tools.bench.grammar ../shared/data/maskbench \\
        --tokenizer ../shared/data/tokenizers/deepseek-128k.json.gz
    python -m graft.tools.bench.grammar ../shared/data/maskbench --statuses statuses.jsonl

The input is a folder of JSON schemas, each with instances that are labelled valid or invalid. A
subject is an implementation of constrained decoding that the benchmark evaluates. The subject
``graft`` is graft's LLGuidance backend, whose router rewrites each schema and which runs automata.
The other subjects are the Python APIs of LLGuidance and XGrammar. Each schema is evaluated with all
subjects before the next one. It is compiled in a child process with a time limit, so that a crash
or a hang affects only that schema.

To match an instance, the benchmark feeds the tokens of its ``json.dumps`` text to a grammar
matcher. If the text is rejected, other orders of its keys are tried, and whole numbers are written
as integers. The status of a schema is one of:

right
    All valid instances are accepted, and all invalid ones are rejected.
narrowed
    As "right", except that graft's router has named valid values that are never generated
    (`Route.narrowed`), and a valid instance is rejected.
refused
    The schema does not compile.
wrong
    An invalid instance is accepted, or a valid one is rejected. With ``--strict``, graft may reject
    instances that jsonschema rejects for the schema without additional properties.
untested
    The schema compiles and has no instances.
time, crash
    The child process exceeded the time limit or died.

With ``--statuses``, the benchmark evaluates graft only and measures no times. Without it, the
benchmark measures a random sample of the schemas with instances. Times are processor times. The
table of times contains the schemas that all subjects compile.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib.util
import json
import os
import platform
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from tqdm import tqdm

from graft.native.children.errors import ChildLost, ChildTimeout, Refusal
from graft.native.children.process import Call, ChildProcess, Setup
from graft.tools.bench.grammar_child import SUBJECTS
from graft.tools.bench.grammar_data import load_tokenizer, read_schemas
from graft.tools.bench.harness import finish, make_parser, number_from
from graft.tools.console import program, table

#: Memory limit of a child process in bytes.
MEMORY_BYTES = 16 << 30
CHILD_MODULE = "graft.tools.bench.grammar_child"
STATUSES = ("right", "narrowed", "refused", "wrong", "untested", "time", "crash")
#: Number of schemas whose times are measured by default.
DEFAULT_SAMPLE = 200
#: Keys of an answer that ``--statuses`` writes.
_STATUS_KEYS = ("status", "cause", "reordered", "table_bytes", "table_cause")


class Subject:
    """Child process that evaluates schemas with one implementation.

    `name` is a key of `SUBJECTS`. Without a tokenizer, tokens are single bytes. `options` are those
    of `grammar_child.Graft`. If the process dies, the next call of `evaluate` restarts it.
    """

    def __init__(
        self,
        name: str,
        tokenizer: Path | None = None,
        stop_token: str | None = None,
        options: dict[str, Any] | None = None,
    ):
        self._child = ChildProcess(MEMORY_BYTES)
        path = None if tokenizer is None else str(tokenizer)
        self._setup = Setup(
            name, f"{CHILD_MODULE}:prepare", (name, path, stop_token, options or {})
        )
        self._child.call(Call("builtins:bool", (), self._setup))

    def evaluate(self, row: dict[str, Any], timeout_s: float, timed: bool = True) -> dict[str, Any]:
        """Evaluate a row (a schema with its instances) in the child process.

        Return the result of `grammar_child.evaluate_schema`. If the process exceeded the time limit
        or died, the result has only ``status``, which is "time" or "crash", and ``cause``.
        """
        task = {key: row[key] for key in ("schema", "valid", "invalid")}
        try:
            call = Call(f"{CHILD_MODULE}:answer", (task, timed), self._setup)
            answer: dict[str, Any] = self._child.call(call, timeout_s)
            return answer
        except (Refusal, ChildLost) as error:
            status = "time" if isinstance(error, ChildTimeout) else "crash"
            return {"status": status, "cause": str(error)[:300]}

    def close(self) -> None:
        """Terminate the child process."""
        self._child.close()


# Statistics ---------------------------------------------------------------------------------------


def statistics(values: Sequence[float]) -> dict[str, float]:
    """Return mean, median and p99, or an empty dict if there are no values."""
    if not len(values):
        return {}
    p50, p99 = np.quantile(values, (0.5, 0.99))
    found = {"mean": float(np.mean(values)), "p50": float(p50), "p99": float(p99)}
    return {name: round(value, 4) for name, value in found.items()}


def _keyword(cause: str) -> str:
    """Return the keyword in a reason of graft's router, or the beginning of another message."""
    reason = cause.removeprefix("JSON schema: ").removeprefix("cannot be enforced: ")
    words = reason.replace(":", " ").split()
    return words[1] if words and words[0].startswith("#") and len(words) > 1 else reason[:60]


def status_summary(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Summarize statuses: numbers of schemas by status and by cause, and numbers of automata."""
    counts = collections.Counter(answer["status"] for answer in answers)
    result: dict[str, Any] = {"schemas": len(answers)}
    result |= {status: counts[status] for status in STATUSES}
    result["reordered"] = sum(answer.get("reordered", False) for answer in answers)
    refused = [answer["cause"] for answer in answers if answer["status"] == "refused"]
    result["refused_for"] = dict(collections.Counter(map(_keyword, refused)).most_common())
    sizes = [answer["table_bytes"] for answer in answers if answer.get("table_bytes") is not None]
    result["tables"] = len(sizes)
    result["table_bytes"] = statistics(sizes)
    no_table = [answer["table_cause"][:60] for answer in answers if answer.get("table_cause")]
    result["no_table_for"] = dict(collections.Counter(no_table).most_common())
    return result


def time_summary(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Summarize the times and the memory of compiled schemas."""
    result: dict[str, Any] = {"schemas": len(answers)}
    for name in ("first_us", "later_us"):
        result[name] = statistics([us for answer in answers for us in answer[name]])
    for name in ("compile_ms", "kilobytes"):
        result[name] = statistics([answer[name] for answer in answers])
    return result


def compared_times(answers: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Summarize the times of the schemas that all subjects compile.

    If graft is a subject, the schemas with an automaton are summarized, too.
    """
    compiled = [row for row in zip(*answers.values(), strict=True) if _all_compiled(row)]
    groups = {"all": compiled}
    if "graft" in answers:
        place = list(answers).index("graft")
        with_table = [row for row in compiled if row[place]["table_bytes"] is not None]
        groups["with an automaton"] = with_table
    return {
        group: {
            name: time_summary([row[place] for row in rows]) for place, name in enumerate(answers)
        }
        for group, rows in groups.items()
    }


def _all_compiled(answers: Sequence[dict[str, Any]]) -> bool:
    return all(answer["status"] not in ("refused", "time", "crash") for answer in answers)


def status_table(summaries: dict[str, dict[str, Any]]) -> str:
    """Return a table with one line per subject: percentages of statuses, and of automata."""
    rows = [["subject", "schemas", *STATUSES, "automaton"]]
    for name, found in summaries.items():
        total = max(1, found["schemas"])
        shares = [f"{100 * found[key] / total:.1f} %" for key in (*STATUSES, "tables")]
        rows.append([name, str(found["schemas"]), *shares])
    return table(rows)


def time_table(times: dict[str, Any]) -> str:
    """Return a table of the result of `compared_times`."""
    rows = [["schemas", "subject", "first mask us", "later mask us", "compile ms", "kB"]]
    for group, subjects in times.items():
        for name, found in subjects.items():
            cells = [
                "/".join(f"{value:.3g}" for value in found[key].values()) or "-"
                for key in ("first_us", "later_us", "compile_ms", "kilobytes")
            ]
            rows.append([f"{found['schemas']} {group}", name, *cells])
    return table(rows, left=2) + "\n(mean/p50/p99; us, ms: processor time)"


# Program ------------------------------------------------------------------------------------------


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser("graft.tools.bench.grammar", __doc__)
    parser.add_argument("folder", type=Path, help="folder with .jsonl(.gz) files, or such a file")
    parser.add_argument(
        "--tokenizer", type=Path, help="tokenizer.json(.gz); optional with --statuses"
    )
    parser.add_argument("--stop-token", help="end token (default: detected by its name)")
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument(
        "--statuses",
        type=Path,
        metavar="FILE",
        help="write the status of every schema with graft to a .jsonl file, and measure no times",
    )
    parser.add_argument(
        "--schemas",
        type=number_from(1),
        help=f"use a random sample of this size (default: {DEFAULT_SAMPLE}; all with --statuses)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample (default 0)")
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds per schema")
    parser.add_argument("--strict", action="store_true", help="option strict=True of graft")
    parser.add_argument(
        "--key-order", default="schema", choices=("schema", "any"), help="option key_order of graft"
    )
    options = parser.parse_args(arguments)
    if options.statuses is None and options.tokenizer is None:
        parser.error("--tokenizer is required without --statuses")
    return options


def _usable_subjects(names: Sequence[str]) -> list[str]:
    """Return the subjects whose package is installed, and report the others."""
    usable = []
    for name in names:
        if name == "graft" or importlib.util.find_spec(name) is not None:
            usable.append(name)
        else:
            print(f"{name} is not installed: skipped", file=sys.stderr)
    return usable


def run(
    rows: Sequence[dict[str, Any]],
    subjects: dict[str, Subject],
    timeout_s: float,
    statuses: TextIO | None,
) -> dict[str, list[dict[str, Any]]]:
    """Evaluate all schemas with all subjects, and terminate the subjects' child processes.

    `timeout_s` is the time limit of an evaluation. If `statuses` is None, times are measured.
    Otherwise, a line with the status of each schema is written to it. Return a map from the name of
    each subject to its results, in the order of the rows.
    """
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in subjects}
    try:
        for row in tqdm(rows, unit="schema", disable=None):
            for name, subject in subjects.items():
                answer = subject.evaluate(row, timeout_s, statuses is None)
                answers[name].append(answer)
                if statuses is not None:
                    line = {"id": row["id"], **{key: answer.get(key) for key in _STATUS_KEYS}}
                    statuses.write(json.dumps(line) + "\n")
                    statuses.flush()
    finally:
        for subject in subjects.values():
            subject.close()
    return answers


@program
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    options = parse_options(arguments)
    timed = options.statuses is None
    rows = read_schemas(options.folder)
    names = ["graft"]
    count = options.schemas or len(rows)
    if timed:
        rows = [row for row in rows if row["valid"] or row["invalid"]]
        names = _usable_subjects(options.subjects)
        count = options.schemas or DEFAULT_SAMPLE
    if count < len(rows):
        rows = random.Random(options.seed).sample(rows, count)
    if options.tokenizer is not None:
        # Load the tokenizer here too, so that an unusable file is reported before a child starts.
        load_tokenizer(options.tokenizer, options.stop_token)
    choices = {"strict": options.strict, "key_order": options.key_order}
    subjects = {
        name: Subject(name, options.tokenizer, options.stop_token, choices) for name in names
    }
    with contextlib.ExitStack() as stack:
        file = None
        if not timed:
            options.statuses.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(options.statuses.open("w", encoding="utf-8"))
        answers = run(rows, subjects, options.timeout, file)
    statuses = {name: status_summary(found) for name, found in answers.items()}
    results: dict[str, Any] = {
        "hardware": f"{os.cpu_count()} CPU cores, {platform.machine()}, no GPU involved",
        "folder": options.folder.name,
        "tokenizer": options.tokenizer and options.tokenizer.name,
        "seed": options.seed,
        **choices,
        "load": os.getloadavg(),
        "statuses": statuses,
    }
    report = status_table(statuses)
    if timed:
        results["times"] = compared_times(answers)
        report += "\n\n" + time_table(results["times"])
    finish(options, results, report)


if __name__ == "__main__":
    sys.exit(main())
