"""What was not enforced is checked and marked, never loosened silently."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from engine_util import demo_engine, mixed_requests

from graft.grammar import GrammarError
from graft.grammar import judge as judge_module
from graft.grammar.judge import Judge, check_output, found_in
from graft.grammar.matcher import CompiledGrammar
from graft.grammar.statement import GrammarSpec
from graft.models.engine import Engine
from graft.models.errors import RequestError
from graft.models.request import Event, Output, Request
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


class Waiting:
    """A judge that answers when it is told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Future[bool]]] = []

    def satisfies(self, schema: str, text: str) -> Future[bool]:
        self.asked.append((text, Future()))
        return self.asked[-1][1]


def drive(engine: Engine, wanted: Any) -> list[Event]:
    """Step until what came satisfies `wanted`."""
    events: list[Event] = []
    deadline = time.monotonic() + 120
    while not wanted(events):
        assert time.monotonic() < deadline
        events += engine.step()
    return events


def test_a_check_holds_up_nobody_and_its_output_only(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside the batch until it is known that the output can be checked, and not delivered until
    it was; all the while the others run to their ends. Cancelling ends the wait."""
    judge = Waiting()
    monkeypatch.setattr(engine._validation, "_judge", judge)
    spec = GrammarSpec.json_schema(integer(multipleOf=7), partial=True, backend="xgrammar")
    loose = [
        Request(prompt="age: 42", grammar=spec, max_tokens=40, id=name) for name in ("a", "b")
    ]
    others = [replace(r, id=f"o{i}") for i, r in enumerate(mixed_requests(3))]

    def ended(*names: str) -> Any:
        return lambda events: set(names) <= {e.id for e in events if e.finished}

    before = engine.generate([replace(r, id=None) for r in others])
    for request in loose:
        engine.submit(request)
    engine.submit(others[0])
    events = drive(engine, ended("o0"))
    assert {e.id for e in events} == {"o0"}, "nobody knows yet whether it can be checked"
    for text, verdict in judge.asked:
        assert text == "null"
        verdict.set_result(False)
    del judge.asked[:]
    events = drive(engine, lambda _: len(judge.asked) == 2)
    engine.submit(others[1])
    events += drive(engine, ended("o1"))
    assert engine.busy and not any(e.finished for e in events if e.id in "ab")
    with pytest.raises(RequestError, match="running already"):
        engine.submit(loose[0])
    judge.asked[0][1].set_result(True)
    engine.submit(others[2])
    events += drive(engine, ended("a", "o2"))
    assert engine.cancel("b") and not engine.cancel("b")
    events += drive(engine, ended("b"))
    outputs = {e.id: e.output for e in events if e.output is not None}
    assert json.loads(outputs["a"].text) == {"age": 42} and outputs["a"].validated is True
    assert outputs["b"].finished and outputs["b"].validated is False
    assert "cancelled while" in (outputs["b"].error or "")
    judge.asked[1][1].set_result(True)
    assert outputs["b"].validated is False and not engine.busy
    for i in (1, 2):
        assert outputs[f"o{i}"].tokens == before[i].tokens


ENDLESS = "^(a+)+$"
HOPELESS = "a" * 400 + "!"


def test_a_verdict_that_takes_for_ever_is_no_verdict() -> None:
    """A pattern that keeps Python's re busy for ever costs its process; the next one answers."""
    judge = Judge(limit_s=600)
    try:
        schema = json.dumps({"pattern": ENDLESS})
        assert judge.satisfies(schema, '"aa"').result(600)
        judge._limit_s = 0.2
        with pytest.raises(GrammarError, match=r"output cannot be checked: took longer than 0.2 s"):
            judge.satisfies(schema, json.dumps(HOPELESS)).result(600)
        judge._limit_s = 600
        assert not judge.satisfies(schema, '"ab"').result(600)
        with pytest.raises(GrammarError, match=r"output cannot be checked: .*nowhere"):
            judge.satisfies('{"$ref": "https://example.com/nowhere"}', "1").result(600)
        running = judge.satisfies(schema, json.dumps(HOPELESS))
    finally:
        child = judge._child
        judge.close()
    assert child is not None and child._process.returncode is not None, "nothing is left behind"
    with pytest.raises(GrammarError, match="cannot be checked"):
        running.result(600)
    with pytest.raises(GrammarError, match="too late"):
        judge.satisfies(schema, "1")


def test_an_output_that_cannot_be_checked_in_time_is_marked(engine: Engine) -> None:
    """The text comes, marked as not valid, with a sentence that says why."""
    spec = GrammarSpec.json_schema(
        {"const": HOPELESS, "pattern": ENDLESS}, partial=True, backend="xgrammar"
    )
    engine._validation._judge._limit_s = 600
    try:
        engine.submit(Request(prompt="Say.", grammar=spec, max_tokens=500, id="endless"))
        drive(engine, lambda _: engine._scheduler.seating.seated)
        engine._validation._judge._limit_s = 0.2
        (output,) = (e.output for e in drive(engine, lambda seen: seen and seen[-1].finished)
                     if e.output is not None)  # fmt: skip
    finally:
        engine._validation._judge._limit_s = 600
    assert output.finished and json.loads(output.text) == HOPELESS
    assert output.validated is False and "took longer than 0.2 s" in (output.error or "")


def test_patterns_of_a_schema_never_keep_the_router_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern that could is tried in a process that can be killed, then refused by name."""
    judge = Judge(search_s=600)
    monkeypatch.setattr(judge_module, "_shared", lambda: judge)
    schema = {"type": "object", "properties": {HOPELESS: {"type": "integer"}},
              "patternProperties": {ENDLESS: {"minimum": 1}}}  # fmt: skip
    try:
        assert found_in("^(ab?)+$", "aab") and not found_in("^(ab?)+$", "b")  # starts the process
        judge._search_s = 0.2
        with pytest.raises(GrammarError, match=r"pattern '\^\(a\+\)\+\$' cannot be checked: took"):
            GrammarSpec.json_schema(schema, backend="auto")
    finally:
        judge.close()


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
    judge = Judge()
    validation = Validation(tokenizer, vocabulary, judge)
    try:
        assert validation(running) is None, "nothing was compiled, nothing ran"
        assert running.grammar is not None
        running.grammar.set_result(CompiledGrammar(nothing, spec, nothing, 0))
        verdict = validation(running)
        if verdict is not None:
            verdict.result(120)
    finally:
        validation.close()
    assert (verdict is None) is (valid is None)
    assert running.output.validated is valid
