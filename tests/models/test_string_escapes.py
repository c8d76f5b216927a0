r"""Engines whose model writes JSON strings with ``\u`` escapes, as if with ``ensure_ascii``."""

from __future__ import annotations

import json
from typing import Any

import pytest
from engine_util import with_internal
from scripted_model import Script, write_scripted_model

from graft.grammar import GrammarSpec
from graft.models import Engine, Request

TEXTS = {
    "letter": '{"name": "M\\u00fcller", "size": 3}',
    "pair": '{"name": "\\ud83d\\ude00 ok", "size": 4, "tag": "\\u65E5x"}',
    "name": '{"name": "x", "size": 5, "gr\\u00f6\\u00dfe": "a\\/b"}',
    "longest": '{"name": "\\u00fc\\u00e4\\u00f6\\u00df\\ud83d\\ude00\\u00e9", "size": 6}',
    "too long": '{"name": "\\u00fc\\u00e4\\u00f6\\u00df\\u00e9\\u00e8\\u00ea", "size": 7}',
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "size": {"type": "integer"}},
    "required": ["name", "size"],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    scripts = {name: Script(text) for name, text in TEXTS.items()}
    return write_scripted_model(tmp_path_factory.mktemp("scripted"), scripts)


@pytest.mark.parametrize(
    "options",
    [
        {"drafts": False},
        {"draft_length": 5},
        {"draft_length": 5, "generation": "graph"},
        pytest.param({"drafts": False, "generation": "graph"}, marks=pytest.mark.full),
        pytest.param({"draft_length": 7, "draft_tree": (2, 4)}, marks=pytest.mark.full),
        pytest.param({"draft_length": 3, "draft_masking": "none"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_model_may_write_escapes(model: Any, options: dict[str, Any]):
    options = dict(options)
    drafter = model if options.pop("drafts", True) else None
    grammar = GrammarSpec.json_schema(SCHEMA)
    requests = [
        Request(
            messages=[{"role": "user", "content": f"<script:{name}>"}],
            temperature=0.0,
            grammar=grammar,
            max_tokens=100,
        )
        for name in TEXTS
    ]
    is_device = options.get("generation") == "graph"
    with Engine(
        model, drafter, max_length=256, max_batch_size=8, **with_internal(options)
    ) as engine:
        outputs = dict(zip(TEXTS, engine.generate(requests), strict=True))
        rounds = engine.stats.rounds_by_kind
    assert (rounds["loop"] > 0) == is_device
    for name, output in outputs.items():
        assert output.reason == "stop", (name, output.text)
        if name != "too long":
            assert output.text == TEXTS[name]
    # The seventh character would be too long, and the quotation mark follows the sixth one.
    assert len(json.loads(outputs["longest"].text)["name"]) == 6
    assert json.loads(outputs["too long"].text)["name"] == "üäößéè"
