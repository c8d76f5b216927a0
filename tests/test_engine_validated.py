"""What was not enforced is checked and marked, never loosened silently."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from engine_util import demo_engine, mixed_requests

from graft.grammar.matcher import CompiledGrammar
from graft.grammar.router import check_output
from graft.grammar.spec import GrammarSpec
from graft.models.engine import Engine
from graft.models.request import Output, Request
from graft.models.running import Running
from graft.models.validation import Validation


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with demo_engine(max_batch_size=4) as made:
        yield made


def integer(**keywords: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"age": {"type": "integer"} | keywords},
            "required": ["age"], "additionalProperties": False}  # fmt: skip


def test_exact_grammars_are_not_marked(engine: Engine) -> None:
    """Enforced exactly, or free: nothing to check."""
    requests = [mixed_requests(1)[0], Request(tokens=[40, 41], max_tokens=4)]
    assert [o.validated for o in engine.generate(requests)] == [None, None]


@pytest.mark.parametrize("multiple, holds", [(7, True), (1_000_003, False)])
def test_loose_grammars_are_marked(engine: Engine, multiple: int, holds: bool) -> None:
    """XGrammar knows no multipleOf: the text is checked, and says 42 here."""
    spec = GrammarSpec.json_schema(integer(multipleOf=multiple), partial=True, backend="xgrammar")
    (output,) = engine.generate([Request(prompt="age: 42", grammar=spec, max_tokens=40)])
    assert output.finished and json.loads(output.text) == {"age": 42}
    assert output.validated is holds and output.error is None


def test_partial_where_nothing_was_left_out(engine: Engine) -> None:
    """Permission to loosen is no loosening: what the router could enforce whole is not marked."""
    spec = GrammarSpec.json_schema(integer(multipleOf=7), partial=True)
    (output,) = engine.generate([Request(prompt="age: 42", grammar=spec, max_tokens=40)])
    assert output.finished and json.loads(output.text)["age"] % 7 == 0
    assert output.validated is None


def test_the_router_marks_what_it_left_out(engine: Engine) -> None:
    """A routed schema is compiled without a part; the text is checked against the user's."""
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True,
              "minItems": 2, "maxItems": 5}  # fmt: skip
    spec = GrammarSpec.json_schema(schema, partial=True, backend="auto")
    assert spec.partial and "uniqueItems" not in spec.text
    (output,) = engine.generate([Request(prompt="age: 42", grammar=spec, max_tokens=600)])
    values = json.loads(output.text)
    assert output.validated is (len(set(values)) == len(values))


def test_a_loose_output_that_was_cut_is_not_valid(engine: Engine) -> None:
    """A text that is no JSON yet does not satisfy the schema, whatever it would have become."""
    spec = GrammarSpec.json_schema(integer(multipleOf=7), partial=True, backend="xgrammar")
    (output,) = engine.generate([Request(prompt="age: 42", grammar=spec, max_tokens=3)])
    assert output.reason == "length" and output.validated is False


def test_what_nobody_can_check_is_refused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reference to elsewhere is refused before a token is made, and nothing is fetched."""
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_: pytest.fail("went to the network"))
    spec = GrammarSpec("json_schema", json.dumps({"$ref": "http://localhost/s"}), partial=True)
    (output,) = engine.generate([Request(prompt="age: 42", grammar=spec, max_tokens=9)])
    assert output.reason == "refused" and "cannot be checked" in (output.error or "")


def test_no_json_constants() -> None:
    """NaN and Infinity are Python's, not JSON's."""
    assert check_output({"type": "number"}, "1.5")
    assert not check_output({"type": "number"}, "NaN")
    assert not check_output({"type": "number"}, "-Infinity")


@pytest.mark.parametrize(
    "marker, tokens, text, valid",
    [
        ("</think>", [5, 6, 7], '9 is odd</think>{"age": 42}', True),
        ("</think>", [5, 6, 7], '9 is odd</think>{"age": 41}', False),
        ("</think>", [5, 6, 7], "9 is odd", None),
        (100, [5, 100, 42, 2], "9 is odd 42", True),
        (100, [5, 100, 41, 2], "9 is odd 41", False),
        (100, [5, 6], "9 is odd", None),
    ],
)
def test_only_what_follows_the_marker_is_checked(
    marker: str | int, tokens: list[int], text: str, valid: bool | None
) -> None:
    """Free text before the marker is not the schema's; without the marker there is no answer."""
    tokenizer: Any = SimpleNamespace(decode=lambda ids: f'{{"age": {ids[0]}}}')
    vocabulary: Any = SimpleNamespace(names={}, size=200, stop_ids=(2,))
    spec = GrammarSpec.json_schema(integer(multipleOf=7), partial=True).after(marker)
    nothing: Any = None
    running = Running(
        Request(prompt="x"), Output("x", tokens=tokens, text=text), [1], 9, (2,), decoder=nothing,
        grammar=Future(),
    )  # fmt: skip
    Validation(tokenizer, vocabulary)(running)
    assert running.output.validated is None, "nothing was compiled, nothing ran"
    assert running.grammar is not None
    running.grammar.set_result(CompiledGrammar(nothing, spec, nothing, 0))
    Validation(tokenizer, vocabulary)(running)
    assert running.output.validated is valid
