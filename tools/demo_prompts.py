"""The prompts of ``make demo`` and ``make demo-llm``: ten requests, each with its own grammar."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from graft.grammar.statement import GrammarSpec
from graft.tools.demo_tasks import with_schema
from graft.tools.grammar_options import make_grammar


@dataclass(frozen=True)
class DemoPrompt:
    """One request of a demo: what it shows, the text, the grammar and the right answer, if any."""

    shows: str
    text: str
    grammar: GrammarSpec | None
    answer: str | None


def demo_prompts(name: str = "demo_prompts") -> list[DemoPrompt]:
    """The prompts of a file beside this one, in the order in which they are shown."""
    text = Path(__file__).with_name(f"{name}.jsonl").read_text(encoding="utf-8")
    return [
        DemoPrompt(row["shows"], row["prompt"], make_grammar(row, partial=False), row.get("answer"))
        for row in map(json.loads, text.split("\n")[:-1])
    ]


def llm_prompts() -> list[DemoPrompt]:
    """Those of the real model, which is told the schema in words."""
    return [
        replace(p, text=with_schema(p.text, json.loads(p.grammar.text)))
        if p.grammar is not None and p.grammar.kind == "json_schema"
        else p
        for p in demo_prompts("llm_prompts")
    ]
