"""Texts of the scripted model, requests for them, and checks that do not use graft."""

from __future__ import annotations

import json
import re
from typing import Any

from scripted_model import Script

from graft.grammar import GrammarSpec
from graft.models import Engine, Output, Request

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
GUIDED = GrammarSpec.json_schema(PERSON)
#: As `PERSON`, but the name cannot contain added tokens such as ``</think>``.
ANSWER = {
    **PERSON,
    "properties": {
        "name": {"type": "string", "pattern": "^[^<]{0,40}$"},
        "age": {"type": "integer"},
    },
}
#: The grammar of `ANSWER` applies to the text after the reasoning section.
REASONED = GrammarSpec.json_schema(ANSWER).after("</think>")
#: Added tokens, and whether the tokenizer marks them as special, so that they have no text.
ADDED = {
    "<think>": False,
    "</think>": False,
    "<tool_call>": False,
    "</tool_call>": False,
    "<|sep|>": True,
    "<|unused|>": True,
}
#: Stop tokens: the tokenizer's, that of generation_config.json and that of config.json.
STOPS = ("<eos>", "<eot>", "<end>")
TEXTS = {
    "person": '{"name": "Ann", "age": 31}',
    "prose": "Well: nobody knows the name of this person, but the age is twelve.",
    "list": "[1, 22, 333, 4444, 55555, 666666, 7777777]",
    "newlines": '{"name":\n\n"Bob",\n\n"age":\n\n5}',
    "goes-on": '{"name": "Cy", "age": 8} is what I found, and there is more to say.',
    "separator": '{"name": "Di", "age": 9}<|sep|>and more',
    "separator-inside": '{"name": "D<|sep|>i", "age": 9}',
    "thinks": '<think>He said {"name": 1}.</think>{"name": "Ed", "age": 41}',
    "thinks-fence": '<think>As JSON.</think>\n\n```json\n{"name": "Flo", "age": 52}\n```',
    "thinks-brace": '<think>So be it.</think>{{"name": "Gus", "age": 63}}',
    "thinks-goes-on": '<think>Yes.</think>{"name": "Lea", "age": 28} and so on.',
    "long": f'{{"name": "{" ".join(f"w{i}" for i in range(30))}", "age": 74}}',
    "emoji": '{"name": "山田👍🏽太郎 👩‍👩‍👧", "age": 85}',
    "call": (
        '<tool_call>\n{"name": "person", "arguments": {"name": "Hal", "age": 96}}\n</tool_call>'
    ),
}
SCRIPTS = {name: Script(text) for name, text in TEXTS.items()}
SCRIPTS |= {
    "stops-early": Script('{"name": "Ivo and', stop="<eot>"),
    "stops-early-again": Script('{"name": "Jo', stop="<end>"),
    "spelled-marker": Script('I think.</think>{"name": "Kim", "age": 17}', spelled=True),
    "spaces": Script('{"name":    ', stop=""),
}


def ask(name: str, **fields: Any) -> Request:
    """Return a request for the text with this name."""
    messages = [{"role": "user", "content": f"<script:{name}>"}]
    return Request(messages=messages, **{"max_tokens": 200, **fields})


def is_person(text: str) -> bool:
    """Return whether a text is JSON that satisfies `PERSON`, as jsonschema decides."""
    import jsonschema  # tests are skipped without it

    try:
        jsonschema.validate(json.loads(text), PERSON)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def results(outputs: list[Output]) -> list[tuple[str, list[int], str]]:
    """Return what must not depend on speculation, batching and scheduling."""
    return [(output.reason, output.tokens, output.text) for output in outputs]


def one_by_one(plain: Engine, requests: list[Request]) -> list[tuple[str, list[int], str]]:
    """Return the results of requests that run alone and without speculation."""
    return [result for request in requests for result in results(plain.generate([request]))]


def tokens_of(engine: Engine, text: str) -> list[int]:
    """Return the tokens in which the model's tokenizer writes a text."""
    return engine.tokenizer.encode(text)


def matches(pattern: str, text: str) -> bool:
    return re.fullmatch(pattern, text) is not None
