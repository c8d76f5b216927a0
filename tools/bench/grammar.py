"""Grammar backends on a folder of JSON schemas: what they compile, accept, reject, and how fast.

Every schema comes with instances labelled valid and invalid. A schema is *right* if it compiles,
every valid instance is accepted and every invalid one rejected; only schemas with instances count.
``auto`` is graft's router; the others are the stock Python APIs in the same run. Each schema is
tried in a child process under a time limit, so that a crash or a runaway costs one row. Usage::

    python -m graft.tools.bench.grammar ../shared/data/maskbench \\
        --tokenizer ../shared/data/tokenizers/deepseek-128k.json.gz --every 10

An instance is fed as ``json.dumps`` writes it, with the keys in the order of the data. A schema is
*missed* if only valid instances are not accepted, *wrong* if an invalid one is, and *marked* if the
route had said so beforehand (`Route.narrowed`, `Route.spelling`) or takes the schema loosely.
"""

from __future__ import annotations

import argparse
import collections
import json
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
from graft.tools.bench.data import add_arguments, load_tokenizer, rows_of
from graft.tools.bench.grammar_child import SUBJECTS
from graft.tools.report import program, table

QUANTILES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
MEMORY_BYTES = 16 << 30
HERE = "graft.tools.bench.grammar_child"


class Subject:
    """One subject's process, started again after each death.

    Raises
    ------
    Refusal, ChildLost
        The process does not start, or cannot prepare the subject.
    """

    def __init__(
        self, name: str, tokenizer: Path, stop: str | None = None, key_order: str = "schema"
    ):
        self._child = ChildProcess(MEMORY_BYTES)
        self._setup = Setup(name, f"{HERE}:prepare", (name, str(tokenizer), stop, key_order))
        self._child.call(Call("builtins:bool", (), self._setup))

    def ask(self, row: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """One row's answer; ``outcome`` is "timeout" or "crash" if there is none."""
        try:
            answer: dict[str, Any] = self._child.call(
                Call(f"{HERE}:answer", (row,), self._setup), timeout_s
            )
            return answer
        except (Refusal, ChildLost) as error:
            how = "timeout" if isinstance(error, ChildTimeout) else "crash"
            return {"outcome": how, "why": str(error)[:300]}

    def close(self) -> None:
        """End the process."""
        self._child.close()


VERDICTS = ("right", "marked", "refused", "missed", "wrong", "timeout", "crash")


def verdict(answer: dict[str, Any]) -> str:
    """One of `VERDICTS`."""
    if answer["outcome"] != "compiled":
        return str(answer["outcome"])
    if answer["marked"]:
        return "marked"
    if any(answer["invalid"]):
        return "wrong"
    missed = answer["valid"].count(False)
    if not missed:
        return "right"
    return "marked" if answer.get("narrowed") == missed else "missed"


def summary(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts, shares and quantiles of one subject."""
    verdicts = collections.Counter(map(verdict, answers))
    compiled = [answer for answer in answers if answer["outcome"] == "compiled"]
    plain = [answer for answer in compiled if not answer["marked"]]
    causes = collections.Counter(
        answer.get("keyword") or answer["why"][:60]
        for answer in answers
        if verdict(answer) in ("refused", "marked")
    )
    fills = [np.asarray(a["fill_ns"], float) for a in compiled]
    return {
        "schemas": len(answers),
        "compiled": len(compiled),
        **{name: verdicts[name] for name in VERDICTS},
        "right_percent": round(100 * verdicts["right"] / max(1, len(answers)), 2),
        **{
            f"{kind}_accepted": sum(a[kind].count(True) for a in plain)
            for kind in ("valid", "invalid")
        },
        **{kind: sum(len(a[kind]) for a in plain) for kind in ("valid", "invalid")},
        "compile_ms": quantiles(np.asarray([a["compile_s"] for a in compiled]) * 1e3),
        "fill_us": quantiles(np.concatenate([*fills, np.zeros(0)]) / 1e3),
        "fills": sum(map(len, fills)),
        "causes": dict(causes.most_common()),
    }


def quantiles(values: np.ndarray) -> dict[str, float]:
    """Median, p99, p99.9 and maximum; empty without values."""
    if not len(values):
        return {}
    return {name: round(float(np.quantile(values, q)), 4) for name, q in QUANTILES.items()}


def summary_table(summaries: dict[str, dict[str, Any]]) -> str:
    """A line a subject."""
    lines = [
        [
            "subject",
            *VERDICTS,
            "valid taken",
            "invalid taken",
            "compile ms p50/p99/p99.9/max",
            "fill us p50/p99/p99.9/max",
        ]
    ]
    for name, s in summaries.items():
        times = [
            "/".join(f"{s[kind][q]:.3g}" for q in QUANTILES) if s[kind] else "-"
            for kind in ("compile_ms", "fill_us")
        ]
        lines.append(
            [
                name,
                f"{s['right_percent']:.2f} %",
                *(str(s[v]) for v in VERDICTS[1:]),
                f"{s['valid_accepted']}/{s['valid']}",
                f"{s['invalid_accepted']}/{s['invalid']}",
                *times,
            ]
        )
    return table(lines)


def run(
    rows: Sequence[dict[str, Any]], subjects: dict[str, Subject], timeout_s: float
) -> dict[str, list[dict[str, Any]]]:
    """Every subject's answers, in the order of the rows; subjects take turns on each schema."""
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in subjects}
    try:
        for row in tqdm(rows, unit="schema", disable=not sys.stderr.isatty()):
            task = {key: row[key] for key in ("schema", "valid", "invalid")}
            for name, subject in subjects.items():
                answers[name].append(subject.ask(task, timeout_s))
    finally:
        for subject in subjects.values():
            subject.close()
    return answers


@program
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m graft.tools.bench.grammar", description=(__doc__ or "").split("\n\n")[0]
    )
    add_arguments(parser)
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--every", type=int, default=1, help="every k-th schema of each file")
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds for one schema")
    parser.add_argument("--key-order", default="schema", choices=("schema", "any"), help="of auto")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args(arguments)
    rows = list(rows_of(options.folder, options.every))
    load_tokenizer(options.tokenizer, options.stop_token)  # refused before anything starts
    subjects = {
        name: Subject(name, options.tokenizer, options.stop_token, options.key_order)
        for name in options.subjects
    }
    answers = run(rows, subjects, options.timeout)
    summaries = {name: summary(found) for name, found in answers.items()}
    print(summary_table(summaries))
    if options.json:
        not_right = [
            {
                "id": row["id"],
                "verdict": verdict(a),
                "keyword": a.get("keyword", ""),
                "why": a["why"][:160],
            }
            for row, a in zip(rows, answers.get("auto", ()), strict=False)
            if verdict(a) != "right"
        ]
        report = {
            "hardware": f"{os.cpu_count()} CPU cores, {platform.machine()}, no GPU involved",
            "folder": options.folder.name,
            "tokenizer": options.tokenizer.name,
            "schemas": len(rows),
            "every": options.every,
            "key_order": options.key_order,
            "load": os.getloadavg(),
            "subjects": summaries,
            "not_right": not_right,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
