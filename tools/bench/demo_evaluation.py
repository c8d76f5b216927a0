"""Score the demo model through the engine on held-out tasks; every figure as JSON.

Temperature 0, all tasks under their grammars, once with masked and once with unmasked drafts::

    python -m graft.tools.bench.demo_evaluation [--tasks 500] [--json build/evaluation.json]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from graft.grammar.grammar_spec import GrammarSpec
from graft.models.engine.engine import Engine
from graft.models.request import Output, Request
from graft.tools.bench.estimate import estimate_mean
from graft.tools.demo_model import demo_model
from graft.tools.demo_tasks import Task, held_out_tasks, score_fields, unseen_key_tasks
from graft.tools.report import program
from graft.tools.validity import is_valid

SETS: dict[str, Callable[[int], list[Task]]] = {
    "held_out": held_out_tasks,
    "unseen_keys": unseen_key_tasks,
}
MAX_TOKENS = 320


def task_grammar(task: Task) -> GrammarSpec | None:
    """The grammar that a task's answer obeys."""
    if task.schema is not None:
        return GrammarSpec.json_schema(task.schema)
    return GrammarSpec.regex(task.pattern) if task.pattern is not None else None


@dataclass(frozen=True)
class Result:
    """Outputs of one set under one engine, with the engine's counters and the seconds it took."""

    tasks: list[Task]
    outputs: list[Output]
    counters: dict[str, Any]
    seconds: float


def run_tasks(engine: Engine, tasks: list[Task]) -> Result:
    """Answer all tasks at temperature 0; the counters are those of this run alone."""
    engine.reset_stats()
    before = engine.counters()["grammar"]
    requests = [
        Request(prompt=task.text, grammar=task_grammar(task), max_tokens=MAX_TOKENS)
        for task in tasks
    ]
    begun = time.perf_counter()
    outputs = engine.generate(requests, progress=sys.stderr.isatty())
    seconds = time.perf_counter() - begun
    counters = engine.counters()
    counters["grammar"] = {
        name: value - before[name]
        for name, value in counters["grammar"].items()
        if isinstance(value, int)
    }
    return Result(tasks, outputs, counters, seconds)


def correctness(result: Result) -> dict[str, Any]:
    """Fields right and whole answers right, as shares of what was asked.

    `valid` is the share of guided outputs that obey their grammar by an independent reader, among
    those that ended by themselves: a document cut by the token limit is none.
    """
    scores = [
        score_fields(output.text, task)
        for task, output in zip(result.tasks, result.outputs, strict=True)
    ]
    right, fields, whole = map(sum, zip(*scores, strict=True))
    checked = [
        verdict
        for task, output in zip(result.tasks, result.outputs, strict=True)
        if output.finished and (verdict := is_valid(task_grammar(task), output.text)) is not None
    ]
    n = len(result.tasks)
    return {
        "tasks": n,
        "fields": fields,
        "fields_right": right / fields,
        "whole_right": whole / n,
        "finished": sum(output.finished for output in result.outputs) / n,
        "checked": len(checked),
        "valid": mean(checked) if checked else None,
    }


def speculation(result: Result) -> dict[str, Any]:
    """Rounds, acceptance, and the share of drafts that the grammar refused.

    A draft counts as tested by the grammar when all drafts before it in its round were legal; the
    share is of those. Masked drafts are legal by construction.
    """
    stats = result.counters["engine"]
    grammar = result.counters["grammar"]
    refused = grammar["refused_drafts"]
    tested = grammar["accepts"] - grammar["committed_tokens"] + refused
    names = (
        "rounds",
        "tokens",
        "tokens_per_round",
        "acceptance_length",
        "acceptance",
        "part_share",
    )
    return {name: stats[name] for name in names} | {
        "drafts_refused_by_grammar": refused,
        "drafts_tested_by_grammar": tested,
        "illegal_share": refused / tested if tested else 0.0,
        "seconds": result.seconds,
    }


def pair(masked: Result, unmasked: Result) -> dict[str, Any]:
    """Tokens per round of each guided task, masked minus unmasked, and whether the texts agree."""
    both = list(zip(masked.tasks, masked.outputs, unmasked.outputs, strict=True))
    differences = [
        len(a.tokens) / a.rounds - len(b.tokens) / b.rounds
        for task, a, b in both
        if task_grammar(task) is not None and a.rounds and b.rounds
    ]
    return {
        "tokens_per_round_difference": estimate_mean(differences),
        "same_tokens": sum(a.tokens == b.tokens for _, a, b in both),
    }


@program
def main(arguments: Sequence[str] | None = None) -> None:
    """Evaluate and print or write the JSON."""
    parser = argparse.ArgumentParser(description="Score the demo model through the engine.")
    parser.add_argument("--tasks", type=int, default=500, help="tasks per set (default 500)")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--draft-length", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write here instead of printing")
    options = parser.parse_args(arguments)
    answer: dict[str, Any] = {"draft_length": options.draft_length, "batch": options.batch}
    results: dict[str, dict[str, Result]] = {name: {} for name in SETS}
    for arm, masked in (("masked", True), ("unmasked", False)):
        with Engine(
            *demo_model(),
            max_batch_size=options.batch,
            mask_drafts=masked,
            draft_length=options.draft_length,
            timeline=True,
        ) as engine:
            answer["device"] = engine.device.describe()
            for name, make in SETS.items():
                results[name][arm] = run_tasks(engine, make(options.tasks))
    for name, arms in results.items():
        answer[name] = {
            "correct": correctness(arms["masked"]),
            **{arm: speculation(result) for arm, result in arms.items()},
            "paired": pair(arms["masked"], arms["unmasked"]),
        }
    text = json.dumps(answer, indent=1)
    if options.json:
        options.json.write_text(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    sys.exit(main())
