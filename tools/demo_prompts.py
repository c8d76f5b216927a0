"""The prompts of ``make demo`` and ``make demo-llm``: ten requests, each with its own grammar."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from graft.grammar.statement import GrammarSpec
from graft.tools.demo_tasks import with_schema


@dataclass(frozen=True)
class DemoPrompt:
    """One request of a demo: what it shows, the text, the grammar and the right answer, if any."""

    shows: str
    text: str
    grammar: GrammarSpec | None
    answer: str | None


def demo_prompts(name: str = "demo_prompts") -> list[DemoPrompt]:
    """The prompts of a file beside this one, in the order in which they are shown."""
    found = []
    for row in map(json.loads, Path(__file__).with_name(f"{name}.jsonl").open(encoding="utf-8")):
        grammar = None
        if "schema" in row:
            grammar = GrammarSpec.json_schema(row["schema"])
        elif "choice" in row:
            grammar = GrammarSpec.choice(row["choice"])
        elif "regex" in row:
            grammar = GrammarSpec.regex(row["regex"])
        found.append(DemoPrompt(row["shows"], row["prompt"], grammar, row.get("answer")))
    return found


def llm_prompts() -> list[DemoPrompt]:
    """Those of the real model, which is told the schema in words."""
    return [
        replace(p, text=with_schema(p.text, json.loads(p.grammar.text)))
        if p.grammar is not None and p.grammar.kind == "json_schema"
        else p
        for p in demo_prompts("llm_prompts")
    ]
