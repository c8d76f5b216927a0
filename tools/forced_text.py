"""How many rounds forced text saves: the demo's tasks with forced drafts and without.

    python -m graft.tools.forced_text [--tasks 48] [--draft-length 5] [--json FILE]

Every way gives the same tokens, which is checked. Rounds are counted, nothing is timed.
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
from graft.grammar.spec import GrammarSpec
from graft.models.engine import Engine
from graft.models.request import Request
from graft.tools.demo_model import demo_model
from graft.tools.demo_tasks import held_out_tasks, unseen_key_tasks

#: Ways to decode: whether with the drafter, whether with forced drafts.
WAYS = {
    "one token a round": (False, False),
    "forced drafts": (False, True),
    "drafter": (True, False),
    "drafter and forced drafts": (True, True),
}


def requests(count: int, seed: int) -> list[Request]:
    """Greedy requests with a schema each, half of them with keys the models have not seen."""
    tasks = [*held_out_tasks(2 * count, seed), *unseen_key_tasks(2 * count, seed)]
    found = [
        Request(prompt=task.text, grammar=GrammarSpec.json_schema(task.schema), max_tokens=160)
        for task in tasks if task.schema is not None
    ]  # fmt: skip
    half = len(found) // 2
    return (found[: count // 2] + found[half:])[:count]


def measure(asked: Sequence[Request], draft_length: int) -> dict[str, dict[str, Any]]:
    """Rounds and tokens of every way.

    Raises
    ------
    GraftError
        If two ways give different tokens.
    """
    target, drafter = demo_model()
    rows: dict[str, dict[str, Any]] = {}
    expected: list[tuple[str, list[int]]] | None = None
    for name, (drafted, forced) in tqdm(WAYS.items(), disable=not sys.stderr.isatty()):
        with Engine(target, drafter if drafted else None, draft_length=draft_length,
                    forced_drafts=forced, overlap=False) as engine:  # fmt: skip
            outputs = [(o.reason or "", o.tokens) for o in engine.generate(asked)]
            grammar, stats = engine.counters()["grammar"], engine.stats
        expected = expected or outputs
        if outputs != expected:
            raise GraftError(f"forced text: {name!r} gives other tokens than {next(iter(rows))!r}")
        rows[name] = {
            "requests": len(outputs), "tokens": stats.tokens, "rounds": stats.row_rounds,
            "tokens_per_round": round(stats.tokens_per_round, 3),
            "forced_tokens": stats.forced_tokens, "fills": grammar["fills"],
        }  # fmt: skip
    for name, base in (("forced drafts", "one token a round"),
                       ("drafter and forced drafts", "drafter")):  # fmt: skip
        rows[name]["rounds_saved"] = rows[base]["rounds"] - rows[name]["rounds"]
    return rows


def table(rows: dict[str, dict[str, Any]]) -> str:
    """A plain-text table, a line a way."""
    keys = ["tokens", "rounds", "tokens_per_round", "forced_tokens", "rounds_saved", "fills"]
    lines = [["way", *(key.replace("_", " ") for key in keys)]]
    lines += [[name, *(str(row.get(key, "-")) for key in keys)] for name, row in rows.items()]
    widths = [max(len(line[i]) for line in lines) for i in range(len(keys) + 1)]
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
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args(arguments)
    try:
        if options.tasks < 1:
            raise OptionError(f"--tasks must be at least 1, got {options.tasks}")
        rows = measure(requests(options.tasks, options.seed), options.draft_length)
    except GraftError as error:
        print(f"graft: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(table(rows))
    if options.json:
        report = {"draft_length": options.draft_length, "seed": options.seed, "ways": rows}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
