"""LLGuidance's limits as graft sets them: no text of a grammar that compiled ends in the middle."""

from __future__ import annotations

import json

import numpy as np
import pytest
from guide_util import BYTES

from graft.grammar import GrammarSpec, LLGuidanceBackend

pytest.importorskip("llguidance")

#: A pattern under a long length bound: LLGuidance's own limits end in the middle of its texts.
BOUNDED = {"type": "string", "minLength": 1, "maxLength": 2000,
           "pattern": "^$|(^(?:\\S+\\s+){0,60}\\S+$)"}  # fmt: skip
OPTIONS = {"anyOf": [{"type": "object", "properties": {f"p{i}": {"const": i}},
                      "required": [f"p{i}"], "additionalProperties": False}
                     for i in range(2100)]}  # fmt: skip
OPTIONAL = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(900)},
            "additionalProperties": False}  # fmt: skip


def choice(count: int) -> GrammarSpec:
    return GrammarSpec.choice([f"{i * 7919 % 100_003} of {count}" for i in range(count)])


def schema(value: object) -> GrammarSpec:
    return GrammarSpec.json_schema(json.dumps(value), backend="llguidance", key_order="schema")


@pytest.mark.parametrize(
    "spec, value",
    [
        (schema(BOUNDED), "what is it"),
        (schema(OPTIONS), {"p2050": 2050}),
        (schema(OPTIONAL), {"p3": 1, "p800": 2, "p899": 3}),
        (choice(2_000), None),
        (choice(100_000), None),
    ],
    ids=["long bound", "options", "optional properties", "choice", "large choice"],
)
def test_a_text_goes_through_to_its_end(spec, value):
    """It is accepted to its end, with a mask before each token, after rollbacks too."""
    text = json.dumps(value) if value is not None else json.loads(spec.text)[1234]
    matcher = LLGuidanceBackend(BYTES).compile(spec).matcher()
    row = np.zeros(BYTES.words, np.int32)
    for byte in text.encode():
        for again in (True, False):
            matcher.fill(row)
            assert row[byte >> 5] >> (byte & 31) & 1
            assert matcher.accept(byte)
            if again:
                matcher.rollback(1)
    assert matcher.accept(256) and matcher.is_terminated()
