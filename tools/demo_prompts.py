"""The prompts of ``make demo``: ten requests, each with a grammar of its own or none."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from graft.grammar.statement import GrammarSpec
from graft.tools.demo_tasks import DATE, object_schema

TEXT = {"type": "string"}
INTEGER = {"type": "integer"}


@dataclass(frozen=True)
class DemoPrompt:
    """One request of the demo: what it shows, the text, the grammar and the right answer."""

    shows: str
    text: str
    grammar: GrammarSpec | None
    answer: str


def _json(shows: str, text: str, schema: dict[str, Any], answer: Any) -> DemoPrompt:
    return DemoPrompt(shows, text, GrammarSpec.json_schema(schema), json.dumps(answer))


def demo_prompts() -> list[DemoPrompt]:
    """The prompts, in the order in which they are shown."""
    address = object_schema([("street", TEXT), ("city", TEXT), ("zip", INTEGER)])
    item = object_schema([("item", TEXT), ("quantity", INTEGER)])
    return [
        _json("nested object",
              "Extract the fields.\ncustomer: Olga Novak; address: (zip 4051, city Basel, "
              "street coffee); age: 42",
              object_schema([("customer", TEXT), ("age", INTEGER), ("address", address)]),
              {"customer": "Olga Novak", "age": 42,
               "address": {"street": "coffee", "city": "Basel", "zip": 4051}}),
        _json("array of numbers",
              "team = garden drums\nscores = 17, 4, 88 and 31\nGive the data as JSON.",
              object_schema([("team", TEXT), ("scores", {"type": "array", "items": INTEGER})]),
              {"team": "garden drums", "scores": [17, 4, 88, 31]}),
        _json("array of objects",
              "Return JSON.\n- owner: Greta Rossi\n- entries: (item tea, quantity 3), "
              "(item lamp, quantity 12)",
              object_schema([("owner", TEXT), ("entries", {"type": "array", "items": item})]),
              {"owner": "Greta Rossi",
               "entries": [{"item": "tea", "quantity": 3}, {"item": "lamp", "quantity": 12}]}),
        _json("enum and boolean",
              "Fill in the schema.\nThe plan is pro. The verified is yes. The contact is Zulko.",
              object_schema([("contact", TEXT),
                             ("plan", {"type": "string", "enum": ["basic", "plus", "pro"]}),
                             ("verified", {"type": "boolean"})]),
              {"contact": "Zulko", "plan": "pro", "verified": True}),
        _json("bounded numbers",
              "A record with rating 87, weight 21.25, product violin.\nExtract the record as JSON.",
              object_schema([("product", TEXT),
                             ("rating", {"type": "integer", "minimum": 0, "maximum": 100}),
                             ("weight", {"type": "number", "minimum": 0, "maximum": 2000})]),
              {"product": "violin", "rating": 87, "weight": 21.25}),
        _json("pattern",
              "Turn this into JSON.\ncode: QF-5702; manager: Lako Stalsta",
              object_schema([("manager", TEXT),
                             ("code", {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"})]),
              {"manager": "Lako Stalsta", "code": "QF-5702"}),
        _json("date format",
              "Note: city=Madrid\nguest=Finn Kurvun\ncreated=1998-01-07\nReturn JSON.",
              object_schema([("guest", TEXT), ("city", TEXT),
                             ("created", {"type": "string", "format": "date"})]),
              {"guest": "Finn Kurvun", "city": "Madrid", "created": "1998-01-07"}),
        _json("optional field",
              "Give the data as JSON.\nThe model is wivus. The seats is 5.",
              object_schema([("model", TEXT), ("owner", TEXT), ("seats", INTEGER)], ["owner"]),
              {"model": "wivus", "seats": 5}),
        DemoPrompt("regular expression",
                   "author: Vecal Rossi; due: 2030-12-14; pages: 72\nGive only the due.",
                   GrammarSpec.regex(DATE), "2030-12-14"),
        DemoPrompt("no grammar",
                   "guest: Anna Kurvun; floor: 8\nSay it in one sentence.",
                   None, "The guest is Anna Kurvun and the floor is 8."),
    ]
