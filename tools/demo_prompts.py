"""The prompts of ``make demo``: ten requests, each with a grammar of its own or none."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from graft.grammar.statement import GrammarSpec


@dataclass(frozen=True)
class DemoPrompt:
    """One request of the demo: what it shows, the text, the grammar and the right answer."""

    shows: str
    text: str
    grammar: GrammarSpec | None
    answer: str


def demo_prompts() -> list[DemoPrompt]:
    """The prompts, in the order in which they are shown."""
    found = []
    for row in map(json.loads, Path(__file__).with_suffix(".jsonl").open(encoding="utf-8")):
        grammar = None
        if "schema" in row:
            grammar = GrammarSpec.json_schema(row["schema"])
        elif "regex" in row:
            grammar = GrammarSpec.regex(row["regex"])
        found.append(DemoPrompt(row["shows"], row["prompt"], grammar, row["answer"]))
    return found
