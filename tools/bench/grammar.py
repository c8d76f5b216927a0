"""Benchmark of grammar backends on JSON schemas: coverage, correctness, compile and mask times.

    python -m graft.tools.bench.grammar ../shared/data/maskbench \\
        --tokenizer ../shared/data/tokenizers/deepseek-128k.json.gz --every 10

The input is a folder of JSON schemas, each with instances that are labelled valid or invalid. A
subject is an implementation of constrained decoding that the benchmark evaluates. The subject
``auto`` is graft, whose router rewrites each schema into a form that LLGuidance enforces. The other
subjects are the Python APIs of LLGuidance and XGrammar. Each schema is evaluated with all subjects
before the next one. It is compiled in a child process with a time limit, so that a crash or a hang
affects only that schema.

To match an instance, the benchmark feeds the tokens of its ``json.dumps`` text to a grammar
matcher. The keys have the order of the input file. The verdict on a schema is one of:

correct
    All valid instances are accepted, and all invalid ones are rejected.
flagged
    Some results are wrong, but graft's router declared this in advance. There are two cases. The
    router declared that the grammar does not enforce all of the schema. Or no invalid instance is
    accepted, and `Route.narrowed` or `Route.spelling` declares that the rejected valid ones are
    excluded.
refused
    The schema does not compile.
overconstrained
    A valid instance is rejected.
underconstrained
    An invalid instance is accepted.
timeout, crash
    The child process exceeded the time limit or died.
"""

from __future__ import annotations

import argparse
import collections
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from graft.native.children.errors import ChildLost, ChildTimeout, Refusal
from graft.native.children.process import Call, ChildProcess, Setup
from graft.tools.bench.grammar_child import SUBJECTS
from graft.tools.bench.grammar_data import load_tokenizer, read_schemas
from graft.tools.bench.harness import finish, make_parser, number_from
from graft.tools.console import program, table

QUANTILES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
#: Memory limit of a child process in bytes.
MEMORY_BYTES = 16 << 30
CHILD_MODULE = "graft.tools.bench.grammar_child"
VERDICTS = (
    "correct",
    "flagged",
    "refused",
    "overconstrained",
    "underconstrained",
    "timeout",
    "crash",
)


class Subject:
    """Child process that evaluates schemas with one implementation.

    `name` is a key of `SUBJECTS`. If the process dies, the next call of `evaluate` restarts it.
    """

    def __init__(
        self, name: str, tokenizer: Path, stop_token: str | None = None, key_order: str = "schema"
    ):
        self._child = ChildProcess(MEMORY_BYTES)
        arguments = (name, str(tokenizer), stop_token, key_order)
        self._setup = Setup(name, f"{CHILD_MODULE}:prepare", arguments)
        self._child.call(Call("builtins:bool", (), self._setup))

    def evaluate(self, row: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Evaluate a row (a schema with its instances) in the child process.

        Return the result of `grammar_child.evaluate_schema`. If the process exceeded the time limit
        or died, the result has only ``outcome``, which is "timeout" or "crash", and ``why``.
        """
        call = Call(f"{CHILD_MODULE}:answer", (row,), self._setup)
        try:
            answer: dict[str, Any] = self._child.call(call, timeout_s)
            return answer
        except (Refusal, ChildLost) as error:
            outcome = "timeout" if isinstance(error, ChildTimeout) else "crash"
            return {"outcome": outcome, "why": str(error)[:300]}

    def close(self) -> None:
        """Terminate the child process."""
        self._child.close()


# Statistics ---------------------------------------------------------------------------------------


def verdict(answer: dict[str, Any]) -> str:
    """Return the verdict on a schema (one of `VERDICTS`).

    `answer` is what `Subject.evaluate` returned for the schema and its instances.
    """
    if answer["outcome"] != "compiled":
        return str(answer["outcome"])
    if answer["partial"]:
        return "flagged"
    if any(answer["invalid"]):
        return "underconstrained"
    rejected = answer["valid"].count(False)
    if not rejected:
        return "correct"
    return "flagged" if answer.get("declared") == rejected else "overconstrained"


def quantiles(values: np.ndarray) -> dict[str, float]:
    """Return median, p99, p99.9 and maximum, or an empty dict if there are no values."""
    if not len(values):
        return {}
    found = {}
    for name, q in QUANTILES.items():
        value = float(np.quantile(values, q))
        found[name] = round(value, 4)
    return found


def summary(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Summarize one subject's results: counts of verdicts and instances, quantiles of times.

    The counts of instances exclude schemas of which the grammar enforces only a part.
    """
    verdicts = collections.Counter(map(verdict, answers))
    compiled = [answer for answer in answers if answer["outcome"] == "compiled"]
    exact = [answer for answer in compiled if not answer["partial"]]
    causes = collections.Counter(
        answer.get("keyword") or answer["why"][:60]
        for answer in answers
        if verdict(answer) in ("refused", "flagged")
    )
    result: dict[str, Any] = {"schemas": len(answers), "compiled": len(compiled)}
    for name in VERDICTS:
        result[name] = verdicts[name]
    correct_percent = 100 * verdicts["correct"] / max(1, len(answers))
    result["correct_percent"] = round(correct_percent, 2)
    for label in ("valid", "invalid"):
        result[f"{label}_accepted"] = sum(answer[label].count(True) for answer in exact)
        result[label] = sum(len(answer[label]) for answer in exact)
    fills = [np.asarray(answer["fill_ns"], float) for answer in compiled]
    compile_s = np.asarray([answer["compile_s"] for answer in compiled])
    result["compile_ms"] = quantiles(compile_s * 1e3)
    result["fill_us"] = quantiles(np.concatenate([*fills, np.zeros(0)]) / 1e3)
    result["fills"] = sum(map(len, fills))
    result["causes"] = dict(causes.most_common())
    return result


def _format_quantiles(values: dict[str, float]) -> str:
    """Return quantiles separated by slashes, or a dash if there are none."""
    if not values:
        return "-"
    return "/".join(f"{values[name]:.3g}" for name in QUANTILES)


def summary_table(summaries: dict[str, dict[str, Any]]) -> str:
    """Return a table with one line per subject (evaluated implementation)."""
    heading = (
        "valid accepted|invalid accepted|compile ms p50/p99/p99.9/max|fill us p50/p99/p99.9/max"
    )
    rows = [["subject", *VERDICTS, *heading.split("|")]]
    for name, figures in summaries.items():
        times = [_format_quantiles(figures[key]) for key in ("compile_ms", "fill_us")]
        rows.append(
            [
                name,
                f"{figures['correct_percent']:.2f} %",
                *(str(figures[verdict]) for verdict in VERDICTS[1:]),
                f"{figures['valid_accepted']}/{figures['valid']}",
                f"{figures['invalid_accepted']}/{figures['invalid']}",
                *times,
            ]
        )
    return table(rows)


# Program ------------------------------------------------------------------------------------------


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser("graft.tools.bench.grammar", __doc__)
    parser.add_argument("folder", type=Path, help="folder with .jsonl or .jsonl.gz files")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json(.gz)")
    parser.add_argument("--stop-token", help="end token (default: detected by its name)")
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument(
        "--every", type=number_from(1), default=1, help="use every N-th schema of each file"
    )
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds per schema")
    parser.add_argument(
        "--key-order", default="schema", choices=("schema", "any"), help="key order of auto"
    )
    return parser.parse_args(arguments)


def run(
    rows: Sequence[dict[str, Any]], subjects: dict[str, Subject], timeout_s: float
) -> dict[str, list[dict[str, Any]]]:
    """Evaluate all schemas with all subjects, and terminate the subjects' child processes.

    `timeout_s` is the time limit of an evaluation. Return a map from the name of each subject to
    its results, in the order of the rows.
    """
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in subjects}
    try:
        for row in tqdm(rows, unit="schema", disable=None):
            task = {key: row[key] for key in ("schema", "valid", "invalid")}
            for name, subject in subjects.items():
                answers[name].append(subject.evaluate(task, timeout_s))
    finally:
        for subject in subjects.values():
            subject.close()
    return answers


def make_report(
    options: argparse.Namespace,
    rows: Sequence[dict[str, Any]],
    answers: dict[str, list[dict[str, Any]]],
) -> dict[str, Any]:
    """Return the content of the JSON file. `answers` is the result of `run`."""
    incorrect = []
    for row, answer in zip(rows, answers.get("auto", ()), strict=False):
        if verdict(answer) != "correct":
            incorrect.append(
                {
                    "id": row["id"],
                    "verdict": verdict(answer),
                    "keyword": answer.get("keyword", ""),
                    "why": answer["why"][:160],
                }
            )
    return {
        "hardware": f"{os.cpu_count()} CPU cores, {platform.machine()}, no GPU involved",
        "folder": options.folder.name,
        "tokenizer": options.tokenizer.name,
        "schemas": len(rows),
        "every": options.every,
        "key_order": options.key_order,
        "load": os.getloadavg(),
        "subjects": {name: summary(found) for name, found in answers.items()},
        "incorrect": incorrect,
    }


@program
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    options = parse_options(arguments)
    rows = list(read_schemas(options.folder, options.every))
    # Load the tokenizer here too, so that an unusable file is reported before a child starts.
    load_tokenizer(options.tokenizer, options.stop_token)
    subjects = {
        name: Subject(name, options.tokenizer, options.stop_token, options.key_order)
        for name in options.subjects
    }
    answers = run(rows, subjects, options.timeout)
    report = make_report(options, rows, answers)
    finish(options, report, summary_table(report["subjects"]))


if __name__ == "__main__":
    sys.exit(main())
