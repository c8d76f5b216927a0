"""Evaluation of the demo model on held-out tasks through the engine.

    python -m graft.tools.bench.demo_evaluation [--tasks 500] [--json build/evaluation.json]

The demo model generates the answers to all tasks at temperature 0 under the tasks' grammars. The
evaluation runs once with masked drafts, which the drafter samples only from tokens that the grammar
allows, and once with unmasked drafts. The results are printed as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from graft.grammar.grammar_spec import GrammarSpec
from graft.models.engine.engine import Engine
from graft.models.request import Output, Request
from graft.tools.bench.harness import add_counts, finish, make_parser
from graft.tools.bench.speculation_metrics import estimate_mean
from graft.tools.console import program
from graft.tools.demo.tasks import Task, held_out_tasks, score_fields, unseen_key_tasks
from graft.tools.demo_model import demo_model
from graft.tools.output_check import is_valid

TASK_SETS: dict[str, Callable[[int], list[Task]]] = {
    "held_out": held_out_tasks,
    "unseen_keys": unseen_key_tasks,
}
MAX_TOKENS = 320
#: Fields of `EngineStats` that are included in the report.
REPORTED_STATS = (
    "rounds",
    "tokens",
    "tokens_per_round",
    "acceptance_length",
    "acceptance",
    "part_share",
)


def task_grammar(task: Task) -> GrammarSpec | None:
    """Return the grammar of a task's answer, or None if the answer is free text."""
    if task.schema is not None:
        return GrammarSpec.json_schema(task.schema)
    if task.pattern is not None:
        return GrammarSpec.regex(task.pattern)
    return None


@dataclass(frozen=True)
class Result:
    """Outputs of one engine for one set of tasks, in the order of the tasks."""

    tasks: list[Task]
    outputs: list[Output]
    counters: dict[str, Any]  #: the engine's counters for these tasks only
    seconds: float  #: duration on the host's clock


def run_tasks(engine: Engine, tasks: list[Task]) -> Result:
    """Generate the answers to all tasks at temperature 0."""
    engine.reset_stats()
    before = engine.counters()["grammar"]
    requests = [
        Request(prompt=task.text, grammar=task_grammar(task), max_tokens=MAX_TOKENS)
        for task in tasks
    ]
    start = time.perf_counter()
    outputs = engine.generate(requests, progress=sys.stderr.isatty())
    seconds = time.perf_counter() - start
    counters = engine.counters()
    grammar_counters = {}
    for name, value in counters["grammar"].items():
        if isinstance(value, int):
            grammar_counters[name] = value - before[name]
    counters["grammar"] = grammar_counters
    return Result(tasks, outputs, counters, seconds)


# Figures ------------------------------------------------------------------------------------------


def correctness(result: Result) -> dict[str, Any]:
    """Return the shares of correct fields, correct answers and valid outputs.

    An output is valid if `output_check.is_valid`, which does not use the grammar backends, finds
    that it matches the task's grammar. The share of valid outputs is computed without the outputs
    that were truncated by the token limit and those whose grammar `is_valid` does not support.
    """
    pairs = list(zip(result.tasks, result.outputs, strict=True))
    scores = [score_fields(output.text, task) for task, output in pairs]
    correct_fields, fields, correct_answers = map(sum, zip(*scores, strict=True))
    finished = [(task, output) for task, output in pairs if output.finished]
    checked = []
    for task, output in finished:
        valid = is_valid(task_grammar(task), output.text)
        if valid is not None:
            checked.append(valid)
    return {
        "tasks": len(pairs),
        "fields": fields,
        "correct_fields": correct_fields / fields,
        "correct_answers": correct_answers / len(pairs),
        "finished": len(finished) / len(pairs),
        "checked": len(checked),
        "valid": mean(checked) if checked else None,
    }


def speculation(result: Result) -> dict[str, Any]:
    """Return the engine's counters and the share of tested drafts that the grammar rejected.

    A draft is tested against the grammar only if all earlier drafts of its round are legal. The
    share is therefore relative to the number of tested drafts, not to the number of all drafts. It
    is 0 for masked drafts, which are always legal.
    """
    stats = result.counters["engine"]
    grammar = result.counters["grammar"]
    rejected = grammar["refused_drafts"]
    tested = grammar["accepts"] - grammar["committed_tokens"] + rejected
    return {name: stats[name] for name in REPORTED_STATS} | {
        "drafts_rejected_by_grammar": rejected,
        "drafts_tested_by_grammar": tested,
        "rejected_share": rejected / tested if tested else 0.0,
        "seconds": result.seconds,
    }


def compare_masking(masked: Result, unmasked: Result) -> dict[str, Any]:
    """Compare masked with unmasked drafts task by task.

    The difference in tokens per round is masked minus unmasked. It is computed only for tasks with
    a grammar.
    """
    same_tokens = 0
    differences = []
    for task, a, b in zip(masked.tasks, masked.outputs, unmasked.outputs, strict=True):
        same_tokens += a.tokens == b.tokens
        if task_grammar(task) is not None and a.rounds and b.rounds:
            masked_rate = len(a.tokens) / a.rounds
            unmasked_rate = len(b.tokens) / b.rounds
            differences.append(masked_rate - unmasked_rate)
    return {"tokens_per_round_difference": estimate_mean(differences), "same_tokens": same_tokens}


# Program ------------------------------------------------------------------------------------------


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser("graft.tools.bench.demo_evaluation", __doc__)
    add_counts(
        parser,
        ("tasks", 500, "tasks per set"),
        ("batch", 8, "requests that run together"),
        ("draft-length", 3, "drafts per round"),
    )
    return parser.parse_args(arguments)


def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    """Run all task sets with masked and with unmasked drafts, and return the report."""
    report: dict[str, Any] = {"draft_length": options.draft_length, "batch": options.batch}
    results: dict[str, dict[str, Result]] = {name: {} for name in TASK_SETS}
    for masking in ("masked", "unmasked"):
        with Engine(
            *demo_model(),
            max_batch_size=options.batch,
            draft_masking="auto" if masking == "masked" else "none",
            draft_length=options.draft_length,
            timeline=True,
        ) as engine:
            report["device"] = engine.device.describe()
            for name, make_tasks in TASK_SETS.items():
                results[name][masking] = run_tasks(engine, make_tasks(options.tasks))
    for name, by_masking in results.items():
        report[name] = {
            "correct": correctness(by_masking["masked"]),
            **{masking: speculation(result) for masking, result in by_masking.items()},
            "paired": compare_masking(by_masking["masked"], by_masking["unmasked"]),
        }
    return report


@program
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the evaluation and print the results as JSON."""
    options = parse_options(arguments)
    results = evaluate(options)
    finish(options, results, json.dumps(results, indent=1))


if __name__ == "__main__":
    sys.exit(main())
