"""Requests with structural formats have the same outputs in all modes of the engine."""

from __future__ import annotations

import pytest

from graft.grammar import GrammarSpec
from graft.models.engine.engine import Engine
from graft.models.request import Request
from graft.tools.demo_model import demo_model

pytest.importorskip("llguidance")

PROMPT = "Extract the fields.\nname: Olga Novak; age: 42"
FREE = {"type": "any_text", "max_chars": 6}
NUMBER = {"type": "json_schema", "json_schema": {"type": "integer", "minimum": 0, "maximum": 99}}
THOUGHT = {"type": "tag", "begin": "<think>", "content": FREE, "end": "</think>"}
CALL = {"type": "tag", "begin": "<f=1>", "content": NUMBER, "end": ["</f>", "</g>"]}
FORMATS = [
    {"type": "sequence", "elements": [THOUGHT, CALL]},
    {"type": "or", "elements": [{"type": "const_string", "value": "no"}, CALL]},
    {"type": "triggered_tags", "triggers": ["<f="], "tags": [CALL], "at_least_one": True},
    {"type": "tags_with_separator", "tags": [CALL], "separator": ", ", "at_least_one": True},
    {"type": "repeat", "min": 2, "max": 3, "content": CALL},
]


def outputs(models, **options):
    with Engine(*models, max_batch_size=2, max_length=128, **options) as engine:
        requests = [
            Request(
                prompt=PROMPT,
                grammar=GrammarSpec.structural_format(form),
                max_tokens=20,
                closing="off",
                temperature=temperature,
                seed=3,
                verify="coupled",
            )
            for form in FORMATS
            for temperature in (0, 1.2)
        ]
        return [(output.tokens, output.reason) for output in engine.generate(requests)]


def test_structural_formats_have_equal_outputs_in_all_modes():
    """The reference is an engine without drafts."""
    expected = outputs(demo_model()[:1])
    assert {reason for _, reason in expected} <= {"stop", "length"}
    assert len({tuple(tokens) for tokens, _ in expected}) > len(FORMATS)
    for options in ({}, {"draft_masking": "probe"}, {"generation": "graph"}):
        assert outputs(demo_model(), **options) == expected
