"""What forced text saves on the demo's tasks: sampled, drafted, or appended outright.

    python -m graft.tools.forced_text [--tasks 48] [--overlap] [--each] [--json FILE]

Drafting gives the same tokens every way, which is checked. Appending gives the tokenizer's own
tokens: the table says how many texts are the same all the same, and how many outputs are exact.
Rounds are counted, nothing is timed; the JSON has every task by itself.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from graft.cudagraph.errors import GraftError, OptionError
from graft.grammar.backend import GrammarBackend
from graft.grammar.llguidance import LLGuidanceBackend
from graft.grammar.statement import GrammarSpec
from graft.grammar.vocabulary import Vocabulary
from graft.models.engine import Engine
from graft.models.request import Output, Request
from graft.tools.demo_model import demo_model
from graft.tools.demo_tasks import held_out_tasks, unseen_key_tasks


def _canonical(vocabulary: Vocabulary) -> GrammarBackend:
    """Forced text is legal in the tokenizer's spelling alone, so that jumps are exact."""
    return LLGuidanceBackend(vocabulary, canonical=True)


#: Ways to decode: whether with the drafter, further options, and the way it is compared with.
WAYS: dict[str, tuple[bool, dict[str, Any], str]] = {
    "one token a round": (False, {}, ""),
    "forced drafts": (False, {"forced_drafts": True}, "one token a round"),
    "jump-forward": (False, {"jump_forward": True}, "one token a round"),
    "jump-forward, canonical": (False, {"jump_forward": True, "grammar_backend": _canonical},
                                "one token a round"),
    "both": (False, {"forced_drafts": True, "jump_forward": True}, "one token a round"),
    "drafter": (True, {}, "one token a round"),
    "drafter, forced drafts": (True, {"forced_drafts": True}, "drafter"),
    "drafter, jump-forward": (True, {"jump_forward": True}, "drafter"),
}
COLUMNS = ("tokens", "rounds", "rounds_saved", "saved_per_task", "tokens_per_round",
           "forced_tokens", "jumps", "jumped_tokens", "dropped_tokens", "prefilled_tokens",
           "same_texts", "exact", "fills")


def requests(count: int, seed: int) -> list[Request]:
    """Greedy requests with a schema each, half of them with keys the models have not seen.

    Keys come in the schema's order: where they may come in any, only the last one is forced.
    """
    tasks = [*held_out_tasks(2 * count, seed), *unseen_key_tasks(2 * count, seed)]
    found = [
        Request(prompt=task.text, max_tokens=160,
                grammar=GrammarSpec.json_schema(task.schema, key_order="schema"))
        for task in tasks if task.schema is not None
    ]  # fmt: skip
    half = len(found) // 2
    return (found[: count // 2] + found[half:])[:count]


def measure(
    asked: Sequence[Request], draft_length: int, overlap: bool = False
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Rounds and tokens of every way, summed up and by task.

    A round counts for each request that it held, those included whose tokens a jump made void.

    Raises
    ------
    GraftError
        If two ways that append nothing give different tokens.
    """
    target, drafter = demo_model()
    rows: dict[str, dict[str, Any]] = {}
    tasks: list[dict[str, Any]] = [{"prompt": one.prompt} for one in asked]
    first: list[Output] = []
    for name, (drafted, options, base) in tqdm(WAYS.items(), disable=not sys.stderr.isatty()):
        with Engine(target, drafter if drafted else None, draft_length=draft_length,
                    overlap=overlap, **options) as engine:  # fmt: skip
            outputs = engine.generate(asked)
            engine.settle()
            grammar, stats = engine.counters()["grammar"], engine.stats
        first = first or outputs
        pairs = list(zip(outputs, first, strict=True))
        if not stats.jumps and any((o.reason, o.tokens) != (f.reason, f.tokens) for o, f in pairs):
            raise GraftError(f"forced text: {name!r} gives other tokens than {next(iter(WAYS))!r}")
        tokens, rounds = sum(len(o.tokens) for o in outputs), stats.row_rounds + stats.stale_rows
        rows[name] = {
            "requests": len(outputs), "tokens": tokens, "rounds": rounds,
            "tokens_per_round": round(tokens / rounds, 3), "forced_tokens": stats.forced_tokens,
            "jumps": stats.jumps, "jumped_tokens": stats.jumped_tokens,
            "dropped_tokens": stats.surplus_tokens, "prefilled_tokens": stats.prefill_tokens,
            "same_texts": sum(o.text == f.text for o, f in pairs),
            "exact": sum(o.exact for o in outputs), "fills": grammar["fills"],
        }  # fmt: skip
        if base:
            rows[name]["rounds_saved"] = rows[base]["rounds"] - rounds
            rows[name]["saved_per_task"] = round(rows[name]["rounds_saved"] / len(outputs), 1)
        for task, output in zip(tasks, outputs, strict=True):
            task[name] = {"rounds": output.rounds, "tokens": len(output.tokens),
                          "jumped_tokens": output.jumped_tokens, "exact": output.exact}  # fmt: skip
    return rows, tasks


def table(rows: dict[str, dict[str, Any]]) -> str:
    """A plain-text table, a line a way."""
    lines = [["way", *(key.replace("_", " ") for key in COLUMNS)]]
    lines += [[name, *(str(row.get(key, "-")) for key in COLUMNS)] for name, row in rows.items()]
    return aligned(lines)


def table_of_tasks(tasks: list[dict[str, Any]]) -> str:
    """A line a task: its tokens, its rounds every way, and the tokens that jumps appended."""
    lines = [["task", "tokens", *(f"rounds: {way}" for way in WAYS), "jumped tokens"]]
    for task in tasks:
        counts = [task["one token a round"]["tokens"], *(task[way]["rounds"] for way in WAYS),
                  task["jump-forward"]["jumped_tokens"]]  # fmt: skip
        lines.append([" ".join(task["prompt"].split())[:40], *map(str, counts)])
    return aligned(lines)


def aligned(lines: list[list[str]]) -> str:
    """Cells in columns."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Count and print; refusals are one line on stderr and exit status 2."""
    parser = argparse.ArgumentParser(prog="python -m graft.tools.forced_text",
                                     description=(__doc__ or "").split("\n\n")[0])  # fmt: skip
    parser.add_argument("--tasks", type=int, default=48)
    parser.add_argument("--draft-length", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--overlap", action=argparse.BooleanOptionalAction, default=False,
                        help="two rounds in flight, of which a jump drops one (default: no)")
    parser.add_argument("--each", action="store_true", help="print a line for each task too")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args(arguments)
    try:
        if options.tasks < 1:
            raise OptionError(f"--tasks must be at least 1, got {options.tasks}")
        asked = requests(options.tasks, options.seed)
        rows, tasks = measure(asked, options.draft_length, options.overlap)
    except GraftError as error:
        print(f"graft: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    if options.each:
        print(table_of_tasks(tasks), end="\n\n")
    print(table(rows))
    if options.json:
        report = {"draft_length": options.draft_length, "seed": options.seed,
                  "overlap": options.overlap, "ways": rows, "tasks": tasks}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
