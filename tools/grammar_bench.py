"""Grammar backends on a folder of JSON schemas: what they compile, accept, reject, and how fast.

Every schema comes with instances labelled valid and invalid. A schema is *right* if it compiles,
every valid instance is accepted and every invalid one rejected; only schemas with instances count.
``auto`` is graft's router with keys in the schema's order, ``auto-any`` in any; the others are the
stock Python APIs in the same run. Each schema is tried in a child process under a time limit, so
that a crash or a runaway costs one row. Usage::

    python -m graft.tools.grammar_bench ../shared/data/maskbench \\
        --tokenizer ../shared/data/tokenizers/deepseek-128k.json.gz --every 10

An instance is fed as ``json.dumps`` writes it, with the keys in the order of the data. A valid one
that is not accepted makes the schema wrong; *marked* if the route had said so beforehand
(`Route.narrowed`, `Route.spelling`), as are schemas that are taken loosely. Of the stock APIs it is
reported beside how many fit only in another order of their keys, or with whole numbers written
without fraction.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from tqdm import tqdm

from graft.cudagraph.errors import GraftError
from graft.grammar.compile_child import receive, send
from graft.tools.grammar_bench_child import SUBJECTS
from graft.tools.grammar_bench_plot import plot

QUANTILES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
START_S = 120.0
MEMORY_BYTES = 16 << 30


def rows_of(folder: Path, every: int = 1, offset: int = 0) -> Iterator[dict[str, Any]]:
    """Every k-th schema with instances of each ``.jsonl.gz`` or ``.jsonl`` file below a folder."""
    files = sorted([*folder.rglob("*.jsonl.gz"), *folder.rglob("*.jsonl")])
    if not files:
        raise GraftError(f"grammar bench: no .jsonl or .jsonl.gz file below {folder}")
    for path in files:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
        rows = [row for row in map(json.loads, text.splitlines()) if row["valid"] or row["invalid"]]
        yield from rows[offset::every]


class Child:
    """One subject's process, restarted after each death."""

    def __init__(self, subject: str, tokenizer: Path, timeout_s: float):
        self._setup = (subject, str(tokenizer), MEMORY_BYTES)
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, row: dict[str, Any]) -> dict[str, Any]:
        """One row's answer; ``outcome`` is "timeout" or "crash" if there is none."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "graft.tools.grammar_bench_child"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
            ready = self._exchange(self._setup, START_S)
            if ready != "ready":
                raise GraftError(f"grammar bench: {self._setup[0]} does not start: {ready}")
        answer = self._exchange(row, self._timeout_s)
        return cast(dict[str, Any], answer)

    def _exchange(self, message: Any, timeout_s: float) -> Any:
        process = cast("subprocess.Popen[bytes]", self._process)
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            process.kill()

        timer = threading.Timer(timeout_s, expire)
        timer.start()
        try:
            send(cast(BinaryIO, process.stdin), message)
            return receive(cast(BinaryIO, process.stdout))
        except (EOFError, OSError):
            code = process.wait()
            self._process = None
            if expired.is_set():
                return {"outcome": "timeout", "why": f"took longer than {timeout_s:g} s"}
            return {"outcome": "crash", "why": f"the process ended with status {code}"}
        finally:
            timer.cancel()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def verdict(answer: dict[str, Any]) -> str:
    """``right``, ``marked``, ``refused``, ``spelling``, ``wrong``, ``timeout`` or ``crash``."""
    if answer["outcome"] != "compiled":
        return str(answer["outcome"])
    if answer["marked"]:
        return "marked"
    if any(answer["invalid"]):
        return "wrong"
    missed = answer["valid"].count(False)
    if not missed:
        return "right"
    if answer.get("narrowed") == missed:
        return "marked"
    return "spelling" if answer["spelling"] == missed else "wrong"


def summary(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts, shares and quantiles of one subject."""
    verdicts = collections.Counter(verdict(answer) for answer in answers)
    compiled = [answer for answer in answers if answer["outcome"] == "compiled"]
    plain = [answer for answer in compiled if not answer["marked"]]
    causes = collections.Counter(
        answer.get("keyword") or answer["why"][:60]
        for answer in answers
        if verdict(answer) in ("refused", "marked")
    )
    fills, cpu = (
        np.concatenate([np.asarray(a[name], float) for a in compiled] or [np.zeros(0)])
        for name in ("fill_ns", "fill_cpu_ns")
    )
    return {
        "schemas": len(answers),
        "compiled": len(compiled),
        **{name: verdicts[name] for name in
           ("right", "marked", "refused", "spelling", "wrong", "timeout", "crash")},
        "right_percent": round(100 * verdicts["right"] / max(1, len(answers)), 2),
        "valid_accepted": sum(a["valid"].count(True) for a in plain),
        "valid": sum(len(a["valid"]) for a in plain),
        "invalid_accepted": sum(a["invalid"].count(True) for a in plain),
        "invalid": sum(len(a["invalid"]) for a in plain),
        "compile_ms": quantiles(np.asarray([a["compile_s"] for a in compiled]) * 1e3),
        "compile_cpu_ms": quantiles(np.asarray([a["compile_cpu_s"] for a in compiled]) * 1e3),
        "fill_us": quantiles(fills / 1e3),
        "fill_cpu_us": quantiles(cpu / 1e3),
        "fills": len(fills),
        "backends": dict(collections.Counter(a["backend"] for a in plain if a["backend"])),
        "causes": dict(causes.most_common()),
    }  # fmt: skip


def quantiles(values: np.ndarray) -> dict[str, float]:
    """Median, p99, p99.9 and maximum; empty without values."""
    if not len(values):
        return {}
    return {name: round(float(np.quantile(values, q)), 4) for name, q in QUANTILES.items()}


def table(summaries: dict[str, dict[str, Any]]) -> str:
    """A plain-text table, a line a subject."""
    head = ["subject", "right", "compiled", "marked", "refused", "spelling", "wrong", "hang",
            "crash", "valid taken", "invalid taken", "compile ms p50/p99/p99.9/max", "CPU ms",
            "fill us p50/p99/p99.9/max", "CPU us"]  # fmt: skip
    lines = [head]
    for name, s in summaries.items():
        times = [
            "/".join(f"{s[kind][q]:.3g}" for q in QUANTILES) if s[kind] else "-"
            for kind in ("compile_ms", "compile_cpu_ms", "fill_us", "fill_cpu_us")
        ]
        counts = [str(s[k]) for k in ("compiled", "marked", "refused", "spelling", "wrong",
                                      "timeout", "crash")]  # fmt: skip
        lines.append([name, f"{s['right_percent']:.2f} %", *counts,
                      f"{s['valid_accepted']}/{s['valid']}",
                      f"{s['invalid_accepted']}/{s['invalid']}", *times])  # fmt: skip
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def run(
    rows: Sequence[dict[str, Any]], subjects: Sequence[str], tokenizer: Path, timeout_s: float,
    draft: int = 2020, compact: bool = False,
) -> dict[str, list[dict[str, Any]]]:  # fmt: skip
    """Every subject's answers, in the order of the rows; subjects take turns on each schema."""
    children = {name: Child(name, tokenizer, timeout_s) for name in subjects}
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in subjects}
    try:
        for row in tqdm(rows, unit="schema", disable=not sys.stderr.isatty()):
            task = {key: row[key] for key in ("schema", "valid", "invalid")}
            task |= {"draft": draft, "compact": compact}
            for name, child in children.items():
                answers[name].append(child.ask(task))
    finally:
        for child in children.values():
            child.close()
    return answers


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m graft.tools.grammar_bench",
                                   description=(__doc__ or "").split("\n\n")[0])  # fmt: skip
    made.add_argument("folder", type=Path, help="folder of .jsonl(.gz) files of schemas")
    made.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json, or its .gz")
    made.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    made.add_argument("--every", type=int, default=1, help="every k-th schema of each file")
    made.add_argument("--offset", type=int, default=0, help="first schema of each file")
    made.add_argument("--timeout", type=float, default=20.0, help="seconds for one schema")
    made.add_argument("--draft", type=int, default=2020, choices=(3, 4, 6, 7, 2019, 2020),
                      help="draft of schemas that name none")  # fmt: skip
    made.add_argument("--compact", action="store_true",
                      help="instances without spaces, grammars that take any white space")
    made.add_argument("--json", type=Path, help="write the results here")
    made.add_argument("--svg", type=Path, help="draw the times here")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; refusals are one line on stderr and exit status 2."""
    options = parser().parse_args(arguments)
    try:
        rows = list(rows_of(options.folder, options.every, options.offset))
        with tempfile.TemporaryDirectory() as folder:
            tokenizer = options.tokenizer
            if tokenizer.suffix == ".gz":
                tokenizer = Path(folder) / "tokenizer.json"
                tokenizer.write_bytes(gzip.decompress(options.tokenizer.read_bytes()))
            answers = run(rows, options.subjects, tokenizer, options.timeout, options.draft,
                          options.compact)  # fmt: skip
    except (GraftError, OSError) as error:
        print(f"graft: {error}", file=sys.stderr)
        return 2
    summaries = {name: summary(found) for name, found in answers.items()}
    print(table(summaries))
    if options.svg:
        options.svg.write_text(plot(answers), encoding="utf-8")
    if options.json:
        report = {
            "hardware": f"{os.cpu_count()} CPU cores, {platform.machine()}, no GPU involved",
            "folder": options.folder.name, "tokenizer": options.tokenizer.name,
            "schemas": len(rows), "every": options.every, "timeout_s": options.timeout,
            "compact": options.compact, "load": os.getloadavg(),
            "subjects": summaries,
            "not_right": {
                name: [
                    {"id": row["id"], "verdict": verdict(a), "keyword": a.get("keyword", ""),
                     "pointer": a.get("pointer", ""), "why": a["why"][:160]}
                    for row, a in zip(rows, found, strict=True) if verdict(a) != "right"
                ]
                for name, found in answers.items() if name.startswith("auto")
            },
        }  # fmt: skip
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
