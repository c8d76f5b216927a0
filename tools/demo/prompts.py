"""Prompts of ``make demo`` and ``make demo-llm``: ten requests each, most with a grammar."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from graft.grammar.grammar_spec import GrammarSpec
from graft.tools.demo.tasks import add_schema_to_prompt
from graft.tools.grammar_options import make_grammar


@dataclass(frozen=True)
class DemoPrompt:
    """A request of a demo."""

    shows: str  #: feature that the request demonstrates, as a title for the printed output
    text: str  #: prompt
    grammar: GrammarSpec | None  #: grammar of the output; None for free text
    answer: str | None  #: correct output; None if more than one output is correct


def demo_prompts(name: str = "demo_prompts") -> list[DemoPrompt]:
    """Return the prompts in the file ``NAME.jsonl`` of this folder."""
    text = Path(__file__).with_name(f"{name}.jsonl").read_text(encoding="utf-8")
    prompts = []
    for line in text.split("\n")[:-1]:
        row = json.loads(line)
        grammar = make_grammar(row, partial=False)
        prompts.append(DemoPrompt(row["shows"], row["prompt"], grammar, row.get("answer")))
    return prompts


def llm_prompts() -> list[DemoPrompt]:
    """Return the prompts for SmolLM2. JSON schemas are part of the prompt text."""
    prompts = []
    for prompt in demo_prompts("llm_prompts"):
        if prompt.grammar is not None and prompt.grammar.kind == "json_schema":
            schema = json.loads(prompt.grammar.text)
            prompt = replace(prompt, text=add_schema_to_prompt(prompt.text, schema))
        prompts.append(prompt)
    return prompts
