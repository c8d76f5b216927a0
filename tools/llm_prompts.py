"""The prompts of ``make demo-llm``: ten requests as an application sends them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from graft.grammar.statement import GrammarSpec
from graft.tools.demo_tasks import object_schema

TEXT, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}


@dataclass(frozen=True)
class LlmPrompt:
    """What a request shows, its text, and its grammar; there is no one right answer."""

    shows: str
    text: str
    grammar: GrammarSpec | None
    answer: str | None = None


def with_schema(text: str, schema: Any) -> str:
    """A request for JSON: the words, then the schema. The drafter was trained on this form."""
    return f"{text}\nReply with JSON that follows this schema:\n{json.dumps(schema)}"


def called(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Schema of a call of a function by its name."""
    return object_schema([(name, parameters)])


def llm_prompts() -> list[LlmPrompt]:
    """The prompts, in the order in which they are shown."""
    def asked(shows: str, text: str, schema: dict[str, Any]) -> LlmPrompt:
        return LlmPrompt(shows, with_schema(text, schema), GrammarSpec.json_schema(schema))

    mood = ["positive", "negative", "neutral"]
    return [
        asked("tool call", "What is the weather in Oslo tomorrow, in celsius?",
              called("get_weather", object_schema(
                  [("city", TEXT), ("day", {"enum": ["today", "tomorrow"]}),
                   ("unit", {"enum": ["celsius", "fahrenheit"]})]))),
        asked("tool call with numbers", "Book a table for 4 people at Luigi's at 19:30.",
              called("book_table", object_schema(
                  [("restaurant", TEXT), ("people", INTEGER),
                   ("time", {"type": "string", "pattern": "^[0-2][0-9]:[0-5][0-9]$"})]))),
        asked("tool call with a list", "Play Yesterday, Help and Let It Be by the Beatles.",
              called("play", object_schema(
                  [("artist", TEXT), ("songs", {"type": "array", "items": TEXT, "minItems": 1,
                                                "maxItems": 5})]))),
        asked("extraction", "Extract the person: Olga Novak is 42 years old and lives in Basel, "
              "where she works as a nurse.",
              object_schema([("name", TEXT), ("age", INTEGER), ("city", TEXT), ("job", TEXT)])),
        asked("nested extraction", "Extract the order: Greta Rossi bought 3 lamps at 12.50 each "
              "and 12 cups at 2.00 each.",
              object_schema([("customer", TEXT), ("items", {
                  "type": "array", "minItems": 1, "maxItems": 2, "items": object_schema(
                      [("item", TEXT), ("quantity", INTEGER), ("price", NUMBER)])})])),
        LlmPrompt("classification", 'Is this review positive, negative or neutral? "The food was '
                  'cold and the waiter was rude. I will not come back."', GrammarSpec.choice(mood)),
        LlmPrompt("classification of a topic", "Which topic fits best, sports, science or "
                  'politics? "The telescope saw light from a galaxy 13 billion years old."',
                  GrammarSpec.choice(["sports", "science", "politics"])),
        LlmPrompt("regular expression", "When did the first people land on the moon? Write the "
                  "date as YYYY-MM-DD.",
                  GrammarSpec.regex(r"(19|20)[0-9]{2}-[01][0-9]-[0-3][0-9]")),
        LlmPrompt("free text", "Explain in two sentences why the sky is blue.", None),
        LlmPrompt("free list", "List three tips for better sleep.", None),
    ]
